#!/bin/sh
# Unpacks the etcd of Debian's unstable release, for the test that upgrades a cluster: newer-etcd.sh DIRECTORY
# Needs apt-get and a mirror of Debian among its sources; installs nothing. Prints the path of the binary.
set -eu
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$1" "$state/lists/partial" "$state/archives/partial"
site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep '/debian/*$' | head -n 1)
test -n "$site" || { echo "apt-get knows no mirror of Debian: add one to its sources" >&2; exit 1; }
key=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$key] $site sid main" > "$state/sources"
apt() {
    apt-get -q -o Dir::Etc::SourceList="$state/sources" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$state/lists" \
        -o Dir::Cache="$state" -o APT::Sandbox::User=root "$@" >> "$state/log" 2>&1 || { tail -n 20 "$state/log" >&2; exit 1; }
}
apt update
directory=$(cd "$1" && pwd)
cd "$state"
apt download etcd-server
dpkg -x etcd-server_*.deb "$directory"
echo "$directory/usr/bin/etcd"
