"""Keeps objects of one process out of the hands of its forked children."""

from __future__ import annotations

import os

from ftcoord.errors import ForkedProcessError


class OwnerProcess:
    """The process that made an object. A child that is forked from it must neither use nor close the object.

    Args:
        problem: what the error says first, such as "this etcd client belongs to the parent process".
    """

    def __init__(self, problem: str) -> None:
        self.pid, self._problem = os.getpid(), problem

    @property
    def is_current(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raises ForkedProcessError in a forked child. To be called before a lock is taken: it may be held forever
        there, by a thread that the child does not have."""
        if not self.is_current:
            raise ForkedProcessError.of(self._problem)


_hidden: dict[int, tuple[int, int]] = {}
"""File descriptors that no forked child may keep open, and their files. Any thread, one step of a dict at a time."""


def identity_of(descriptor: int) -> tuple[int, int] | None:
    """Which file it stands for; None for none."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def hide(descriptor: int) -> None:
    """Have a forked child lose its copy of a descriptor: else its peer does not see that this process has ended.

    `unhide` it before it is closed: its number may be given again. Somebody else may close it, too: of another file
    that has its number then a child keeps its copy.
    """
    if (identity := identity_of(descriptor)) is not None:
        _hidden[descriptor] = identity


def unhide(descriptor: int) -> None:
    """Without effect for one that is not hidden."""
    _hidden.pop(descriptor, None)


def _lose_hidden() -> None:
    """In the child. The numbers stay taken, by /dev/null: objects of the parent's, copied, will close them once."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, identity in _hidden.items():
        if identity_of(descriptor) == identity:
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _hidden.clear()


os.register_at_fork(after_in_child=_lose_hidden)
