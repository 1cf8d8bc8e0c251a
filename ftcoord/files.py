"""The files that settings name. TLS' PEM files are read whole or refused.

gRPC ends the process over an empty key or certificate, and uses the system's authorities instead of an empty CA file.
Either may be read while a file is being replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ftcoord.errors import ConfigError

CERTIFICATE: Final = "CERTIFICATE-----"
PRIVATE_KEY: Final = "PRIVATE KEY-----"


def contents(name: str, path: str) -> bytes:
    """The contents of the file at `path`, which is the value of the setting `name`. Raises ConfigError when it cannot
    be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(name, path, f"the file must be readable: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise ConfigError(name, path, "this is not the path of a file") from None


def pem(name: str, path: str, kind: str) -> bytes:
    """The contents of a PEM file, which must be complete, with at least one `kind` in it. Raises ConfigError."""
    found = contents(name, path)
    if kind.encode() not in found:
        raise ConfigError(name, path, f"the file is not PEM with '-----BEGIN ... {kind}' in it")
    if found.count(b"-----BEGIN ") != found.count(b"-----END "):
        raise ConfigError(name, path, "the file is cut off: not every '-----BEGIN' in it has its '-----END'")
    return found


def is_anothers(cert: str, key: str) -> bool:
    """Whether the key is not the certificate's. Other problems of the two files are left to gRPC."""
    import ssl  # brings sockets, which nobody needs who only reads settings

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except OSError as error:  # ssl.SSLError too; a file that has gone meanwhile is missed by whoever reads it next
        return getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
    return False
