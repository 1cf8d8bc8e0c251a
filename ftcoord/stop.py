"""A stop that all ranks agree on: preemption, a drain, a checkpoint before maintenance.

Every rank leaves its loop at the same step, without a collective:

1. Somebody asks: a signal at a worker or agent, `AgreedStop.request`, `ftcoord stop JOB`. The reason is in the
   run's record first, and then in the store of the round's workers.
2. Each rank promises a step that it does not begin without an answer: the one after that which it is in.
3. The rank that promises last writes the answer, once: the highest promise.

A rank whose loop ends promises whatever the others do. When a rank dies the round ends, and the next one asks anew.
So it is with the groups of `ftcoord.elastic`: its request is a key of the run, which all members' stores share.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from types import FrameType
from typing import Final

from torch.distributed import DistError, DistStoreError, Store, TCPStore

from ftcoord import concurrency
from ftcoord.errors import ConfigError, EtcdError, StateError

log = logging.getLogger(__name__)

KEYS: Final = "ftcoord/stop"
"""The prefix of the keys of an agreed stop, in the store of a round's workers."""
ASKED: Final = f"{KEYS}/asked"
"""The reason, from a worker: its agent has it recorded."""
REASON: Final = f"{KEYS}/reason"
"""The recorded reason: each rank promises a step."""
_ENDED: Final = -1
"""The promise of a rank whose loop has ended."""
RELAY_EVERY: Final = 0.05
"""Seconds between two looks for a request: a store has no other way to report one to who serves it."""
RETRY_EVERY: Final = 1.0
_FOREVER: Final = timedelta(days=1)


@dataclass
class Place:
    """Where the ranks of one round or group agree.

    Args:
        store: shared by all of them.
        waits: the same store through another connection, on which a thread waits.
        rank, size: this process's rank, and the number of all.
        ask: asks all ranks to stop, with a reason.
        reason_key: where the recorded reason is.
        keys: the prefix of what they agree with: no earlier round or group had it.
        stop: the AgreedStop that was made here.
    """

    store: Store
    waits: Store
    rank: int
    size: int
    ask: Callable[[str], object]
    reason_key: str = REASON
    keys: str = KEYS
    stop: AgreedStop | None = None


_elastic: Place | None = None  # the thread that trains


def set_place(place: Place | None) -> None:
    """Where the group of `ftcoord.elastic` that trains now agrees; None if this process trains no longer."""
    global _elastic
    if place is None and _elastic is not None and _elastic.stop is not None:
        _elastic.stop.close()
    _elastic = place


class AgreedStop:
    """Tells each rank of a round when to leave its loop: all at the same step.

        stop = AgreedStop()
        for step in range(start, steps):
            if stop.at(step):
                save(step)
                break

    Make one in each worker, before its loop. Under torchrun with `etcd-v3` it needs no arguments; nor in a function
    that `elastic.run` calls, where one is made in each call.

    Promised: `at` returns True at the same step on every rank whose loop has not ended.
    None begins a step beyond that one.
    Not promised: an answer while a rank neither calls `at` nor ends, as one that hangs does.

    Args:
        store: a store that all ranks share and that lives as long as they do; that of torchrun's agents if None. Its
            keys below `ftcoord/stop` must be new.
        rank, world_size: this process's, and the number of all; RANK and WORLD_SIZE if None.
        signals: each asks for a stop instead of ending this process, once; the second one is handled as before. Only a
            main thread can have them: give () elsewhere.

    Raises ConfigError for arguments that are missing or wrong, StateError where there is one already or torchrun has no
    store for it, and what the store raises.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        group = _elastic if store is None else None
        self._place = group or _place(store, rank, world_size)  # stays
        if self._place.stop is not None:
            raise StateError(KEYS, "is in use by another AgreedStop: make one in each call of the function that trains")
        self._place.stop = self
        # The loop's thread and `_agree`'s share these two without a lock. Each writes its own before it reads the
        # other's, so that at least one of them sees what the other wrote: see `_promise`.
        self._step, self._limit = -1, inf
        self._answer: float = inf  # set once
        self._answered = concurrency.event()  # set when `_answer` is, or will never be
        self.reason = ""
        """Why the ranks stop; empty until somebody has asked."""
        # Held until the promise, and an answer, are written:
        self._promising = concurrency.lock("AgreedStop._promising")
        self._has_promised = False  # guarded by it
        self._old: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        for number in signals:
            old = signal.signal(number, self._on_signal)
            before = getattr(old, "__self__", None)  # of a group that is over: signals between the two ask, too
            self._old[number] = before._old.pop(number, None) if isinstance(before, AgreedStop) else old
        concurrency.thread(self._agree, "ftcoord-stop").start()
        if group is None:  # else `elastic.run` closes it
            atexit.register(self.close)

    def at(self, step: int) -> bool:
        """Whether to leave the loop before this step. Compares two numbers; waits only after a request.

        Call it with rising steps, the same on all ranks, also where it returned True and the rank went on.
        """
        self._step = step
        return step >= self._limit and self._is_last(step)

    def request(self, reason: str) -> None:
        """Ask all ranks to stop; the first reason counts. Raises what the store raises."""
        self._place.ask(reason or "requested by a worker")

    @property
    def has_stopped(self) -> bool:
        """Whether `at` has returned True."""
        return self._step >= self._answer

    def close(self) -> None:
        """This rank's loop has ended: the others need not wait for it. Called at the end of the process. Idempotent."""
        atexit.unregister(self.close)
        for number, old in self._old.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, old or signal.SIG_DFL)
        self._old = {}
        try:
            self._put_promise(_ENDED)
        except DistError as error:
            log.debug("rank %d could not write that its loop has ended: %s", self._place.rank, error)

    def _is_last(self, step: int) -> bool:
        self._answered.wait()
        return step >= self._answer

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask, on another thread: this one may hold the store's connection."""
        signal.signal(number, self._old.pop(number) or signal.SIG_DFL)  # None: not set by Python
        reason = f"rank {self._place.rank} received {signal.Signals(number).name}"
        concurrency.thread(self.request, "ftcoord-stop-request", reason).start()

    # -- on a thread of its own ---------------------------------------------------------------------------------------

    def _agree(self) -> None:
        try:
            self.reason = self._await(self._place.reason_key).decode()
            self._promise()
            self._answer = int(self._await(f"{self._place.keys}/answer"))
            log.info("all ranks stop at step %d: %s", self._answer, self.reason)
        except DistError as error:  # the round is over, or the process is about to end
            log.debug("rank %d waits for no stop any more: %s", self._place.rank, error)
        self._answered.set()

    def _await(self, key: str) -> bytes:
        while True:
            try:
                self._place.waits.wait([key], _FOREVER)
                return self._place.waits.get(key)
            except DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise

    def _promise(self) -> None:
        """Promise the first step that this rank has not begun.

        The loop may begin another step between the two statements. Then this thread reads it, or that one the limit.
        """
        while True:
            limit = self._step + 1
            self._limit = limit
            if self._step < limit:
                break
        self._put_promise(limit)

    def _put_promise(self, step: int) -> None:
        """Once. Who comes second waits: a process that ends in the middle would leave the others without an answer."""
        with self._promising:
            if self._has_promised:
                return
            self._has_promised = True
            place, store, keys = self._place, self._place.store, self._place.keys
            store.set(f"{keys}/promise/{place.rank}", str(step))
            if store.add(f"{keys}/promised", 1) == place.size:
                promised = store.multi_get([f"{keys}/promise/{rank}" for rank in range(place.size)])
                store.compare_set(f"{keys}/answer", "", str(max(map(int, promised))))


class StopRelay:
    """The part of rank 0's agent, which serves the workers' store: carries a request of a worker into the run's record,
    and the record's into the store.

    Args:
        store: the workers' store.
        recorded: returns the recorded reason; empty for none.
        record: records a reason; raises EtcdError and StateError if etcd does not take it.
    """

    def __init__(self, store: Store, recorded: Callable[[], str], record: Callable[[str], None]) -> None:
        self._store, self._recorded, self._record = store, recorded, record
        self._closed = concurrency.event()
        self._thread = concurrency.thread(self._relay, "ftcoord-stop-relay")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _relay(self) -> None:
        is_recorded = False
        while not self._closed.wait(RELAY_EVERY):
            try:
                if reason := self._recorded():
                    self._store.set(REASON, reason)
                    return
                if not is_recorded and self._store.check([ASKED]):
                    self._record(self._store.get(ASKED).decode())
                    is_recorded = True
            except (EtcdError, StateError) as error:
                log.warning("a worker asks all ranks to stop, which could not be recorded yet, trying again: %s", error)
                self._closed.wait(RETRY_EVERY)


def _number(name: str) -> int:
    """An environment variable of torchrun's workers."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(name, text or None, "torchrun sets it; elsewhere, give store, rank and world_size")
    return int(text)


def _place(store: Store | None, rank: int | None, world_size: int | None) -> Place:
    """That of these arguments; of the round, where they are missing."""
    rank = _number("RANK") if rank is None else rank
    size = _number("WORLD_SIZE") if world_size is None else world_size
    if not 0 <= rank < size:
        raise ConfigError("rank", rank, f"it must be 0 to {size - 1}, below the world size")
    asks_at = ASKED if store is None else REASON
    waits, shared = _two_of(store)
    return Place(shared, waits, rank, size, ask=lambda reason: shared.compare_set(asks_at, "", reason))


def _two_of(store: Store | None) -> tuple[Store, Store]:
    """Two handles of a store, each of which may block."""
    if store is not None:
        return store.clone(), store  # type: ignore[attr-defined]  # not among its declarations
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise StateError(
            KEYS, "needs the store of torchrun's agents: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or give a store"
        )
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    return TCPStore(host, port, is_master=False), TCPStore(host, port, is_master=False)
