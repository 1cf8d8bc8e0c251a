#!/bin/sh
# Makes what docker-compose.tls.yml needs, unless it is there: an authority, and certificates for the members and for
# clients of theirs, valid for ten years. certificates.sh [DIRECTORY]; by default, the one beside this file.
set -eu
directory=${1:-$(dirname "$0")/tls}
if [ -e "$directory/client.pem" ]; then
    echo "the certificates in $directory are there already"
    exit 0
fi
umask 077
mkdir -p "$directory"
cd "$directory"

request() {  # NAME: its key, and the request for its certificate
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
}

sign() {  # NAME EXTENSIONS SIGNER...
    name=$1
    echo "$2" | tr ';' '\n' > "$name.ext"
    shift 2
    openssl x509 -req -in "$name.csr" -out "$name.pem" -days 3650 -extfile "$name.ext" "$@"
    rm "$name.csr" "$name.ext"
}

{
    request ca
    sign ca "basicConstraints=critical,CA:TRUE;keyUsage=critical,keyCertSign" -signkey ca.key
    leaf="basicConstraints=CA:FALSE;keyUsage=critical,digitalSignature;extendedKeyUsage="
    hosts="DNS:localhost,IP:127.0.0.1,DNS:etcd-1,DNS:etcd-2,DNS:etcd-3"
    request server
    sign server "${leaf}serverAuth;subjectAltName=$hosts" -CA ca.pem -CAkey ca.key -CAcreateserial
    request client
    sign client "${leaf}clientAuth" -CA ca.pem -CAkey ca.key -CAcreateserial
} 2> openssl.log || { cat openssl.log >&2; exit 1; }
rm -f openssl.log ca.srl
echo "made certificates in $directory"
