"""The tokens of managers that this process has been told of by quorums.

torchft logs the address that a replica heals from, and keeps it as a text. So the results that torchft gets have
addresses without tokens, and this remembers the tokens until a ManagerClient is made for such an address.
"""

from __future__ import annotations

from typing import Final

from ftcoord.core.manager_address import parted

MOST: Final = 100_000
"""The most tokens that are kept. Beyond that all are forgotten: a quorum brings those in use again."""

_tokens: dict[str, str] = {}  # by address; any thread, one step of a dict at a time


def without_token(address: str) -> str:
    """The address as others may see it. Its token is remembered."""
    plain, token = parted(address)
    if token:
        if len(_tokens) >= MOST:
            _tokens.clear()
        _tokens[plain] = token
    return plain


def with_known_token(address: str) -> tuple[str, str]:
    """An address without its token, and the token: that of the address, else the remembered one; empty if none is
    known."""
    plain, token = parted(address)
    return plain, token or _tokens.get(plain, "")
