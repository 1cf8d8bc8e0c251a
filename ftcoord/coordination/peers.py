"""Whether a caller's connection is still open. gRPC's server reports who calls, but not when that connection ends. The
kernel knows at once when the process at the other end dies."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeAlias
from urllib.parse import unquote

from ftcoord.proc import connections

log = logging.getLogger(__name__)

_ESTABLISHED: Final = "01"
_WORD: Final = 8
"""Hexadecimal digits of the 32-bit words in which an address is written, each in the byte order of this host."""

Peer: TypeAlias = tuple[IPv4Address | IPv6Address, int]
"""The address and port at the other end."""


def ended(port: int, peers: Collection[str]) -> frozenset[str]:
    """The peers, named as gRPC names them, that no longer have a connection to this local port.

    Returns none where the system does not say (outside Linux, or while it cannot read its tables), and leaves out names
    that are no addresses. A process that has inherited a connection keeps it open, and so does a proxy.
    """
    try:
        texts = connections()
    except OSError as error:  # all connections in a table that cannot be read would seem to have ended
        log.debug("which connections stand cannot be told for now: %s", error)
        return frozenset()
    if not texts:
        return frozenset()
    standing = {peer for text in texts for peer in connected(text, port)}
    known = {name: peer for name in peers if (peer := parse(name)) is not None}
    return frozenset(name for name, peer in known.items() if peer not in standing)


def parse(name: str) -> Peer | None:
    """A peer as gRPC names it: `ipv4:10.0.0.1:4711` or `ipv6:%5B::1%5D:4711`; None for any other kind."""
    kind, _, rest = unquote(name).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    address = host.removeprefix("[").removesuffix("]").partition("%")[0]  # the tables do not name the interface
    try:
        return _plain(ip_address(address)), int(port)
    except ValueError:
        log.debug("gRPC names a caller %r, which is no address", name)
        return None


def connected(text: str, port: int) -> Iterator[Peer]:
    """The peers connected to this local port, from a table of Linux."""
    ours = f":{port:04X}"
    for line in text.splitlines():
        if ours in line:  # which most lines are not: there may be tens of thousands
            _, local, remote, state, *_ = line.split()
            if local.endswith(ours) and state == _ESTABLISHED:
                address, _, number = remote.partition(":")
                yield _address(address), int(number, 16)


def _address(digits: str) -> IPv4Address | IPv6Address:
    words = (int(digits[at : at + _WORD], 16) for at in range(0, len(digits), _WORD))
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _plain(IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The same address for an IPv4 caller of an IPv6 listener, which may be written either way."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
