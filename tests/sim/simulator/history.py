"""One history from its plan: cast, faults, calm, liveness, the end, and what is left behind."""

from __future__ import annotations

import contextlib
import logging
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from virtual import MemoryEtcd, Scheduler, Stuck

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import CHUNK
from ftcoord.etcd.api import KeyValue
from simulator.calm import keep_promises
from simulator.faults import Faults, cast
from simulator.kernel import Kernel
from simulator.managed_roles import managers_installed
from simulator.oracles import Violation, is_member_key, require
from simulator.plan import Network, Plan
from simulator.reached import counted
from simulator.roles import ROLES
from simulator.statements import any_statement
from simulator.stubs import installed
from simulator.trace import Trace
from simulator.world import LEASE_TTL, World

SMALL_CHUNK: Final = 2
"""Seats in a chunk where rounds of a few nodes have several."""
CALM: Final = 2.0 * LEASE_TTL
"""Seconds after the last fault by which what was under way then is over."""
BACKUP_EVERY: Final = 5.0
"""Seconds between two backups of etcd."""
L1_BOUND: Final = LEASE_TTL + 1.0 + 5.0
"""Seconds within which rounds come about when faults have stopped: a lease's time, the settle time-out, and 5 s."""
BOUND: Final = 6.0 * LEASE_TTL + L1_BOUND
"""Seconds within which everything is as it should be."""
LEAVE_BOUND: Final = 60.0
MISS_EVENTS: Final = frozenset({"lost_event"})
"""Faults after which a copy may be wrong until its owner asks etcd whether it is: for 4.5 times the TTL of a lease."""
HEARD_WITHIN: Final = 1.0
"""Seconds within which each process hears of a change."""
TAKEN_IN_WITHIN: Final = 0.01
"""Seconds within which a thread that is in the middle of taking a change in has done that."""
CALM_TTL: Final = 60
"""Seconds; leases with a shorter TTL are members', and must be gone at the end."""


@dataclass
class Report:
    """What became of one history."""

    plan: Plan
    trace: Trace
    problem: str = ""
    oracle: str = ""
    place: str = ""
    """Where an error came from."""
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    by_oracle: bool = False
    """Whether an oracle objects, or nobody could go on; else something was raised."""

    @property
    def failed(self) -> bool:
        return bool(self.problem)

    def forget(self) -> None:
        """All that happened, but for what is counted: it would cost more to send to another process than to make."""
        self.trace.clear()


class _Errors(logging.Handler):
    """Fails a history in which ftcoord logs an error: that a decision could not be read, or that a thread failed."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(logging.ERROR)
        self._scheduler = scheduler

    def createLock(self) -> None:  # noqa: N802  # logging's name
        self.lock = None  # a real one, while other tasks run

    def emit(self, record: logging.LogRecord) -> None:
        if not self._scheduler.ending:
            self._scheduler.fail(Violation("ftcoord logs no error", record.getMessage()))


def play(plan: Plan) -> Report:
    """One history. What is wrong with it is in the report: nothing is raised but by an error of the simulator's."""
    scheduler = Scheduler(plan.seed, horizon=1000.0, steps=400_000)
    trace = Trace(["operator", "etcd"])
    report = Report(plan, trace)

    def main() -> None:
        with MemoryEtcd() as etcd:
            world = World(scheduler, etcd, plan, trace)
            with contextlib.ExitStack() as stubs:
                chunk = SMALL_CHUNK if plan.small_chunks else CHUNK
                stubs.enter_context(installed(plan.seed, world.sentinel, world.keeps, chunk=chunk))
                stubs.enter_context(Kernel(world).installed())
                stubs.enter_context(managers_installed(world))
                stubs.enter_context(world.sockets.installed())
                stubs.enter_context(world.copies.noted())
                stubs.enter_context(counted(world.oracles.counts, lambda: world.asking.decides()))
                if plan.any_statement:
                    stubs.enter_context(any_statement(scheduler))
                faults = Faults(world, etcd.snapshot())
                report.faults, report.counts = faults.injected, world.oracles.counts
                try:
                    _play(world, faults)
                except Violation as violation:  # at once: else the end of this etcd would be what is told of
                    scheduler.fail(violation)

    disabled, log = logging.root.manager.disable, logging.getLogger("ftcoord")
    logging.disable(logging.WARNING)
    errors = _Errors(scheduler)
    log.addHandler(errors)
    try:
        scheduler.run(main)
    except Violation as error:
        report.problem, report.oracle, report.by_oracle = str(error), error.oracle, True
    except Stuck as error:
        report.problem, report.oracle, report.by_oracle = f"Stuck: {error}", "nobody is stuck", True
    except Exception as error:  # whatever ended a thread of the code under test
        report.problem, report.oracle = f"{type(error).__name__}: {error}", type(error).__name__
        report.place = "".join(traceback.format_exception(error))
    finally:
        logging.disable(disabled)
        log.removeHandler(errors)
    report.steps, report.seconds = scheduler.taken, scheduler.time
    return report


def _play(world: World, faults: Faults) -> None:
    cast(world, random.Random(f"{world.plan.seed} cast"))
    takes_backups = any(one.kind == "restore" for one in world.plan.faults)
    while world.scheduler.time < world.plan.seconds:
        faults.run(min(world.scheduler.time + BACKUP_EVERY, world.plan.seconds))
        if takes_backups:
            faults.back_up()
    faults.stop()
    world.note("faults stop")
    since = world.scheduler.time
    for process in world.live:
        process.resume()
        process.mend()
        process.free()
        process.port_cut = ""
        process.client.loses = lambda _event: False
        process.lag.end()
    _hear(world)
    _come_about(world)
    _stay_calm(world, since)
    keep_promises(world)
    _end(world)
    world.oracles.finish()


def _hear(world: World) -> None:
    """Soon all know what etcd holds, also those that wait for nothing: looked at while what is due comes about, which
    may heal what is wrong."""
    misses_events = not MISS_EVENTS.isdisjoint(one.kind for one in world.plan.faults)
    if misses_events or not world.plan.network.loses_nothing:
        return
    revision = world.etcd.revision

    def look() -> None:
        world.scheduler.sleep(HEARD_WITHIN)
        wrong = world.copies.wrong(revision)
        world.scheduler.sleep(TAKEN_IN_WITHIN)
        if still := sorted({*wrong} & {*world.copies.wrong(revision)}):
            world.scheduler.fail(Violation("a copy shows what etcd holds", "\n".join(still)))

    concurrency.thread(look, "copies").start()


def _come_about(world: World) -> None:
    """L1 and L2: all that is to be is there within its bound, of the time in which it is due."""
    since = world.scheduler.time
    held_up = {role: role.held_up(world) for role in ROLES.values()}
    for role in ROLES.values():
        while missing := role.missing(world, since):
            late = world.scheduler.time - since - (role.held_up(world) - held_up[role])
            require(
                "L1 what is due comes about", late < BOUND, f"not within {BOUND:g} s after the last fault: {missing}"
            )
            world.scheduler.sleep(0.25)


def _stay_calm(world: World, since: float) -> None:
    """When nothing has befallen anybody for a while, all leases are renewed in time."""
    if not world.plan.network.loses_nothing:
        return
    world.scheduler.sleep(max(since + CALM - world.scheduler.time, 0.0))
    for owner, lease in world.kept_by_the_living():
        require("a lease that is kept is renewed in time", owner.trusts(lease), f"{lease.id:x} of {owner.name}")


def _end(world: World) -> None:
    """All leave, and nothing is left of them but what is to be remembered."""
    world.note("all are told to leave")
    world.is_ending, since = True, world.scheduler.time
    for process in world.live:
        process.leaves.set()
        process.begin(process.role.interrupt, "signal")
    while left := [one.name for one in world.live]:
        late = world.scheduler.time - since
        require("who leaves ends", late < LEAVE_BOUND, lambda left=left: f"{left} have not ended: {_threads(world)}")
        world.scheduler.sleep(0.25)
    # A restore brings leases back that nobody has any longer: they end by time.
    if world.plan.network == Network() and since - world.restored_at > LEASE_TTL + 1.0:
        world.scheduler.sleep(1.0)
        left = [key for key, kv in world.oracles.kvs.items() if _was_given_up(world, key, kv)]
        require("who leaves gives its lease up", not left, str(left))
    world.scheduler.sleep(3.0 * LEASE_TTL)
    _check_nothing_is_left(world)


def _was_given_up(world: World, key: str, kv: KeyValue) -> bool:
    """Whether that is the key of a member that has left, though nothing kept it from revoking its lease."""
    owner = world.owners.get(kv.lease)
    return is_member_key(key) and owner is not None and not owner.is_killed


def _check_nothing_is_left(world: World) -> None:
    # Python finds some objects that are forgotten only now, and a thread closes them: it must end soon, too.
    since = world.scheduler.time
    while (threads := _threads(world)) and world.scheduler.time - since < LEAVE_BOUND:
        world.scheduler.sleep(0.25)
    require("no thread is left", not threads, "\n".join(threads))
    keys = [key for key, kv in world.oracles.kvs.items() if is_member_key(key) and kv.lease]
    require("no key is left", not keys, str(keys))
    if not world.oracles.had_accident:  # else nobody may know of an earlier round's keys: they end with their lease
        over = world.oracles.leftovers()
        require("no key of an earlier round is left", not over, str(over))
    leases = {f"{lease:x}": ttl for lease, ttl in world.etcd.leases.items() if ttl < CALM_TTL}
    require("no lease is left", not leases, str(leases))
    require("no watch is left", world.etcd.watches == 0, f"{world.etcd.watches} watches")


def _threads(world: World) -> list[str]:
    """Those of the processes that were not killed."""
    dead = {name for one in world.processes.values() if one.is_killed for name in (one.name, one.sentinels_name)}
    return world.scheduler.alive(but={*dead, "main"})
