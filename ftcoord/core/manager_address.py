"""The address of one of ftcoord's managers, with the token that its port requires: `http://host:port#<token>`.

The token is the URL's fragment, which no client sends: torchft's own classes take the same address and ignore it.
It must not get into a log, so whatever people or torchft see is `parted` first.
"""

from __future__ import annotations

from typing import Final

TOKEN_BYTES: Final = 16
"""Of a token, which is written with two hexadecimal digits for each."""
_DIGITS: Final = frozenset("0123456789abcdef")


def with_token(address: str, token: str) -> str:
    """The address of a manager that requires this token."""
    return f"{address}#{token}"


def parted(address: str) -> tuple[str, str]:
    """An address without its token, and the token; empty if it has none."""
    plain, _, token = address.partition("#")
    is_token = len(token) == 2 * TOKEN_BYTES and _DIGITS.issuperset(token)
    return (plain, token) if is_token else (address, "")
