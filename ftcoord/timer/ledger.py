"""Shows at once, without etcd, whether a worker still holds a timer.

A release takes effect in etcd only after a network, which may be down. So the worker also notes its timers in memory
that other processes of its host can read, an anonymous file (memfd): for each slot, the token of the timer in it, 0 for
none. The server reads it before it kills. The kernel frees it when the process ends.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from ftcoord.core.timer_records import SLOTS

LEDGER_NAME: Final = "ftcoord-timers"
_WIDTH: Final = 8


class Ledger:
    """This process's own ledger, until it ends or `close()`. Written through a mapping: fast, and never into another
    file that got its descriptor."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(LEDGER_NAME)
        os.ftruncate(self.fd, SLOTS * _WIDTH)
        self._memory = mmap.mmap(self.fd, SLOTS * _WIDTH)

    def hold(self, slot: int, token: int) -> None:
        """Note that the timer `token`, 1 to 2**63 - 1, is held."""
        self._memory[slot * _WIDTH : (slot + 1) * _WIDTH] = token.to_bytes(_WIDTH, "little")

    def release(self, slot: int) -> None:
        """Note that the timer is no longer held."""
        self._memory[slot * _WIDTH : (slot + 1) * _WIDTH] = bytes(_WIDTH)

    def close(self) -> None:
        """Free the memory. Not before etcd has none of its timers: a server that cannot read it would kill."""
        self._memory.close()
        os.close(self.fd)


def holds(pid: int, ledger: int, slot: int, token: int) -> bool | None:
    """Whether a process of this host holds a timer; None if its ledger cannot be read.

    Reading it takes the same user, or the right to trace the process.
    """
    path = f"/proc/{pid}/fd/{ledger}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{LEDGER_NAME}"):
            return None
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), _WIDTH, slot * _WIDTH) == token.to_bytes(_WIDTH, "little")
    except OSError:
        return None
