"""TCP addresses for servers on this machine."""

from __future__ import annotations

import ipaddress
import socket
import sys

from ftcoord.errors import ConfigError, ServerError

LOOPBACK = "127.0.0.1"


class PortLost(ServerError):
    """Another process has the port; another port may work."""


class ReservedPort:
    """A TCP port kept for one server while this object lives, so that no other process takes it while the server is
    down.

    The reservation is a bound socket that does not listen. On Linux another socket with SO_REUSEADDR, which etcd sets,
    may listen on that port; elsewhere the reservation must be given up just before (`hand_over`).

    Raises:
        PortLost: the given port is in use, or may not be used.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            problem = f"cannot use {join(host, port)} for etcd: {(error.strerror or str(error)).lower()}"
            raise PortLost(f"{problem}; end what listens there, or choose another port (0: any free one)") from None
        self.number: int = self._socket.getsockname()[1]

    def hand_over(self) -> None:
        """Call this just before the server starts to listen."""
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        self._socket.close()


def join(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_address(host: str) -> str:
    """The IP address to listen on.

    Raises:
        ConfigError: neither an IP address nor ``localhost``.
    """
    if host == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise ConfigError("host", host, "an IP address of this machine, such as 127.0.0.1") from None


def local_address(host: str) -> str:
    """The IP address at which a server listening on `host` is reached from this machine."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
