"""The address of one of ftcoord's managers, with the token that its port requires: `http://host:port#<token>`.

Where torchft's own classes are served too, they have a port of their own, and the address is
`http://host:<torchft's port>#<token>:<ftcoord's port>`.

The token is in the URL's fragment, which no client sends: torchft's own classes take the same address and ignore it.
It must not get into a log, so whatever people or torchft see is `parted` first.
"""

from __future__ import annotations

from typing import Final

TOKEN_BYTES: Final = 16
"""Of a token, which is written with two hexadecimal digits for each."""
_HEX: Final = frozenset("0123456789abcdef")
_DECIMAL: Final = frozenset("0123456789")


def with_token(address: str, token: str, port: int | None = None) -> str:
    """The address of a manager that requires this token, at this port if it is not the address's own."""
    return f"{address}#{token}" + (f":{port}" if port is not None else "")


def parted(address: str) -> tuple[str, str]:
    """An address without its fragment, and the fragment; empty if it has no token."""
    plain, _, fragment = address.partition("#")
    token, colon, port = fragment.partition(":")
    is_token = len(token) == 2 * TOKEN_BYTES and _HEX.issuperset(token)
    is_port = not colon or (len(port) <= 5 and _DECIMAL.issuperset(port) and 0 < int(port or 0) < 65536)
    return (plain, fragment) if is_token and is_port else (address, "")


def key_of(fragment: str) -> tuple[bytes, int | None]:
    """What a manager's port requires, and that port if it is not the address's own; from a fragment that `parted`
    returned, which is not empty."""
    token, _, port = fragment.partition(":")
    return bytes.fromhex(token), int(port) if port else None
