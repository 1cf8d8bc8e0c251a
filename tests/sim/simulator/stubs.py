"""What stands in for sockets, torch's server and the operating system, as thinly as can be."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import invariants
from virtual import MemoryClient

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.coordination import policy
from ftcoord.core import rendezvous_records
from ftcoord.core.quorum_records import parse_replica
from ftcoord.core.rendezvous_records import CHUNK, WorkerFailure
from ftcoord.primitives import sentinel, sentinel_main, session
from ftcoord.primitives.sentinel import Order
from ftcoord.rendezvous import handler
from simulator import oracles

CONFIG = EtcdConfig.load("etcd:2379", env={})
"""Of every client: without one, leases have no sentinel."""


class Ports:
    """The ports that rounds are served at: each is given once."""

    def __init__(self) -> None:
        self._last = 10_000

    def next(self) -> int:
        self._last += 1
        return self._last


class WorkerStub:
    """In place of `WorkerWatch`: a worker fails when the simulation says so."""

    def __init__(
        self,
        _mark: str,
        failed: Callable[[WorkerFailure], None],
        _broken: object,
        _timer_of: Callable[[int], str],
        *,
        starting: bool,
    ) -> None:
        self._failed, self.watches = failed, True
        self._first: WorkerFailure | None = None

    def fail(self, failure: WorkerFailure) -> None:
        """A worker has ended like that."""
        self._first = self._first or failure
        self._failed(failure)

    def failure(self, _stopped_at: float | None = None) -> WorkerFailure | None:
        return self._first

    def end(self) -> None:
        self.watches = False


class MarkStub:
    """In place of `MarkedChildren`."""

    mark = "simulated"

    def close(self) -> None:
        pass


class SentinelStub:
    """The sentinel of one process: the program's own class, without its pipe and `/proc`. It runs in a process of its
    own while there is a lease to stand by.

    Args:
        begin: starts a thread of the sentinel's process.
    """

    def __init__(self, name: str, client: MemoryClient, begin: Callable[[Callable[[], None]], None]) -> None:
        self._name, self._begin = name, begin
        self._real = sentinel_main.Sentinel(self)  # type: ignore[arg-type]
        self._real._etcds[0] = sentinel_main.EtcdOfProcess(CONFIG, client)
        self._told = concurrency.event()
        self._orders: deque[Order] = deque()  # the pipe
        self._kept: dict[int, Order] = {}
        self.is_running = self.stopped = self.dead = False
        self.fate = "was killed by signal 9 (SIGKILL)"

    # -- as the process knows it --------------------------------------------------------------------------------------

    def keep(
        self,
        _config: EtcdConfig,
        lease_id: int,
        ttl: float,
        deaths: str,
        was: Sequence[str] = (),
        sent_at: float | None = None,
        *,
        starts: bool = True,
    ) -> None:
        at = concurrency.now() if sent_at is None else sent_at
        order = self._kept[lease_id] = Order(etcd=0, keep=lease_id, at=at, ttl=ttl, deaths=deaths, was=was, rests=False)
        self._tell(order)
        if not self.is_running and starts:
            self.is_running = True
            self._begin(self._run)

    def rest(self, lease_id: int) -> None:
        if lease_id in self._kept:
            order = self._kept[lease_id] = {**self._kept[lease_id], "rests": True}
            self._tell(order)

    @property
    def pid(self) -> int | None:
        return 1 if self.is_running else None

    @property
    def stands_by(self) -> frozenset[int]:
        """The leases that it gives up when the process dies."""
        return frozenset(self._kept if self.is_running else ())

    def drop(self, lease_id: int) -> None:
        if self._kept.pop(lease_id, None) is not None:
            self._tell(Order(drop=lease_id))

    def end_orphans(self, mark: str) -> None:
        pass

    def _tell(self, order: Order) -> None:
        self._orders.append(order)
        self._told.set()

    # -- as the sentinel knows the process ----------------------------------------------------------------------------

    def runs(self) -> bool:
        return not (self.stopped or self.dead)

    def cause(self) -> str:
        return f"{self._name} {self.fate}"

    def process_died(self) -> None:
        self.dead = True
        self._told.set()

    def _run(self) -> None:
        while self._kept or self.dead:
            self._told.clear()
            while self._orders:
                self._real.obey(self._orders.popleft())
            if self.dead:
                self._real.bury()
                break
            self._real.renew()
            left = self._real.next_due() - concurrency.now()
            self._told.wait(None if math.isinf(left) else max(left, 0))
        self.is_running = False


@contextlib.contextmanager
def replacing() -> Iterator[Callable[[Any, str, object], None]]:
    """How to put something in the place of what a module has, until the end of the context."""
    with contextlib.ExitStack() as undo:

        def put(module: Any, name: str, value: object) -> None:
            undo.callback(setattr, module, name, module.__dict__[name])
            setattr(module, name, value)

        yield put


@contextlib.contextmanager
def installed(
    seed: int, sentinel_of: Callable[[], Any], keeps: Callable[[session.KeptLease], None], *, chunk: int = CHUNK
) -> Iterator[None]:
    """All of this in place of the real ones; names and numbers come from the seed. `keeps` is told of each session's
    lease; `chunk` is the number of seats in one."""
    ports, draw = Ports(), random.Random(f"names {seed}")

    class Reservation:
        def __init__(self, _address: str) -> None:
            self.port = ports.next()

        def serve(self) -> Any:
            return SimpleNamespace(check=lambda _: False, set=lambda *_: None)

        def release(self) -> None:
            pass

    class KeptLease(session.KeptLease):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            keeps(self)

    with replacing() as put, invariants.checked():
        # Each process and the oracles would parse the same bytes, which always say the same.
        parsed = functools.cache(parse_replica)
        put(policy, "parse_replica", parsed)
        put(oracles, "parse_replica", parsed)
        put(rendezvous_records, "CHUNK", chunk)
        put(handler, "Reservation", Reservation)
        put(handler, "address_trouble", lambda *_: "")  # its hosts have no names to look up
        put(handler, "WorkerWatch", WorkerStub)
        put(handler, "MarkedChildren", MarkStub)
        put(handler, "raised_as_exceptions", contextlib.nullcontext)
        put(handler, "construct_and_record_rdzv_event", lambda **_: None)
        put(session, "KeptLease", KeptLease)
        put(sentinel.Sentinel, "of_process", staticmethod(sentinel_of))
        put(uuid, "uuid4", lambda: uuid.UUID(int=draw.getrandbits(128), version=4))
        yield
