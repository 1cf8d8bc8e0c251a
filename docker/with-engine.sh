#!/bin/sh
# Runs a command with a Docker engine: with the one that answers, else with one of its own, which is stopped afterwards
# and leaves nothing behind. with-engine.sh COMMAND... For that it must be root, on Debian or Ubuntu or with dockerd there.
# Exits with 69 when no engine is to be had.
set -eu
NONE=69
PATH=$PATH:/usr/sbin:/sbin # where dockerd is, and what it needs

answers() {
    command -v docker > /dev/null && docker version > /dev/null 2>&1
}

has_compose() {
    docker compose version > /dev/null 2>&1 || docker-compose version > /dev/null 2>&1
}

install_packages() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
        echo "install Docker and Docker Compose first, or run this as root on Debian or Ubuntu" >&2
        exit "$NONE"
    fi
    apt-get update -q > "$1" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends docker.io docker-compose iptables \
            >> "$1" 2>&1 || { tail -n 20 "$1" >&2; exit "$NONE"; }
}

stop() {
    kill "$engine" 2> /dev/null || true
    wait "$engine" 2> /dev/null || true
    rm -rf "$directory"
}

if answers && has_compose; then
    exec "$@"
fi
directory=$(mktemp -d)
if ! command -v dockerd > /dev/null || ! command -v docker > /dev/null || ! has_compose; then
    install_packages "$directory/apt.log"
fi
if answers; then
    rm -rf "$directory"
    exec "$@"
fi
export DOCKER_HOST="unix://$directory/docker.sock"
dockerd --host "$DOCKER_HOST" --bridge none --data-root "$directory/data" --exec-root "$directory/exec" \
    --pidfile "$directory/pid" > "$directory/log" 2>&1 &
engine=$!
trap stop EXIT
trap 'exit 130' INT TERM
tries=0
until answers; do
    tries=$((tries + 1))
    if [ "$tries" -gt 120 ] || ! kill -0 "$engine" 2> /dev/null; then
        echo "dockerd does not start; the end of its log:" >&2
        tail -n 20 "$directory/log" >&2
        exit "$NONE"
    fi
    sleep 0.5
done
"$@"
