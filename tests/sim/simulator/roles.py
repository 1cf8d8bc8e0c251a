"""What processes do: each role is a user of ftcoord as users are, and says what it was told to the oracles."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import builders
from helpers import rdzv_settings
from store_history import Operation
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

import ftcoord
from ftcoord import concurrency
from ftcoord.coordination.replica import Replica
from ftcoord.core.rendezvous_records import FAILED, FINISHED
from ftcoord.errors import EtcdError, StateError
from ftcoord.rendezvous import handler as handlers, node as nodes
from ftcoord.store import EtcdStore
from simulator.managed_roles import Group
from simulator.oracles import STORE, StartedRound, Violation
from simulator.role import RESTART_PAUSE, Hold, Role
from simulator.timed_roles import Watchdog, Worker

if TYPE_CHECKING:
    from simulator.world import Process, World


class Leaves(Exception):
    """The agent was told to end: no reason to close the run."""


class Agent(Role):
    """torchrun's agent on one node: it takes part in every round that it is called back to."""

    now: StartedRound | None = None
    """The round that its workers run in."""
    handler: handlers.EtcdRendezvousHandler | None = None
    gives_up = False
    """Whether it ends the run when its workers have failed."""
    wants: tuple[int, int] | None = None
    """Its `--nnodes`, where they are not the others'."""
    error: BaseException | None = None
    """What ended it last."""

    def live(self, process: Process) -> None:
        least, most = self.wants or self.world.plan.nnodes
        settings = rdzv_settings(
            (least, most), last_call_timeout=2.0, lease_ttl=5, close_timeout=1.0, restart=self.world.plan.restart
        )
        settings = replace(settings, local_addr=process.name)  # of a restarted process that is no name of a host
        while not process.leaves.is_set():
            handler = handlers.EtcdRendezvousHandler(settings, Hold(process.client))
            handler._resources.node = nodes.Node(process.client, settings, process.name, process.name)
            try:
                handler.prepare()
                self.handler = handler
                while self._goes_on(process):
                    self._round(process, handler)
                if process.leaves.is_set():
                    raise Leaves
            except Leaves:
                handler.shutdown()
            except ChildFailedError:
                self._end(process, handler, FAILED)
                return
            except (RendezvousError, SystemExit) as error:  # the latter ends an agent that was drained
                process.note("!", f"ends: {type(error).__name__}: {error}")
                self.world.oracles.rounds.left(process.name)
                self.error = error
                handler.shutdown()
                process.rest(RESTART_PAUSE)
                if isinstance(error, RendezvousClosedError) and not process.leaves.is_set():
                    self._is_started_again(process)
                    return
            else:
                self._end(process, handler, FINISHED)
                return
            self.now = None

    def _goes_on(self, process: Process) -> bool:
        """Unless it is to leave, or its workers have finished."""
        now = self.now
        is_done = now is not None and now.name in self.world.oracles.rounds.done
        return not (is_done or process.leaves.is_set())

    def _end(self, process: Process, handler: handlers.EtcdRendezvousHandler, outcome: str) -> None:
        """End the run, unless the others went on without this node; as torch's agent, which then ends."""
        assert self.now is not None
        process.note("!", f"ends, since its workers have {outcome}")
        self.world.oracles.rounds.ends.add((self.now.name, outcome))
        handler.shutdown()
        self.now = None
        self._is_started_again(process)

    def _is_started_again(self, process: Process) -> None:
        self.world.ended(process, self.draw, self.draw.choice((0.5, 2.0, 10.0)))

    def interrupt(self) -> None:
        if self.handler is not None:
            self.handler._node.stop()

    def _round(self, process: Process, handler: handlers.EtcdRendezvousHandler) -> None:
        self.now = None
        info = handler.next_rendezvous()
        mine = handler._node.round
        bootstrap = info.bootstrap_store_info
        now = StartedRound(
            mine.number, mine.name, info.rank, info.world_size, bootstrap.master_addr, bootstrap.master_port
        )
        process.note("#", f"starts round {now.number} as rank {now.rank} of {now.size}")
        process.check(self.world.oracles.rounds.started, now)
        self.now = now
        if not self._meets(process, info.store, now):
            return
        while self._goes_on(process) and not handler.num_nodes_waiting():
            process.pause(self.draw.choice((0.2, 1.0)))
            with contextlib.suppress(DistStoreError, RuntimeError):  # as workers do that meet now and then
                info.store.set(f"alive{now.rank}", f"{self.world.scheduler.time}")
            watch = handler._resources.watch
            if watch is not None and not watch.watches:
                if self.gives_up:
                    raise ChildFailedError("train", {now.rank: ProcessFailure(0, 4711, -9, "")})
                break
        if not self._goes_on(process):  # torch's exit barrier
            self._exchange(info.store, "done", now.size, now.rank, "")

    def _exchange(self, store: EtcdStore, key: str, size: int, rank: int, value: str) -> list[str]:
        """What all ranks have set; empty if one did not come."""
        try:
            store.set(f"{key}{rank}", value)
            return [store.get(f"{key}{one}").decode() for one in range(size)]
        except (DistStoreError, RuntimeError) as error:
            self.world.asking.note("!", f"cannot exchange {key}: {error}")
            return []

    def _meets(self, process: Process, store: EtcdStore, now: StartedRound) -> bool:
        """Exchange something with all other ranks, as torch's agents do before they start workers; whether all did."""
        store.set_timeout(timedelta(seconds=10))
        began = self.world.scheduler.time
        told = self._exchange(store, "rank", now.size, now.rank, f"{now.name} {now.rank}")
        if told and self.world.restored_at < began:
            wanted = [f"{now.name} {rank}" for rank in range(now.size)]
            process.check(_same_store, told, wanted)
        return bool(told)

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        agents: list[Agent] = [role for _, role in world.of(cls)]
        least, most = world.plan.nnodes
        record = world.oracles.rounds.record
        if record is not None and record.closed and not world.oracles.rounds.may_go_on(record):
            # Whoever works in a later round is not called back by what a restored etcd shows.
            left = [one.now for one in agents if one.now is not None and one.now.number <= record.number]
            return f"{left} run, and the run is over: {record.closed}" if left else ""
        if len(agents) < least:
            return ""
        last = max((one.now.number for one in agents if one.now is not None), default=0)
        inside = [one for one in agents if one.now is not None and one.now.number == last]
        wanted = min(len(agents), most)
        if any(one.now is not None and one not in inside for one in agents):
            return f"not all run in round {last}, and the record is {record}"
        if not len(inside) == wanted == (inside[0].now.size if inside else 0):
            return f"{len(inside)} of {wanted} run in round {last}, and the record is {record}"
        # A round that etcd has lost runs on, as long as nobody asks for another one.
        runs = record is not None and record.number == last and record.ready and not record.recalled
        return "" if runs or world.oracles.had_accident else f"all run in round {last}, and the record is {record}"


def _same_store(process: str, told: Sequence[str], wanted: Sequence[str]) -> None:
    if told != wanted:
        raise Violation("S3 a round's store is its own", f"{process} reads {told}, not {wanted}")


ASKING_TAKES: Final = 4
"""Messages from a quorum to the next one: a replica is told of it, asks, the decider is told, and decides."""
LONGEST_STEP: Final = 1.0
"""Seconds that a trainer in a busy job pauses between two quorums at the most."""


class Trainer(Role):
    """Replicas of torchft's in one process, each of which asks for a quorum in every step."""

    def __init__(self, world: World, draw: random.Random) -> None:
        super().__init__(world, draw)
        self.told: dict[str, Any] = {}
        """By replica: its last quorum,"""
        self.told_at: dict[str, float] = {}
        """and when it got that. Each has a time from the beginning on."""
        self.replicas: list[Replica] = []

    def live(self, process: Process) -> None:
        slot = process.name.partition(".")[0]
        names = [slot, *(f"{slot}-{one}" for one in range(1, self.draw.choice((1, 1, 1, 2, 3))))]
        self.told_at = dict.fromkeys(names, -1.0)
        threads = [
            concurrency.thread(self._train, name, process, name, random.Random(self.draw.random())) for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _train(self, process: Process, name: str, draw: random.Random) -> None:
        replica = Replica(process.client, self.world.job, name, keeps_lease=True)
        self.replicas.append(replica)
        step, data = 0, draw.choice(("", '{"data": 1}'))
        pause = draw.choice((0.2, LONGEST_STEP))
        while not process.leaves.is_set():
            # By port nobody counts for how long these keep others out: see `held_up`.
            shrinks = draw.random() < (0.05 if self.world.plan.by_key else 0.01)
            failures = int(draw.random() < 0.05)
            request = builders.request(
                name,
                address=f"{process.name}:1",
                store_address=f"{process.name}:2",
                step=step,
                shrink_only=shrinks,
                data=data,
                commit_failures=failures,
            )
            self.world.oracles.quorums.asks(process.name, name, self.world.scheduler.time, shrinks=shrinks)
            try:
                told = replica.ask(request, concurrency.now() + draw.choice((3.0, 20.0)))
            except TimeoutError:
                continue
            except (EtcdError, StateError) as error:
                process.note("!", f"{name} is refused: {type(error).__name__}")
                process.rest(RESTART_PAUSE)
                continue
            self.told[name], self.told_at[name] = told, self.world.scheduler.time
            process.note("#", f"{name}: step {step} with quorum {told.number}, id {told.id}: {sorted(told.names)}")
            process.check(self.world.oracles.quorums.told, name, told)
            step += 1
            process.rest(self.world.plan.pace * draw.uniform(0, pause))
            with contextlib.suppress(EtcdError, TimeoutError):  # as who shows between two steps that it lives
                replica.beat(concurrency.now() + 1)
            process.rest(0.1)
        replica.leave(1)

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        trainers: list[Trainer] = [role for _, role in world.of(cls)]
        names = {name for role in trainers for name in role.told_at}
        if len(names) < world.job.min_replicas:
            return ""
        # Where messages or steps take so long, some may ask again too late for the next quorum, each time.
        timeout, plan = world.job.join_timeout_ms / 1000, world.plan
        all_meet = timeout > ASKING_TAKES * plan.network.delay and timeout >= LONGEST_STEP * plan.pace
        late = [
            name
            for role in trainers
            for name, at in role.told_at.items()
            if at < since + 1 or (all_meet and role.told[name].names != names)
        ]
        return f"{late} are in no quorum of {sorted(names)}" if late else ""

    @classmethod
    def held_up(cls, world: World) -> float:
        return world.oracles.quorums.kept_out.seconds(world.scheduler.time)


class StoreUser(Role):
    """A client of a store that all of its kind share; every value that is written is unlike all others."""

    did_at = -1.0

    def live(self, process: Process) -> None:
        store = EtcdStore(process.client, STORE, timedelta(seconds=4), ttl=600)
        number = 0
        while not process.leaves.is_set():
            number += 1
            self._change(process, store, f"{process.name}:{number};")
            process.pause(self.draw.choice((0.0, 0.1, 1.0)))
        store.close()

    def _change(self, process: Process, store: EtcdStore, value: str) -> None:
        kind = self.draw.choice(("get", "set", "add", "append", "compare_set"))
        key = "count" if kind == "add" else self.draw.choice(("a", "b"))
        given: tuple[bytes, ...] = {"get": (), "add": (str(self.draw.choice((1, 2))).encode(),)}.get(
            kind, (value.encode(),)
        )
        if kind == "compare_set":
            given = (b"", value.encode())
            with contextlib.suppress(DistStoreError, RuntimeError):
                given = (store.get(key), value.encode()) if store.check([key]) else given
        if kind == "get" and self.draw.random() < 0.3:
            key = "count"
        operation = Operation(kind, key, given, self.world.moment(), client=process.name)
        self.world.oracles.operations.append(operation)
        try:
            told = self._make(store, operation)
        except (DistStoreError, RuntimeError) as error:
            process.note("!", f"{kind} {key}: {error}")
            return
        operation.told, operation.ended = told, self.world.moment()
        self.did_at = self.world.scheduler.time

    def _make(self, store: EtcdStore, one: Operation) -> bytes | None:
        given = [text.decode() for text in one.given]
        if one.kind == "get":
            return store.get(one.key)
        if one.kind == "add":
            return b"%d" % store.add(one.key, int(given[0]))
        if one.kind == "compare_set":
            return bytes(store.compare_set(one.key, given[0], given[1]))
        (store.set if one.kind == "set" else store.append)(one.key, given[0])
        return None

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        late = [process.name for process, role in world.of(cls) if role.did_at < since]
        return f"{late} were answered nothing" if late else ""


class Beater(Role):
    """A heartbeat with data that changes; of every other one it never does."""

    data = 0

    def live(self, process: Process) -> None:
        changes = self.draw.random() < 0.5
        while not process.leaves.is_set():
            with (
                contextlib.suppress(EtcdError),
                ftcoord.Heartbeat("run", process.name, 5, 0, etcd=process.client) as beat,
            ):
                while not process.rest(self.draw.choice((0.5, 3.0))):
                    if not changes:
                        continue
                    self.data += 1
                    with contextlib.suppress(EtcdError):
                        beat.update(self.data)
            process.rest(RESTART_PAUSE)

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        for process, role in world.of(cls):
            start = f"/ftcoord/v2/run/heartbeats/{process.name}/"
            said = [kv.value for key, kv in world.oracles.kvs.items() if key.startswith(start)]
            if not any(f'"{role.data}"'.encode() in one or f'"{role.data - 1}"'.encode() in one for one in said):
                return f"{process.name} does not beat: {said}"
        return ""


ROLES: dict[str, type[Role]] = {
    "agent": Agent,
    "trainer": Trainer,
    "store": StoreUser,
    "beater": Beater,
    "worker": Worker,
    "watchdog": Watchdog,
    "group": Group,
}
