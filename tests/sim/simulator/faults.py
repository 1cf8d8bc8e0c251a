"""What befalls a history: each kind of fault of a plan, and how it ends."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from virtual.backend import Snapshot

from ftcoord import errors as ftcoord_errors
from ftcoord.core.layout import KEY_PREFIX, death_key, decided_key, decider_key, member_id, member_key, members_span
from ftcoord.core.rendezvous_records import JoinRequest, WorkerFailure, parse_join_request
from ftcoord.etcd.api import Get, Put, Span
from ftcoord.operator.orders import Order, planned
from simulator.oracles import GARBAGE, is_member_key, require
from simulator.plan import PlannedFault
from simulator.roles import ROLES, Agent
from simulator.world import LEASE_TTL, RUN, Process, World

BURIAL: Final = 2.0
"""Seconds within which a sentinel that etcd answers gives up the leases of a process that was killed."""
OFFICE_ENDS: Final = 2.5
"""Seconds, beyond its TTL, by which the office of a stuck decider has ended: a second, and one until it was stuck."""
CALL_TIMEOUT: Final = 1.0
"""Seconds that an order of the operator's may take."""
LONGEST_LAG: Final = 7.0
"""Seconds."""
LENGTHENS: Final = frozenset({"leader", "outage", "hang", "restore", "wipe"})
"""Faults after which leases live longer, or live again."""
WORKER_FAILURE: Final = WorkerFailure(4711, signal=9, fate="was killed by signal 9 (SIGKILL)")


class Faults:
    """Makes the faults of a plan happen, each at its time, and ends them.

    Args:
        snapshot: what etcd held at the beginning.
    """

    def __init__(self, world: World, snapshot: Snapshot) -> None:
        self._world = world
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._snapshots = [snapshot]
        self._etcd_is_away, self._full_until, self._last_at, self._lengthened_at = False, 0.0, 0.0, -1e9
        self.injected: Counter[str] = Counter()
        for fault in world.plan.faults:
            self._later(fault.at, lambda fault=fault: self._begin(fault))

    def run(self, until: float) -> None:
        """Let time pass, with all faults that are due by then."""
        while self._due and self._due[0][0] <= until:
            at, _, act = heapq.heappop(self._due)
            self._sleep_until(at)
            act()
        self._sleep_until(until)

    def stop(self) -> None:
        """No further faults: all that are to end do so now. Who was to start again starts."""
        self._world.kills_claimers.clear()
        while self._due:
            # All of these first: one that is put off until etcd is back would else never let that come back.
            due, self._due = sorted(self._due), []
            for _, _, act in due:
                act()

    def _sleep_until(self, at: float) -> None:
        if at > self._world.scheduler.time:
            self._world.scheduler.sleep(at - self._world.scheduler.time)

    def _later(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), act))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later(self._world.scheduler.time + seconds, act)

    def _begin(self, fault: PlannedFault) -> None:
        draw = random.Random(fault.draw)
        what = getattr(self, f"_{fault.kind}")(draw)
        if what:
            self._last_at = self._world.scheduler.time
            if fault.kind in LENGTHENS:
                self._lengthened_at = self._last_at
            self.injected[fault.kind] += 1
            self._world.note(what)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _kill(self, draw: random.Random) -> str:
        victim, with_host = self._world.victim(draw), draw.random() < 0.5
        if victim is None:
            return ""
        leases = victim.sentinel.stands_by
        victim.kill(with_host=with_host)
        if not with_host and self._is_served(victim):
            at = self._world.scheduler.time
            self._after(BURIAL, lambda: self._check_burial(victim, leases, at))
        if draw.random() < 0.8:
            self._restart_later(victim, draw)
        return f"{victim.name} is killed{', and its host with it' if with_host else ''}"

    def _restart_later(self, victim: Process, draw: random.Random) -> None:
        pause = draw.choice((0.0, 0.5, LEASE_TTL, 2 * LEASE_TTL))
        self._after(pause, lambda: self._world.restart(victim, draw))

    def _kill_claimer(self, draw: random.Random) -> str:
        def kill(claimer: Process) -> None:
            claimer.kill(with_host=False)
            self._restart_later(claimer, draw)
            self._world.note(f"{claimer.name} is killed")

        self._world.kills_claimers.append(kill)
        return "the next server that claims a timer will be killed before it kills"

    def _is_served(self, process: Process) -> bool:
        """Whether etcd answers it now, and takes what it writes."""
        is_well = not self._etcd_is_away and self._world.scheduler.time > self._full_until
        return is_well and not process.is_cut and self._world.plan.network.loses_nothing

    def _check_burial(self, victim: Process, leases: frozenset[int], at: float) -> None:
        """Its sentinel has given its leases up, unless something else has befallen anybody since."""
        if self._last_at <= at and self._world.scheduler.time >= at + BURIAL:  # earlier where faults stop
            left = [key for key, kv in self._world.oracles.kvs.items() if kv.lease in leases and is_member_key(key)]
            require("a sentinel gives leases up", not left, f"{victim.name} is dead, and there is {left}")

    def _stop(self, draw: random.Random) -> str:
        return self._pause(draw, draw.choice((1.0, LEASE_TTL - 1, LEASE_TTL + 2, 3 * LEASE_TTL)))

    def _slow(self, draw: random.Random) -> str:
        return self._pause(draw, draw.uniform(0.01, 0.5))

    def _pause(self, draw: random.Random, seconds: float) -> str:
        victim = self._world.victim(draw)
        if victim is None:
            return ""
        victim.stop()
        self._after(seconds, victim.resume)
        return f"{victim.name} is stopped for {seconds:.3f} s"

    def _stick(self, draw: random.Random) -> str:
        victim, seconds = self._world.victim(draw), draw.choice((1.0, LEASE_TTL + 4, 3 * LEASE_TTL))
        if victim is None or victim.sticks:
            return ""
        victim.stick()
        at = self._world.scheduler.time
        self._after(LEASE_TTL + OFFICE_ENDS, lambda: self._check_office(victim, at))
        self._after(seconds, victim.free)
        return f"a thread of {victim.name} that decides is stuck for {seconds:g} s"

    def _check_office(self, victim: Process, at: float) -> None:
        """Who cannot decide has lost the office that it had."""
        is_over = self._world.scheduler.time >= at + LEASE_TTL + OFFICE_ENDS  # not where faults stop before
        is_sure = self._lengthened_at < at and not self._etcd_is_away
        if is_over and is_sure and victim.stuck and victim.stuck[0] <= at + 1:
            held = [kv for kv in victim.stuck[1] if kv in map(self._world.office, self._world.groups)]
            require("who cannot decide has no office", not held, f"{victim.name} has {held}")

    def _clock(self, draw: random.Random) -> str:
        victim, seconds = self._world.victim(draw), draw.choice((-3600.0, -10.0, 10.0, 86400.0))
        if victim is None:
            return ""
        victim.jump(seconds)
        return f"the wall clock of {victim.name} jumps by {seconds:g} s"

    def _worker_fails(self, draw: random.Random) -> str:
        process, role = self._working(draw)
        return self._fail(process, role, draw)

    def _fail(self, process: Any, role: Any, draw: random.Random) -> str:
        watch = role.handler._resources.watch if role is not None else None
        if watch is None or not watch.watches:
            return ""
        process.begin(lambda: watch.fail(WORKER_FAILURE), "workers")
        if draw.random() < 0.7:  # else the agent takes long to stop the others
            watch.watches = False
        else:
            self._after(draw.uniform(1, 10), lambda: setattr(watch, "watches", False))
        return f"a worker of {process.name} fails"

    def _working(self, draw: random.Random) -> tuple[Any, Any]:
        """An agent that has workers, and its process."""
        agents = [(process, role) for process, role in self._world.of(Agent) if role.now is not None]
        return draw.choice(agents) if agents else (None, None)

    def _job_fails(self, draw: random.Random) -> str:
        process, role = self._working(draw)
        what = self._fail(process, role, draw)
        if what:
            role.gives_up = True
        return what and f"{what}, which may not start them again"

    def _job_finishes(self, _draw: random.Random) -> str:
        """Those of the last round; who has been left behind in an earlier one works on."""
        rounds = [role.now for _, role in self._world.of(Agent) if role.now is not None]
        if not rounds:
            return ""
        last = max(rounds, key=lambda now: now.number)
        self._world.oracles.rounds.done.add(last.name)
        return f"the workers of round {last.number} finish"

    def _drain(self, draw: random.Random) -> str:
        """Another agent is started on its host when it has left."""
        members = [] if self._etcd_is_away else self._world.observer.range(Get(members_span(RUN))).kvs
        asks = list[JoinRequest]()
        for kv in members:
            with contextlib.suppress(ftcoord_errors.StateError):
                asks.append(parse_join_request(kv.key, kv.value))
        if not asks:
            return ""
        leaver = draw.choice(asks)
        with contextlib.suppress(ftcoord_errors.EtcdNoSpace, ftcoord_errors.StateError):
            order = Order("drain", "run", leaver.node, "somebody", "", force=True)
            done = planned(self._world.observer, KEY_PREFIX, order, CALL_TIMEOUT)[1]()
            return f"{leaver.host} is drained" if done["did"] else ""
        return ""

    # -- the network --------------------------------------------------------------------------------------------------

    def _cut(self, draw: random.Random) -> str:
        return self._cut_off(draw, "both")

    def _cut_requests(self, draw: random.Random) -> str:
        return self._cut_off(draw, "requests")

    def _cut_answers(self, draw: random.Random) -> str:
        return self._cut_off(draw, "answers")

    def _cut_off(self, draw: random.Random, direction: str) -> str:
        victim = self._world.victim(draw)
        if victim is None:
            return ""
        seconds = draw.choice((0.2, 2.0, LEASE_TTL + 1.0, 3.0 * LEASE_TTL))
        victim.cut(direction)
        self._after(seconds, victim.mend)
        return f"{victim.name} is cut off ({direction}) for {seconds:g} s"

    def _cut_port(self, draw: random.Random) -> str:
        victim = self._world.victim(draw)
        if victim is None or victim.port_cut:
            return ""
        seconds, victim.port_cut = draw.choice((0.5, 3.0, 20.0)), draw.choice(("requests", "answers"))
        self._after(seconds, lambda: setattr(victim, "port_cut", ""))
        return f"{victim.port_cut} of {victim.name} to and from other processes do not arrive for {seconds:g} s"

    def _lag(self, draw: random.Random) -> str:
        victim = self._world.victim(draw)
        if victim is None:
            return ""
        seconds, share = draw.uniform(0.05, LONGEST_LAG), draw.choice((0.5, 1.0))
        victim.lag.begin(lambda: draw.random() < share)
        self._after(seconds, victim.lag.end)
        return f"{'some' if share < 1 else 'all'} watches of {victim.name} lag for {seconds:.3f} s"

    # -- etcd ---------------------------------------------------------------------------------------------------------

    def _leader(self, _draw: random.Random) -> str:
        self._world.etcd.change_leader()
        return "etcd has another leader"

    def _compact(self, draw: random.Random) -> str:
        revision = self._world.etcd.revision - draw.choice((0, 0, 1, 5))
        with contextlib.suppress(ftcoord_errors.RequestRefused):
            self._world.etcd.compact(max(revision, 1))
        return f"etcd forgets what was before revision {revision}"

    def _outage(self, draw: random.Random) -> str:
        return self._away(draw, hangs=False)

    def _hang(self, draw: random.Random) -> str:
        return self._away(draw, hangs=True)

    def _away(self, draw: random.Random, *, hangs: bool) -> str:
        if self._etcd_is_away:
            return ""
        outage = self._world.etcd.outage(hangs=hangs)
        outage.__enter__()
        self._etcd_is_away = True

        def end() -> None:
            self._etcd_is_away, self._lengthened_at = False, self._world.scheduler.time
            outage.__exit__(None, None, None)
            self._world.note("etcd is back")

        seconds = draw.choice((0.5, 3.0, 2.0 * LEASE_TTL))
        self._after(seconds, end)
        return f"etcd {'hangs' if hangs else 'is down'} for {seconds:g} s"

    def _no_space(self, draw: random.Random) -> str:
        seconds = draw.choice((0.5, 3.0, 2.0 * LEASE_TTL))
        self._world.etcd.set_no_space(True, let_in=draw.choice((0, 1, 4)))
        self._full_until = max(self._full_until, self._world.scheduler.time + seconds)
        self._after(seconds, lambda: self._world.etcd.set_no_space(False))
        return f"etcd has no space for {seconds:g} s"

    def _expire(self, draw: random.Random) -> str:
        victim = self._world.victim(draw)
        leases = [lease for lease, owner in self._world.owners.items() if owner is victim]
        short = [one for one in leases if self._world.etcd.leases.get(one) == LEASE_TTL]
        if victim is None or not short:
            return ""
        self._world.etcd.expire(short[-1])
        return f"the lease {member_id(short[-1])} of {victim.name} ends early"

    def _lost_event(self, draw: random.Random) -> str:
        """Of a watch, as around `fork()`: of a key that is written again."""
        victim = self._world.victim(draw)
        if victim is None:
            return ""
        decided = [decided_key(prefix) for prefix in self._world.groups]
        lost: list[object] = []

        def loses(event: object) -> bool:
            if not lost and event.kv.key in decided and event.kind == "put":
                lost.append(event)
            return event in lost

        victim.client.loses = loses
        return f"a watch of {victim.name} will miss the next decision"

    def _restore(self, draw: random.Random) -> str:
        """From a backup, which is taken now and then."""
        self._rewind(self._snapshots[draw.randrange(len(self._snapshots))])
        return "etcd is restored from a backup"

    def _wipe(self, _draw: random.Random) -> str:
        self._rewind(self._snapshots[0])
        return "another etcd answers, which is empty"

    def _rewind(self, snapshot: Snapshot) -> None:
        self._world.oracles.accident()
        self._world.etcd.rewind(snapshot)
        self._world.restored()
        for kv in self._world.oracles.kvs.values():
            if kv.value in GARBAGE:  # the backup has it: somebody sees to that too
                self._after(1.0, lambda kv=kv: self._clean(kv.key, kv.value))

    def back_up(self) -> None:
        """A backup for `restore`."""
        self._snapshots.append(self._world.etcd.snapshot())

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _garbage(self, draw: random.Random) -> str:
        """Somebody writes a key below a group's prefix that is nobody's."""
        prefix = draw.choice(self._world.groups)
        here = (
            member_key,
            death_key,
            lambda group, name: f"{group}/events/{name}",
            lambda group, name: f"{group}/{name}",
        )
        return self._write(draw, draw.choice(here)(prefix, "stranger"))

    def _overwrite(self, draw: random.Random) -> str:
        self._world.oracles.accident()
        return self._write(draw, self._key(draw))

    def _write(self, draw: random.Random, key: str) -> str:
        value = draw.choice(GARBAGE)
        if self._etcd_is_away:
            return ""
        with contextlib.suppress(ftcoord_errors.EtcdNoSpace):  # it may have been written all the same
            self._world.observer.txn((), [Put(key, value)])
        self._after(draw.choice((0.0, 1.0, 5.0)), lambda: self._clean(key, value))
        return f"somebody writes {value!r} to {key}"

    def _delete_key(self, draw: random.Random) -> str:
        key = self._key(draw)
        self._world.oracles.accident()
        if self._etcd_is_away or not self._world.observer.delete(Span(key)):
            return ""
        return f"somebody deletes {key}"

    def _clean(self, key: str, value: bytes) -> None:
        if self._etcd_is_away:
            self._after(1.0, lambda: self._clean(key, value))
            return
        kv = self._world.observer.range(Get(Span(key))).one
        if kv is not None and kv.value == value:
            self._world.observer.delete(Span(key))
            self._world.note(f"somebody deletes the garbage in {key}")

    def _key(self, draw: random.Random) -> str:
        """One of a group's; a member's own is its last."""
        prefix = draw.choice(self._world.groups)
        decider = self._world.decider(prefix)
        leases = [lease for lease, owner in self._world.owners.items() if owner is (decider or owner)]
        member = member_key(prefix, member_id(leases[-1]) if leases else "0123456789abcdef")
        return draw.choice([decided_key(prefix), member, member, decider_key(prefix)])


def cast(world: World, draw: random.Random) -> None:
    """Start all processes of the plan, in an order and after pauses that are drawn."""
    names = [f"{role}{number}" for role, count in world.plan.cast.items() for number in range(count)]
    draw.shuffle(names)
    for name in names:
        kind = ROLES[name.rstrip("0123456789")]
        world.start(kind(world, random.Random(f"{world.plan.seed} role {name}")), name)
        world.scheduler.sleep(draw.choice((0.0, 0.0, 0.3, 2.0)))
