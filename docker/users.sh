#!/bin/sh
# Adds the users of docker-compose.auth.yml to a running cluster, and switches authentication on; once is enough.
# users.sh [COMPOSE ARGUMENTS], such as -p PROJECT. COMPOSE names the command ("docker compose" unless set).
set -eu
cd "$(dirname "$0")/.."
prefix=${FTCOORD_KEY_PREFIX:-/ftcoord/v1}

arguments=$*

etcdctl() {
    ${COMPOSE:-docker compose} -f docker-compose.yml -f docker-compose.auth.yml ${arguments} exec -T etcd-1 \
        /usr/local/bin/etcdctl "$@" < /dev/null
}

root=root:${ETCD_ROOT_PASSWORD:-root}
if etcdctl --user "$root" auth status 2> /dev/null | grep -q "Authentication Status: true"; then
    echo "authentication is switched on already"
    exit 0
fi
etcdctl user add "$root"
etcdctl user grant-role root root
etcdctl role add ftcoord
etcdctl role grant-permission ftcoord --prefix=true readwrite "$prefix/"
etcdctl user add "${FTCOORD_USER:-ftcoord}:${FTCOORD_PASSWORD:-ftcoord}"
etcdctl user grant-role "${FTCOORD_USER:-ftcoord}" ftcoord
etcdctl auth enable
