"""A group of processes that torch has formed, its waits, and torch's private interface.

torch forms a group in the same process in one of two ways. 2.14 and newer reconfigure it (`Reconfigured`); older ones
make it anew (`MadeAnew`). No other module touches what is private in torch.
"""

from __future__ import annotations

import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, Work, distributed_c10d
from torch.futures import Future

from ftcoord import concurrency
from ftcoord.core.elastic import Arrangement
from ftcoord.errors import ConfigError, FtcoordError
from ftcoord.etcd.retry import TimeLimit

FORMING: Final = timedelta(seconds=3)
"""How long torch may take to connect the members. If one dies in the middle, gloo tries five times as long."""
SLICE: Final = timedelta(seconds=0.2)
"""How long a wait for another member's address lasts before it looks whether the group is over."""
DROPPING: Final = 2.0
"""Seconds that a process may take to release the groups that it gave up, before it ends."""
SETTLES: Final = 0.1
"""Seconds from the first sight of a process that waits until it is let in."""
MOST_TOLD: Final = 120
"""Characters of a backend's error in a reason."""
POLL: Final = 0.001
"""Seconds between two looks at work that cannot report its end."""


_api: Final[Any] = dist
"""The same, where only some releases have what is called."""


class MembersChanged(FtcoordError):
    """The group is over: a member was lost, or waits to join. Leave the function that `elastic.run` has called, as any
    other error would; it is called again when the next group is formed."""


class Group:
    """A formed group, until it is over. Thread-safe.

    Args:
        arrangement: its members.
        rank: this process's rank.
        device: where tensors must be for a collective.
    """

    def __init__(self, arrangement: Arrangement, rank: int, device: torch.device) -> None:
        self.arrangement, self.number, self.rank, self.device = arrangement, arrangement.number, rank, device
        self.world = len(arrangement.members)
        self.left = concurrency.event()
        """Set once the group is over or finished."""
        self.finished = False
        """Whether all members have finished. Written before `left` is set."""
        self._newcomer: tuple[str, float] | None = None  # and since when it waits; written by the watch's thread
        self.is_known = True
        """Whether all members learn by themselves why it is over."""
        self.failure: BaseException | None = None
        """The error of a collective that this process has seen fail."""
        self.reducers: list[Any] = []
        """Those of the DDPs of this group; the main thread."""
        self._lock = concurrency.lock("Group._lock")  # guards `_over`, and that no wait begins after it is set
        self._over: str = ""
        # By a key of each wait: what ends it. Whoever pops it ends it; a pop is one step.
        self._waits: dict[object, Callable[[MembersChanged], object]] = {}

    @property
    def over(self) -> str:
        """Why it is over; empty if it is not."""
        return self._over

    def note_newcomer(self, name: str) -> None:
        """A process waits to join; empty for none."""
        if not name:
            self._newcomer = None
        elif self._newcomer is None:
            self._newcomer = name, concurrency.now()

    def let_in(self) -> None:
        """End the group if a process waits to join, for long enough that it asks by now, and that others who were
        started with it may too."""
        if (newcomer := self._newcomer) is not None and concurrency.now() >= newcomer[1] + SETTLES:
            self.end(f"{newcomer[0]} joins", is_known=False)

    def end(self, why: str, *, is_known: bool = True) -> None:
        """The group is over: all waits end. Any thread; the first reason counts."""
        with self._lock:
            if self._over:
                return
            self._over, self.is_known = why, is_known
        self.left.set()
        for key in [*self._waits]:
            if (give_up := self._waits.pop(key, None)) is not None:
                give_up(MembersChanged(why))

    def at_end(self, call: Callable[[], object]) -> None:
        """Call this once the group is over, on any thread."""
        with self._lock:
            over = self._over
            if not over:
                self._waits[object()] = lambda _: call()
        if over:
            call()

    def fail(self, error: BaseException) -> None:
        """The group is over, since a collective has failed: with an error of the backend, whose text may be long."""
        if not self._over:  # else it failed since the group is over
            self.failure = error
        self.end(f"a collective failed: {str(error)[:MOST_TOLD]}", is_known=False)

    def finish(self) -> None:
        """All members have finished. Any thread."""
        self.finished = True
        self.left.set()

    def release(self) -> None:
        """Let go of what keeps torch's group, and so its connections. The reducers of its DDPs reduce nothing any more:
        they hook parameters that live on."""
        for reducer in self.reducers:
            reducer._remove_autograd_hooks()
        self.reducers.clear()

    def check(self) -> None:
        """Raises MembersChanged if the group is over."""
        if self._over:
            raise MembersChanged(self._over)

    def promise(self, work: Work, value: Any) -> Future[Any]:
        """A future with this value, which ends with the work, or with MembersChanged when the group is over."""
        ending = work.get_future()
        promise: Future[Any] = Future(devices=[self.device] if self.device.type != "cpu" else [])
        key = object()
        with self._lock:
            over = self._over
            if not over:
                self._waits[key] = promise.set_exception
        if over:
            promise.set_exception(MembersChanged(over))
            return promise

        def settle(done: Future[Any]) -> None:  # on a thread of torch's
            try:
                done.value()
            except RuntimeError as error:
                self.fail(error)
                return
            if self._waits.pop(key, None) is not None:
                promise.set_result(value)

        ending.add_done_callback(settle)
        return promise

    def wait(self, work: Work) -> None:
        """Wait for the work. Raises MembersChanged when the group is over. Ctrl-C interrupts it."""
        ended = concurrency.event()
        try:
            promise = self.promise(work, None)
        except (RuntimeError, NotImplementedError):  # such as a send, which has no future
            while not work.is_completed():
                self.check()
                concurrency.sleep(POLL)
        else:
            promise.add_done_callback(lambda _: ended.set())
            ended.wait()
            promise.value()
        work.wait()  # it has ended; on a GPU the current stream waits here for what it has enqueued

    def settle_device(self) -> None:
        """Wait until a GPU has done all that was enqueued, collectives too. Raises MembersChanged."""
        if self.device.type == "cpu":
            return
        reached = torch.Event(self.device.type)
        reached.record()
        while not reached.query():
            self.check()
            concurrency.sleep(POLL)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in this one. Raises MembersChanged."""
        work = dist.broadcast(tensor, 0, async_op=True)
        assert work is not None
        self.wait(work)
        return tensor


_current: Group | None = None  # the main thread


def current() -> Group:
    """The group that trains now. Raises RuntimeError outside of a function that `elastic.run` has called."""
    if _current is None:
        raise RuntimeError("there is no group here: call this in the function that @elastic.run decorates")
    return _current


def set_current(group: Group | None) -> None:
    """Name the group that trains now."""
    global _current
    _current = group


class Meeting(Store):
    """The store in which torch's members exchange their addresses: one of this process while it is alone, else the part
    of the run's store for one group. A wait in it ends when the group is over."""

    def __init__(self, shared: Store) -> None:
        super().__init__()
        self._shared = shared
        self._here: Store = HashStore()
        self._group: Group | None = None

    def be_alone(self) -> None:
        """Exchange nothing with others."""
        self._here, self._group = HashStore(), None

    def meet(self, group: Group) -> None:
        """Exchange addresses with the members of this group."""
        self._here, self._group = PrefixStore(f"groups/{group.number}", self._shared), group

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch."""
        deadline = concurrency.now() + (timeout or FORMING).total_seconds()
        while True:
            try:
                self._here.wait(keys, SLICE)
                return
            except dist.DistStoreError:
                if self._group is not None:
                    self._group.check()
                if concurrency.now() >= deadline:
                    raise

    def get(self, key: str) -> bytes:
        """See torch."""
        self.wait([key])
        return self._here.get(key)

    def set(self, key: str, value: Any) -> None:
        """See torch."""
        self._here.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """See torch."""
        return self._here.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See torch."""
        return self._here.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """See torch."""
        return self._here.check(keys)

    def delete_key(self, key: str) -> bool:
        """See torch."""
        return self._here.delete_key(key)


_kept: Final[list[Meeting]] = []
"""C++ calls a store that Python has freed in vain, and a group that was given up may still call it."""


class Way(ABC):
    """How this process forms groups. For one thread.

    Args:
        backend: torch's name of the backend.
        device: where tensors must be for a collective.
        timeout: how long a collective may take.
    """

    name: str
    """What all members must have alike."""

    def __init__(self, backend: str, device: torch.device, timeout: timedelta, store: Store) -> None:
        self.backend, self.device, self.timeout = backend, device, timeout
        self._meeting = Meeting(store)
        _kept.append(self._meeting)

    @abstractmethod
    def be_alone(self) -> str:
        """Leave the group, if there is one, and drop its connections, which frees the others. Returns the handle by
        which others reach this process."""

    @abstractmethod
    def form(self, group: Group) -> None:
        """Connect with the others. Raises RuntimeError or MembersChanged."""

    @abstractmethod
    def close(self) -> None:
        """Leave for good. Idempotent."""

    def others(self) -> list[dist.ProcessGroup]:
        """The process groups beside the default one."""
        default = distributed_c10d._get_default_group() if dist.is_initialized() else None
        return [one for one in distributed_c10d._world.pg_map if one is not default]


class Reconfigured(Way):
    """torch 2.14 and newer: the default group stays, and gets other members."""

    name = "reconfigure"

    def __init__(self, backend: str, device: torch.device, timeout: timedelta, store: Store) -> None:
        super().__init__(backend, device, timeout, store)
        bound = {} if device.type == "cpu" else {"device_id": device}
        _api.init_process_group(
            backend, store=self._meeting, rank=0, world_size=1, timeout=timeout, enable_reconfigure=True, **bound
        )

    def be_alone(self) -> str:
        for one in self.others():
            dist.destroy_process_group(one)
        self._meeting.be_alone()
        _api._reconfigure(secrets.randbits(60) | 1 << 60, [_api._get_reconfigure_handle()], timeout=FORMING).wait()
        handle: str = _api._get_reconfigure_handle()
        return handle

    def form(self, group: Group) -> None:
        self._meeting.meet(group)
        handles = [place.handle for place in group.arrangement.places]
        _api._reconfigure(group.number, handles, timeout=FORMING).wait()
        world = distributed_c10d._world
        world.pg_group_ranks[distributed_c10d._get_default_group()] = {rank: rank for rank in range(group.world)}
        world.group_count = 1  # the names of further groups are made of it, and must be the same on newcomers

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class MadeAnew(Way):
    """Older ones: the default group is given up, and another one made. Its threads and connections are released when
    the collectives in it have ended, which a dead peer's have at once, and a stopped peer's after their timeout."""

    name = "init"

    def __init__(self, backend: str, device: torch.device, timeout: timedelta, store: Store) -> None:
        super().__init__(backend, device, timeout, store)
        self._dropping: list[concurrency.Thread] = []
        # Gloo then connects in collectives, whose waits end with the group. Its constructor would wait for 15 s for a
        # member that dies meanwhile.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

    def be_alone(self) -> str:
        if dist.is_initialized():
            given_up: list[object] = [*distributed_c10d._world.pg_map]
            if "nccl" in self.backend:
                distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
            # Whoever drops the last reference waits for the group's collectives.
            thread = concurrency.thread(given_up.clear, "ftcoord-given-up")
            thread.start()
            self._dropping = [*(one for one in self._dropping if one.is_alive()), thread]
        distributed_c10d._world.group_count = 0  # addresses are named by it, and a group that was not formed counts too
        return ""

    def form(self, group: Group) -> None:
        self._meeting.meet(group)
        bound = {} if self.device.type == "cpu" else {"device_id": self.device}
        hook = sys.excepthook
        _api.init_process_group(
            self.backend, store=self._meeting, rank=group.rank, world_size=group.world, timeout=FORMING, **bound
        )
        sys.excepthook = hook  # torch puts another "[rank0]: " before tracebacks with each group
        getattr(_api, "set_timeout", distributed_c10d._set_pg_timeout)(self.timeout)
        if self.backend == "gloo":  # all connect now: in a later collective, who is slow would be waited for 15 s only
            work = dist.all_to_all_single(torch.empty(group.world), torch.zeros(group.world), async_op=True)
            assert work is not None
            group.wait(work)

    def close(self) -> None:
        self.be_alone()
        within = TimeLimit.of(DROPPING)  # a process that ends meanwhile may crash
        for thread in self._dropping:
            thread.join(within.left())


def way_of(backend: str | None, timeout: timedelta, store: Store) -> Way:
    """How this process forms groups; None takes nccl where there is a GPU, else gloo.

    Raises ConfigError for a backend that cannot, and if there is a default group already.
    """
    name, device = checked(backend)
    if hasattr(_api, "_reconfigure"):
        way = Reconfigured(name, device, timeout, store)
        if _api._supports_reconfigure():
            return way
        way.close()
    return MadeAnew(name, device, timeout, store)


REMADE: Final = ("gloo", "nccl")
"""Backends whose groups can be made anew in one process."""


def checked(backend: str | None) -> tuple[str, torch.device]:
    """The backend and its device. Raises ConfigError."""
    name = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if dist.is_initialized():
        raise ConfigError("elastic.run", "after init_process_group()", "leave that out: elastic.run makes the group")
    if name not in REMADE:
        raise ConfigError("backend", name, f"choose {' or '.join(REMADE)}: its groups can be formed again")
    return name, torch.device("cpu") if name == "gloo" else torch.device("cuda", torch.cuda.current_device())
