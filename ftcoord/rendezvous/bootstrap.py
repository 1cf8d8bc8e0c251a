"""The bootstrap address of a round: each member holds a port open, in case it gets rank 0."""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore

from ftcoord.config import EtcdConfig

_STORE_TIMEOUT: Final = timedelta(seconds=60)


def own_address(local_addr: str | None, etcd: EtcdConfig) -> str:
    """The address at which the other nodes reach this host.

    `local_addr` if given; else the address from which this host reaches etcd, which needs no DNS. If etcd is on
    loopback, the host's name as torch takes it (`socket.getfqdn()`), or 127.0.0.1 if that does not resolve.
    """
    if local_addr:
        return local_addr
    for endpoint in etcd.endpoints:
        if not endpoint.is_loopback:
            return _address_towards(endpoint.host, endpoint.port) or socket.getfqdn()
    name = socket.getfqdn()
    return name if _resolves(name) else "127.0.0.1"


def _address_towards(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(address)  # a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


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
