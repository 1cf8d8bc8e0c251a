"""Protects objects of one process from use by its forked children."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from ftcoord.errors import ForkedProcessError


class OwnerProcess:
    """The process that made an object. A forked child must neither use nor close the object.

    Args:
        problem: the beginning of the error, such as "this etcd client belongs to the parent process".
    """

    def __init__(self, problem: str) -> None:
        self.pid, self._problem = os.getpid(), problem

    @property
    def is_current(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raises ForkedProcessError in a forked child. Call it before taking a lock: in the child, a thread that does
        not exist there may hold it forever."""
        if not self.is_current:
            raise ForkedProcessError.of(self._problem)


_hidden: dict[int, tuple[int, int]] = {}
"""File descriptors that no forked child may keep open, and their files. Any thread, one step of a dict at a time."""
_hidden_ports: set[int] = set()
"""Local TCP ports of which no forked child may keep a socket. Any thread, one step of a set at a time."""


def identity_of(descriptor: int) -> tuple[int, int] | None:
    """The file of a descriptor; None if it is not open."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def hide(descriptor: int) -> None:
    """Have forked children close their copy of a descriptor: else its peer does not see that this process has ended.

    Call `unhide` before closing it, because its number may be reused. If other code closes it and another file gets its
    number, a child keeps that one.
    """
    if (identity := identity_of(descriptor)) is not None:
        _hidden[descriptor] = identity


def unhide(descriptor: int) -> None:
    """Do not hide it any more. Does nothing for a descriptor that is not hidden."""
    _hidden.pop(descriptor, None)


def hide_port(port: int) -> None:
    """The same for all sockets at this local TCP port: gRPC's, whose descriptors are not known."""
    _hidden_ports.add(port)


def unhide_port(port: int) -> None:
    """Do not hide its sockets any more. Idempotent."""
    _hidden_ports.discard(port)


def _lose_hidden() -> None:
    """In the child. The numbers stay taken, by /dev/null: copies of the parent's objects will close them once."""
    nothing = os.open(os.devnull, os.O_RDWR)
    lost = [descriptor for descriptor, identity in _hidden.items() if identity_of(descriptor) == identity]
    for descriptor in (*lost, *_at_hidden_ports()):
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _hidden.clear()
    _hidden_ports.clear()


def _at_hidden_ports() -> Iterator[int]:
    for name in os.listdir("/dev/fd") if _hidden_ports else ():
        with contextlib.suppress(OSError):  # the descriptor with which this lists
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    place = one.getsockname() if one.family in (socket.AF_INET, socket.AF_INET6) else ()
                if place and place[1] in _hidden_ports:
                    yield int(name)


os.register_at_fork(after_in_child=_lose_hidden)
