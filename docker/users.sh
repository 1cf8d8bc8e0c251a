#!/bin/sh
# Adds the users of docker-compose.auth.yml to a running cluster, and switches authentication on; once is enough.
# users.sh [COMPOSE ARGUMENTS], such as -p PROJECT. COMPOSE names the command (unless set, "docker compose" if there is one,
# else docker-compose). Passwords have no spaces; they are in no command line, which all users of the host could read.
set -eu
cd "$(dirname "$0")/.."
prefix=${FTCOORD_KEY_PREFIX:-/ftcoord/v2}

arguments=$*
if [ -z "${COMPOSE:-}" ]; then
    COMPOSE="docker compose"
    docker compose version > /dev/null 2>&1 || COMPOSE=docker-compose
fi

etcdctl() {  # its standard input is ours; the container's environment has root's login
    ${COMPOSE} -f docker-compose.yml -f docker-compose.auth.yml ${arguments} exec -T etcd-1 /usr/local/bin/etcdctl "$@"
}

add() {  # USER PASSWORD
    printf '%s\n' "$2" | etcdctl user add --interactive=false "$1"
}

if etcdctl auth status < /dev/null 2> /dev/null | grep -q "Authentication Status: true"; then
    echo "authentication is switched on already"
    exit 0
fi
add root "${ETCD_ROOT_PASSWORD:-root}"
add "${FTCOORD_USER:-ftcoord}" "${FTCOORD_PASSWORD:-ftcoord}"
{
    etcdctl user grant-role root root
    etcdctl role add ftcoord
    etcdctl role grant-permission ftcoord --prefix=true readwrite "$prefix/"
    etcdctl user grant-role "${FTCOORD_USER:-ftcoord}" ftcoord
    etcdctl auth enable
} < /dev/null
