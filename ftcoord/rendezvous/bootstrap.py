"""The bootstrap address of a round: each member holds a port open, in case it gets rank 0."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore

from ftcoord import concurrency
from ftcoord.config import Endpoint, EtcdConfig
from ftcoord.core.rendezvous_records import RoundHead
from ftcoord.errors import ConfigError
from ftcoord.etcd.addresses import address_towards, own_addresses

_STORE_TIMEOUT: Final = timedelta(seconds=60)
NAMED_WITHIN: Final = 10.0
"""Seconds until a name that does not resolve is refused,"""
NAME_AGAIN_AFTER: Final = 0.5
"""and until it is looked up again."""
_ELSEWHERE: Final = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it is the default route."""
_GET_ADDRESS: Final = 0x8915
"""Linux's SIOCGIFADDR."""


def own_address(local_addr: str | None, etcd: EtcdConfig, *, alone: bool = False) -> str:
    """The address at which the other nodes reach this host.

    `local_addr` if given; else the address from which this host reaches etcd, which needs no DNS. If that is a loopback
    address, the host's name as torch takes it (`socket.getfqdn()`); but if that does not resolve here, or only to
    loopback, as in Debian's /etc/hosts, an address of this host's interfaces. A node that is always `alone` needs none:
    an interface may lose its address.
    """
    if local_addr:
        return local_addr
    if (found := next(filter(_is_reachable, own_addresses(etcd)), None)) is not None:
        return found
    name = socket.getfqdn()
    resolved = _addresses_of(name)
    if any(map(_is_reachable, resolved)):
        return name
    found = None if alone else next(filter(_is_reachable, _interfaces()), None)
    return found or (name if resolved else "127.0.0.1")


def check_local_addr(local_addr: str | None) -> None:
    """Raises ConfigError for a name that this host cannot resolve: the workers beside rank 0 connect to it, too.

    The name of a new pod may come into DNS some seconds after its start.
    """
    if local_addr is None or _is_ip(local_addr):
        return
    deadline = concurrency.now() + NAMED_WITHIN
    while not _addresses_of(local_addr):
        if concurrency.now() > deadline:
            allowed = "it does not resolve on this host; give a DNS name or address that all nodes know (--local-addr)"
            raise ConfigError("local_addr", local_addr, allowed)
        concurrency.sleep(NAME_AGAIN_AFTER)


def address_trouble(round_: RoundHead, host: str, address: str) -> str:
    """Why the workers of a round will not meet at its bootstrap address, and what to do; empty if they may, as far as
    this node can tell. Of a large round it knows only some of the hosts.

    Args:
        host: this node's, as in its seat.
        address: this node's own.
    """
    hosts = {rank: seat.host for rank, seat in round_.known.items()}
    first = hosts.get(0, "rank 0's node")
    is_here = _machine(first) == _machine(host) if 0 in hosts else round_.address == address
    if len({*map(_machine, (*hosts.values(), host))}) == 1 or not (why := _why_unreachable(round_.address, is_here)):
        return ""
    return (
        f"workers on other hosts cannot reach {round_.address} (MASTER_ADDR): it {why}; start {first} with"
        " --local-addr=<a DNS name or address of its host that the others reach>"
    )


def _machine(host: str) -> str:
    """The machine of a node, by the name that people see."""
    return host.partition(" (pid ")[0]


def _why_unreachable(address: str, is_here: bool) -> str:
    """`is_here`: whether this is rank 0's host, where its name may well mean loopback."""
    if not _is_reachable(address):
        return "is an address of one host only"
    if is_here or _is_ip(address):
        return ""
    resolved = _addresses_of(address)
    if not resolved:
        return "does not resolve on this host"
    return "" if any(map(_is_reachable, resolved)) else f"means this host here ({', '.join(resolved)})"


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_reachable(address: str | None) -> bool:
    """Whether other hosts may reach it: not loopback, nor a wildcard, nor an IPv6 address of one link."""
    if address is None or Endpoint(address).is_loopback:
        return False
    with suppress(ValueError):
        ip = ipaddress.ip_address(address)
        return not (ip.is_unspecified or (ip.version == 6 and ip.is_link_local))
    return True


def _interfaces() -> Iterator[str | None]:
    """The address on the default route; then, on Linux, an IPv4 address of each interface."""
    yield address_towards(_ELSEWHERE, 9)
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has none
                    found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                    yield socket.inet_ntoa(found[20:24])


def _addresses_of(name: str) -> list[str]:
    """What a name resolves to; empty if it does not."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):  # the latter for a label that is empty or too long
        return []


class Reservation:
    """A listening port. Peers that connect early wait in its backlog, and no other process can take it meanwhile.

    For a loopback address it listens on loopback only, else on all interfaces, as TCPStore does.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        loopback = address in ("127.0.0.1", "localhost", "::1")
        self._socket = _listen(address if loopback else "")
        self.port = int(self._socket.getsockname()[1])

    def serve(self) -> TCPStore:
        """Turn the port into a TCPStore server. The reservation is used up."""
        own = "::1" if self.address == "::1" else "127.0.0.1"  # the server's own client connects from this host
        fd = self._socket.detach()
        return TCPStore(
            own, self.port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, master_listen_fd=fd
        )

    def release(self) -> None:
        """Free the port. Idempotent."""
        self._socket.close()


def _listen(host: str) -> socket.socket:
    if host or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=4096)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
