"""What this process keeps alive in etcd: its leases, by a thread, and by the sentinel beside it."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Final
from weakref import WeakSet

import pytest
from helpers import DEADLINE, eventually

from ftcoord import concurrency
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.primitives.session import KeptLease, Renewer

GIVE_UP: Final = 10.0
"""Seconds that a renewal may take which is under way when its lease is given up."""
_blamed = WeakSet[threading.Thread]()
"""Threads that could not be ended: a test was blamed for each."""


def check(timeout: float = DEADLINE) -> None:
    """Fail if anything is kept alive for longer than `timeout` seconds. It is given up then: whoever asks next is not
    blamed for it."""
    _close_stores()
    _end_duty()
    try:
        eventually(lambda: not _alive(), lambda: f"the end of {', '.join(_alive())}", timeout)
    except pytest.fail.Exception:
        with suppress(pytest.fail.Exception):
            eventually(_gives_up, "nothing is kept alive any longer", GIVE_UP)
        _blamed.update(_threads())
        raise


def with_duty() -> int | None:
    """The pid of the sentinel that has to end this process's orphans: it stays as long as this process."""
    sentinel = concurrency.of_process(Sentinel)
    return sentinel.pid if sentinel._mark else None


def _end_duty() -> None:
    """This process goes on with the next test."""
    if with_duty() is not None:
        sentinel = concurrency.of_process(Sentinel)
        sentinel.end_orphans("")
        with sentinel._lock:
            sentinel._end_if_idle()


def _close_stores() -> None:
    """A store that was dropped stays open until the process ends, which is not what the next test should wait for."""
    if (module := sys.modules.get("ftcoord.store")) is not None:  # most tests need no torch
        for end in concurrency._ends.copy():
            known = end._finalizer.peek()
            if known is not None and isinstance(known[0], module.EtcdStore):
                known[0].close()


def _alive() -> list[str]:
    said = [f"the keep-alive thread of {len(_leases())} leases"] if _threads() else []
    sentinel = concurrency.of_process(Sentinel).pid
    return [*said, *([f"the sentinel, process {sentinel}"] if sentinel is not None else [])]


def _gives_up() -> bool:
    for lease in _leases():
        lease.stop()
    return not _alive()


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "ftcoord-leases" and one not in _blamed]


def _leases() -> list[KeptLease]:
    """Those that are kept alive, but one that is renewed just now."""
    return list(Renewer.of_process()._due)
