"""What the kernel of the timers' host does: it tells processes apart, shows what they hold, and kills them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.timer import api

from ftcoord import concurrency
from ftcoord.core.timers import Timer, Worker
from ftcoord.timer import etcd_timer
from simulator.stubs import replacing

if TYPE_CHECKING:
    from simulator.world import Process, World

HOST: Final = "host"
LEDGER: Final = 3
"""The descriptor of each process's ledger: of those that have one pid, one after the other, it is the same."""


class LedgerStub:
    """In place of `Ledger`: memory that the kernel shows to others as long as the process lives."""

    fd = LEDGER

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def note(self, slot: int, token: int) -> None:
        self.tokens[slot] = token

    def close(self) -> None:
        self.tokens.clear()


class Kernel:
    """The processes of a host. One that is started in place of another gets its pid."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pids: list[str] = []
        self._ledgers: dict[str, LedgerStub] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """All of this in place of the real one, and of what torch starts a thread with."""
        world, draw = self._world, random.Random(f"tokens {self._world.plan.seed}")
        with replacing() as put:
            put(etcd_timer, "os", SimpleNamespace(getpid=lambda: self._pid(world.asking)))
            put(etcd_timer, "secrets", SimpleNamespace(randbits=draw.getrandbits))
            put(etcd_timer, "Ledger", self._new_ledger)
            put(etcd_timer, "this_process", self._describe)
            put(etcd_timer, "host_id", lambda: HOST)
            put(etcd_timer, "holds", self._holds)
            put(etcd_timer, "send_if", self._send_if)
            put(api, "threading", SimpleNamespace(Thread=_watchdog))
            yield

    def _pid(self, process: Process) -> int:
        slot = process.name.partition(".")[0]
        if slot not in self._pids:
            self._pids.append(slot)
        return 100 + self._pids.index(slot)

    def _describe(self, ledger: int) -> Worker:
        process = self._world.asking
        return Worker(HOST, self._pid(process), self._started(process), HOST, -1, ledger)

    def _started(self, process: Process) -> int:
        """When it began: each at another time."""
        return list(self._world.begun).index(process.name)

    def _new_ledger(self, _prefix: str) -> LedgerStub:
        ledger = self._ledgers[self._world.asking.name] = LedgerStub()
        return ledger

    def _having(self, pid: int) -> Process | None:
        """The process that has this pid now."""
        return next(
            (one for one in self._world.begun.values() if one.lives and one.role.shares_host and self._pid(one) == pid),
            None,
        )

    def _holds(self, _prefix: str, worker: Worker, timer: Timer) -> bool:
        process = self._having(worker.pid)
        if process is None or self._started(process) != worker.start:
            return False
        return self._ledgers[process.name].tokens.get(timer.slot) == timer.token

    def _send_if(self, pid: int, _number: int, is_it: Callable[[], bool]) -> bool:
        process = self._having(pid)
        if process is None:
            raise ProcessLookupError
        if not is_it():
            return False
        self._world.reaped(process, self._world.asking)
        return True


def _watchdog(target: Callable[[], None], **_: Any) -> concurrency.Thread:
    """In place of `threading.Thread`: one of the simulation's."""
    return concurrency.thread(target, "watchdog")
