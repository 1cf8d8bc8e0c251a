"""The files that settings name. TLS' PEM files are read whole or refused.

gRPC ends the process over an empty key or certificate, and uses the system's authorities instead of an empty CA file.
Either may be read while a file is being replaced.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ftcoord.errors import ConfigError

CERTIFICATE: Final = "CERTIFICATE-----"
PRIVATE_KEY: Final = "PRIVATE KEY-----"
_ENCRYPTED: Final = (b"-BEGIN ENCRYPTED", b"4,ENCRYPTED")
_BYTE_ORDER_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_CERTIFICATE: Final = re.compile(b"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_HASHED: Final = re.compile(r"[0-9a-f]{8}\.[0-9]+")
"""The names that OpenSSL looks for in a directory of authorities."""


def contents(name: str, path: str) -> bytes:
    """The contents of the file at `path`, which is the value of the setting `name`. Raises ConfigError when it cannot
    be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(name, path, f"the file must be readable: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise ConfigError(name, path, "this is not the path of a file") from None


def secret(name: str, path: str) -> str:
    """A password or token from a file, without what editors and shells write around it. Raises ConfigError."""
    try:
        return bare(contents(name, path).decode())
    except UnicodeDecodeError:
        raise ConfigError(name, path, "the file must hold it as UTF-8 text") from None


def bare(text: str) -> str:
    """A text without a byte order mark and without line ends after it."""
    return text.removeprefix("\ufeff").rstrip("\r\n")


def pem(name: str, path: str, kind: str) -> bytes:
    """The contents of a PEM file, which must be complete, with at least one `kind` in it. Raises ConfigError."""
    found = contents(name, path)
    if found.startswith(_BYTE_ORDER_MARKS):  # OpenSSL reads such a file in one place, and gRPC in none
        raise ConfigError(name, path, "the file begins with a byte order mark; save it as plain ASCII, without one")
    if kind.encode() not in found:
        raise ConfigError(name, path, f"the file is not PEM with '-----BEGIN ... {kind}' in it")
    if found.count(b"-----BEGIN ") != found.count(b"-----END "):
        raise ConfigError(name, path, "the file is cut off: not every '-----BEGIN' in it has its '-----END'")
    if kind == PRIVATE_KEY and any(mark in found for mark in _ENCRYPTED):
        plain = "openssl pkey -in KEY -out PLAIN_KEY"
        raise ConfigError(
            name, path, f"the key is encrypted; etcd clients need an unencrypted one, as {plain} writes it"
        )
    return found


def system_authorities() -> bytes | None:
    """The certificates of the authorities that this system trusts, as `ssl.create_default_context` finds them: in
    SSL_CERT_FILE and SSL_CERT_DIR, or where OpenSSL was built to look. None if there are none: gRPC then uses its own
    list."""
    import ssl  # brings sockets, which nobody needs who only reads settings

    paths = ssl.get_default_verify_paths()
    hashed = Path(paths.capath).iterdir() if paths.capath else ()
    files = [Path(paths.cafile)] if paths.cafile else []
    files += sorted(one for one in hashed if _HASHED.fullmatch(one.name))
    found: dict[bytes, None] = {}
    for file in files:
        try:
            found.update(dict.fromkeys(_CERTIFICATE.findall(file.read_bytes())))
        except OSError:  # a link to a file that is gone; OpenSSL passes it over too
            continue
    return b"\n".join(found) + b"\n" if found else None


def is_anothers(cert: str, key: str) -> bool:
    """Whether the key is not the certificate's. Other problems of the two files are left to gRPC."""
    import ssl  # brings sockets, which nobody needs who only reads settings

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except OSError as error:  # ssl.SSLError too; a file that has gone meanwhile is missed by whoever reads it next
        return getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
    return False
