"""The processes of one history, what they reach etcd by, and what may be done to them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from virtual import (
    DELIVERED,
    LOST_ANSWER,
    LOST_REQUEST,
    NEVER,
    REFUSED,
    Call,
    Fate,
    MemoryClient,
    MemoryEtcd,
    Scheduler,
)
from virtual.processes import Clock

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.core.layout import decider_key, member_of
from ftcoord.core.lease import SessionState
from ftcoord.etcd.api import Event, Get, KeyValue, Span
from ftcoord.primitives.session import KeptLease, _Phase
from simulator.copies import Copies
from simulator.oracles import RUN, Oracles, Violation, is_member_key, require
from simulator.plan import Network, Plan
from simulator.ports import Sockets
from simulator.stubs import CONFIG, SentinelStub
from simulator.trace import Trace

if TYPE_CHECKING:
    from simulator.roles import Role

LEASE_TTL: Final = 5
"""Seconds, of all members."""
EXPIRY_THREAD: Final = "ftcoord-memory-etcd"
"""The thread that ends leases whose time is over."""
MAIN: Final = "operator"
"""The lane of the diagram in which faults stand."""


class Link:
    """How a process reaches etcd: the fate of its calls."""

    def __init__(self, network: Network, draw: random.Random, note: Callable[[str, object], None]) -> None:
        self._draw, self._note, self._delay = draw, note, network.delay
        self._is_good = network == Network()
        # What is as likely as that: made of when it arrives late, and of when it arrives again.
        self._misfortunes: tuple[tuple[float, Callable[[float, float], Fate]], ...] = (
            (network.refused, lambda _late, _again: REFUSED),
            (network.lost_requests, lambda _late, _again: LOST_REQUEST),
            (network.lost_answers, lambda _late, _again: LOST_ANSWER),
            (network.late, lambda late, _again: Fate(arrives=late, breaks=0)),
            (network.twice, lambda _late, again: Fate(again=again)),
            (network.slow, lambda late, _again: Fate(answers=late)),
        )
        self.cut = ""
        """Which direction nothing gets through: requests, answers or neither."""

    def __call__(self, call: Call) -> Fate:
        fate = self._fate()
        if call.method in ("txn", "grant", "revoke"):
            lost = " (refused)" if fate.refused else " (lost)" if NEVER in (fate.arrives, fate.answers) else ""
            self._note(
                ">" if not lost else "!", call.asked if call.method == "txn" else f"{call.method}s a lease{lost}"
            )
        return fate

    def _fate(self) -> Fate:
        if self.cut:
            return Fate(arrives=NEVER) if self.cut == "requests" else Fate(answers=NEVER)
        if self._is_good:
            return DELIVERED
        chance, late, again = self._draw.random(), self._draw.uniform(0, 3.0), self._draw.uniform(0, 3.0)
        for likely, fate in self._misfortunes:
            if chance < likely:
                return fate(late, again)
            chance -= likely
        if not self._delay:
            return DELIVERED
        return Fate(self._draw.uniform(0, self._delay), self._draw.uniform(0, self._delay))


class Lag:
    """Watches of one client that hear of changes late, while its calls are answered; each by itself, since the watches
    of a stream have no common order."""

    def __init__(self, client: MemoryClient) -> None:
        self._watches = client._watches
        self._deliver = self._watches._handle
        self._lagging: Callable[[], bool] | None = None
        self._is_late: dict[object, bool] = {}
        self._held: list[tuple[Any, Any, Any]] = []  # only the client's thread, as all of it but for `begin`
        self._watches._handle = self._handle  # type: ignore[method-assign]

    def begin(self, is_late: Callable[[], bool]) -> None:
        """From now on those watches lag of which this is true."""
        self._lagging = is_late

    def end(self) -> None:
        """They hear of all that they have missed, in etcd's order."""
        self._watches._inbox.put((None, None, self))

    def _handle(self, source: Any, subscription: Any, item: Any) -> None:
        if item is self:
            held, self._held, self._lagging = self._held, [], None
            self._is_late.clear()
            for entry in held:
                self._deliver(*entry)
        elif self._lagging is not None and self._is_late.setdefault(source, self._lagging()):
            self._held.append((source, subscription, item))
        else:
            self._deliver(source, subscription, item)


class Process:
    """One life of a process: it runs its role until it is told to leave, or is killed."""

    def __init__(self, world: World, role: Role, name: str) -> None:
        self.world, self.role, self.name = world, role, name
        draw = random.Random(f"{world.plan.seed} {name}")
        self.link = Link(world.plan.network, draw, self.note)
        self.client = self._client()
        self.lag = Lag(self.client)
        self.leaves = concurrency.event()
        self.is_killed = self.is_stopped = self.is_done = self.is_cut = self.has_lost_its_host = False
        self.port_cut = ""
        """What does not get through to or from its ask port and lines, though etcd is reached: requests or answers."""
        self.resumed_at = 0.0
        self.sticks = False
        """Whether the next thread that decides stays in there until `free()`."""
        self.stuck: tuple[float, list[KeyValue]] | None = None
        """Since when one does, and the offices that this process had then."""
        self._is_free = concurrency.event()
        self.killed_by: Process | None = None
        self._sentinels_client = self._client(sentinel=True)
        self.sentinel = SentinelStub(name, self._sentinels_client, self._begin_sentinel)
        pace = random.Random(f"{world.plan.seed} host") if role.shares_host else draw
        clock = Clock(1 + pace.uniform(-0.01, 0.01) if world.plan.drifts else 1.0)
        world.scheduler.set_clock(name, clock)
        world.scheduler.set_clock(self.sentinels_name, clock)
        self._clock = clock
        world.begun[name] = self
        self.begin(self._run, name)

    @property
    def sentinels_name(self) -> str:
        return f"{self.name}'s sentinel"

    @property
    def lives(self) -> bool:
        return not (self.is_killed or self.is_done)

    def trusts(self, lease: KeptLease) -> bool:
        """Whether it takes a lease of its own for alive, by its own clock: nobody asks it."""
        now = self.clock_at(self.world.scheduler.time)
        return lease._phase is not _Phase.LOST and lease.times.state(now) is SessionState.CONNECTED

    def clock_at(self, time: float) -> float:
        """What its monotonic clock says at a time of the world's."""
        return time * self._clock.rate

    def note(self, mark: str, what: object) -> None:
        """Something that it does, for the trace."""
        self.world.trace.note(self.world.scheduler.time, self.name, mark, what)

    def begin(self, work: Callable[[], None], name: str) -> None:
        """Start one more thread of it."""
        with self.world.scheduler.process(self.name):
            thread = concurrency.thread(work, name)
        thread.start()

    def rest(self, seconds: float) -> bool:
        """Let time pass; whether it is to leave."""
        return self.leaves.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Let time pass between two things that its user does."""
        self.rest(self.world.plan.pace * seconds)

    def check(self, told: Callable[..., None], *what: object) -> None:
        """Have an oracle judge what this process was told: it may not be heard by who catches errors."""
        self.world.oracles.counts["answers"] += 1
        try:
            told(self.name, *what)
        except Violation as violation:
            self.world.scheduler.fail(violation)

    # -- what befalls it ----------------------------------------------------------------------------------------------

    def kill(self, *, with_host: bool) -> None:
        """SIGKILL; or its host is lost, and its sentinel with it."""
        self.is_killed, self.has_lost_its_host = True, with_host
        self.client.cut_off()
        self.world.scheduler.pause(self.name)
        if not with_host:
            self.world.sockets.killed(self)
        if with_host:
            self._sentinels_client.cut_off()
            self.world.scheduler.pause(self.sentinels_name)
        else:
            self.sentinel.process_died()

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = self.sentinel.stopped = True
        self.world.scheduler.pause(self.name)

    def resume(self) -> None:
        if self.is_stopped and not self.is_killed:
            self.is_stopped = self.sentinel.stopped = False
            self.resumed_at = self.world.scheduler.time
            self.world.scheduler.resume(self.name)

    def stick(self) -> None:
        """A thread that decides stays in a call."""
        self.sticks = True
        self._is_free.clear()

    def free(self) -> None:
        self.sticks, self.stuck = False, None
        self._is_free.set()

    def decides(self) -> None:
        """One of its threads is about to decide."""
        if self.sticks:
            offices = [kv for kv in map(self.world.office, self.world.groups) if kv is not None]
            offices = [kv for kv in offices if self is self.world.owners.get(kv.lease)]
            self.stuck = self.stuck or (self.world.scheduler.time, offices)
            self._is_free.wait()

    def cut(self, direction: str) -> None:
        """Nothing gets through any longer in this direction: requests, answers, or both. Of its sentinel neither: the
        two are on one host."""
        self.is_cut = True
        if direction == "both":
            self.client.cut_off()
            self._sentinels_client.cut_off()
            return
        self.link.cut = direction  # the sentinel's too
        if direction == "answers":
            self.client._watches.disconnect()

    def mend(self) -> None:
        """End of `cut()`, also for the sentinel of a process that was killed meanwhile, unless its host is lost."""
        self.link.cut, self.is_cut = "", False
        if not self.is_killed:
            self.client.reconnect()
        if not self.has_lost_its_host:
            self._sentinels_client.reconnect()

    def jump(self, seconds: float) -> None:
        """The wall clock of its host is set."""
        self._clock = self._clock._replace(wall=self._clock.wall + seconds)
        for name in (self.name, self.sentinels_name):
            self.world.scheduler.set_clock(name, self._clock)

    # -- its threads --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.note("o", f"starts as {type(self.role).__name__.lower()}")
        self.role.live(self)
        self.client.close()
        self.is_done = True
        self.note("x", "ends")

    def _begin_sentinel(self, run: Callable[[], None]) -> None:
        with self.world.scheduler.process(self.sentinels_name):
            thread = concurrency.thread(run, "sentinel")
        thread.start()

    def _client(self, *, sentinel: bool = False) -> MemoryClient:
        with self.world.scheduler.process("main"):
            client = self.world.etcd.client(self.link)
        client.config = CONFIG
        grant = client.grant

        def granting(ttl: int, *, timeout: float | None = None) -> object:
            lease = grant(ttl, timeout=timeout)
            self.world.owners[lease.id] = self
            return lease

        if not sentinel:
            client.grant = granting  # type: ignore[method-assign, assignment]
        return client


class World:
    """All that one history has."""

    def __init__(self, scheduler: Scheduler, etcd: MemoryEtcd, plan: Plan, trace: Trace) -> None:
        self.scheduler, self.etcd, self.plan, self.trace = scheduler, etcd, plan, trace
        self.moment = itertools.count().__next__
        """A clock for what clients ask and are told, which tells any two moments apart: one of seconds does not."""
        least, wait = int(plan.options["min_replicas"]), int(1000 * plan.options["join_timeout"])
        self.job = Job(
            "etcd", "", "job", min_replicas=least, join_timeout_ms=wait, heartbeat_timeout_ms=1000 * LEASE_TTL
        )
        self.owners: dict[int, Process] = {}
        self.kept: dict[int, KeptLease] = {}
        """What the owner of each lease knows of it."""
        self.oracles = Oracles(
            self.job, self._name_of, self._is_dead, self._is_killed, plan.nnodes, plan.restart, plan.by_key
        )
        self.processes: dict[str, Process] = {}
        self.begun: dict[str, Process] = {}
        """Those, and one that runs already while it is being started."""
        self.restored_at = -1e9
        self.observer = etcd.client()
        etcd.listen(self._committed)
        job = self.job.prefix
        prefixes = {"agent": RUN, "trainer": job, "group": job}
        self.groups = [*dict.fromkeys(prefix for role, prefix in prefixes.items() if plan.cast.get(role))]
        """What the keys of each group that has members begin with."""
        self.copies = Copies(self)
        self.sockets = Sockets(self)
        self.kills_claimers: list[Callable[[Process], None]] = []
        """Each kills a timer server that has claimed a timer, and is about to kill the worker."""
        self.is_ending = False
        """Whether all are told to leave."""
        self.to_come = 0
        """How many processes have ended by themselves, and are to be started again."""
        self._lives: Counter[str] = Counter()

    def note(self, what: object) -> None:
        """A fault, or what else is done from outside, for the trace."""
        self.trace.note(self.scheduler.time, MAIN, "*", what)

    def start(self, role: Role, name: str) -> Process:
        """A process with this name, which is new."""
        process = self.processes[name] = Process(self, role, name)
        if self.is_ending:
            process.leaves.set()
        return process

    def restart(self, victim: Process, draw: random.Random) -> None:
        """Start another process in place of one that is dead."""
        slot = victim.name.partition(".")[0]
        self._lives[slot] += 1
        name = f"{slot}.{self._lives[slot]}"
        self.start(type(victim.role)(self, draw), name)
        self.note(f"{name} is started in place of {victim.name}")

    def ended(self, process: Process, draw: random.Random, pause: float) -> None:
        """A process has ended by itself, and is started again after a pause, by whoever watches over it."""

        def restart() -> None:
            self.scheduler.sleep(pause)
            self.to_come -= 1
            if not (self.is_ending or process.is_killed):
                self.restart(process, draw)

        self.to_come += 1
        with self.scheduler.process("main"):
            concurrency.thread(restart, "operator").start()

    def reaped(self, victim: Process, by: Process) -> None:
        """A process is about to be killed for a timer; unless who is to kill it dies first."""
        if self.kills_claimers:
            kill = self.kills_claimers.pop()
            with self.scheduler.process("main"):  # of its own it would stop in the middle
                concurrency.thread(kill, "operator", by).start()
            concurrency.event().wait()
        by.check(self.oracles.reaped, victim.name, by.clock_at(self.scheduler.time))
        self.note(f"{by.name} reaps {victim.name}")
        is_done = concurrency.event()

        def signal() -> None:
            victim.kill(with_host=False)
            victim.killed_by = by
            is_done.set()

        with self.scheduler.process("main"):  # a signal is sent or not, whatever becomes of who sends it
            concurrency.thread(signal, "operator").start()
        is_done.wait()

    @property
    def asking(self) -> Process:
        """The process that runs this."""
        return self.begun[self.scheduler.process_now]

    def sentinel(self) -> SentinelStub | None:
        """That of the process that asks."""
        process = self.processes.get(self.scheduler.process_now)
        return process.sentinel if process is not None else None

    @property
    def live(self) -> list[Process]:
        return [one for one in self.processes.values() if one.lives]

    def of(self, kind: type[Role]) -> Iterator[tuple[Process, Role]]:
        """The living processes with such a role."""
        return ((one, one.role) for one in self.live if isinstance(one.role, kind))

    def office(self, prefix: str) -> KeyValue | None:
        """The office of a group."""
        return self.oracles.kvs.get(decider_key(prefix))

    def decider(self, prefix: str) -> Process | None:
        """Who has the office of a group."""
        office = self.office(prefix)
        return self.owners.get(office.lease) if office else None

    def victim(self, draw: random.Random) -> Process | None:
        """Somebody alive; a decider more often than chance would have it."""
        live = [one for one in self.live if not one.is_stopped]
        if draw.random() < 0.5:
            deciders = [one for prefix in self.groups if (one := self.decider(prefix)) in live]
            live = deciders or live
        return draw.choice(live) if live else None

    def restored(self) -> None:
        """etcd holds something else now."""
        self.restored_at = self.scheduler.time
        kvs = self.etcd.snapshot().keys.range(Get(Span("/", is_prefix=True))).kvs
        self.oracles.restored(kvs, self.scheduler.time)

    def keeps(self, lease: KeptLease) -> None:
        """Some process keeps it from now on."""
        self.kept[lease.id] = lease

    def kept_by_the_living(self) -> Iterator[tuple[Process, KeptLease]]:
        """The leases that are to be renewed, each with its owner."""
        for id_, lease in self.kept.items():
            owner = self.owners.get(id_)
            if owner is not None and owner.lives and lease.kept and not lease.rests:
                yield owner, lease

    def _judge_end(self, lease_id: int) -> None:
        """etcd has ended a lease whose time was over: its owner must not trust it any longer by then."""
        lease, owner = self.kept.get(lease_id), self.owners.get(lease_id)
        if lease is None or owner is None or owner.is_killed or not lease.kept:
            return
        require(
            "who trusts its lease has it",
            not owner.trusts(lease),
            f"{owner.name} trusts lease {lease_id:x}, which has ended",
        )

    def _is_dead(self, member: str) -> bool:
        owner = self.owners.get(int(member, 16))
        return owner is not None and owner.is_killed

    def _is_killed(self, process: str) -> bool:
        return self.begun[process].is_killed

    def _name_of(self, member: str) -> str:
        """That of the process that a member belongs to."""
        owner = self.owners.get(int(member, 16))
        return owner.name if owner is not None else ""

    def _committed(self, events: list[Event]) -> None:
        if self.scheduler.ending:
            return
        for event in events:
            self.trace.note(self.scheduler.time, "etcd", "=", event)
        try:
            if self.scheduler.current.name == EXPIRY_THREAD:
                for event in events:
                    if event.kind == "delete" and is_member_key(event.kv.key):
                        self._judge_end(int(member_of(event.kv.key), 16))
            self.oracles.committed(events, self.scheduler.time)
        except Violation as violation:
            self.scheduler.fail(violation)
