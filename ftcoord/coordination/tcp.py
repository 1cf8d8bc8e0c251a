"""TCP options of ranks and managers."""

from __future__ import annotations

import select
import socket
from typing import Final

KEEPALIVE_IDLE: Final = 15
"""Seconds without data from the other host after which it is probed."""
KEEPALIVE_INTERVAL: Final = 5
"""Seconds between two probes."""
KEEPALIVE_PROBES: Final = 3
"""How many probes may stay unanswered."""


def keep_alive(connection: socket.socket) -> None:
    """End the connection about 30 s after the other host loses power, and send small messages at once. Sockets accepted
    from a listening socket inherit this."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"TCP_KEEPIDLE": KEEPALIVE_IDLE, "TCP_KEEPINTVL": KEEPALIVE_INTERVAL, "TCP_KEEPCNT": KEEPALIVE_PROBES}
    values["TCP_USER_TIMEOUT"] = 1000 * (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES)
    for name, value in values.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_hung_up(connection: int) -> bool:
    """Whether the other end of a connection, given by its descriptor, has closed it, even if earlier bytes are still
    unread. Always False where the system does not say."""
    hung_up = getattr(select, "POLLRDHUP", 0)
    poll = select.poll()
    poll.register(connection, hung_up)
    return bool(poll.poll(0))
