"""Agents without workers: the handlers that torchrun uses, many to a process, over one connection for each process."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.nodes import MONITOR_INTERVAL
from benchmarks.processes import PROCESSES, BenchmarkError, Made, Processes, making
from ftcoord.config import EtcdConfig
from ftcoord.etcd.api import Compare, Get, Lease, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from ftcoord.etcd.client import SharedClient
from ftcoord.rendezvous.handler import EtcdRendezvousHandler
from ftcoord.rendezvous.settings import RendezvousSettings

RUN: Final = "benchmark"
LEASE_TTL: Final = 60
"""Seconds. Longer than by default, so that few of the renewals of so many hosts fall into a round on one machine."""
REQUEST_TIMEOUT: Final = 60
"""Seconds, as docs/scaling.md advises for thousands of nodes on few cores."""
AT_ONCE: Final = 16
"""Requests that the hosts of one process have under way. Hundreds of threads that each wait for an answer cost it more
than the requests do, and no host has more than one such thread. What waits for its turn has not been sent yet, so its
timeout has not begun."""
SPARE: Final = 1
"""How many agents there are beside those of the first round: it is added at the end."""


_turns = threading.BoundedSemaphore(AT_ONCE)
"""Of the hosts of this process."""


class _Own(Span):
    """A span that no other watch shares, though it begins where another one does."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Host(SharedClient):
    """A host's client. It shares the connection of its process, but no watch: etcd sends every host its own events. Of
    those in one process a few send requests at a time."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self.leases: list[int] = []

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        with _turns:
            lease = super().grant(ttl, timeout=timeout)
        self.leases.append(lease.id)
        return lease

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        with _turns:
            return super().range(get, timeout=timeout)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        with _turns:
            return super().txn(compares, success, failure, timeout=timeout)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        return super().watch(_Own(span.start, span.is_prefix), start_revision, deliver, deletes_only=deletes_only)


@dataclass(frozen=True, slots=True)
class Seated:
    """When an agent had its round (monotonic), its rank there, and how many nodes that has."""

    at: float
    rank: int
    world: int


class Agent:
    """One node: prepared to join when it is made."""

    def __init__(self, settings: RendezvousSettings) -> None:
        assert settings.etcd is not None
        self._host = Host(settings.etcd)
        self._handler = EtcdRendezvousHandler(settings, self._host)
        self._handler.prepare()
        self.world = 0
        """How many nodes its round has; 0 while it has none."""
        self.lost = False

    @property
    def incarnations(self) -> int:
        """How many members it has been so far, each with a lease of its own."""
        return len(self._handler._node.participant.ids)

    @property
    def is_called(self) -> bool:
        """Whether its agent would go back to the rendezvous."""
        return self._handler.num_nodes_waiting() > 0

    def join(self) -> Seated:
        """Take part in the next round."""
        info = self._handler.next_rendezvous()
        self.world = info.world_size
        return Seated(time.monotonic(), info.rank, info.world_size)

    def lose(self) -> None:
        """End the lease as etcd does when its host is gone. Nothing is heard of this agent afterwards."""
        self.lost = True
        self._host.revoke(self._host.leases[0])


@dataclass(frozen=True, slots=True)
class Order:
    """What the agents are to do until all of them are in a round of `world` nodes.

    Args:
        all_join: whether they all go to the rendezvous at once, or only when they are called back.
        lose: the number of the agent that is lost first, if any.
        add: whether the spare agent joins.
    """

    world: int
    all_join: bool = False
    lose: int | None = None
    add: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What one process did: the CPU seconds that it took, and its agents' seats."""

    cpu: float
    seats: Sequence[Seated]


@dataclass(frozen=True, slots=True)
class Phase:
    """One round: seconds until the last agent had it, and CPU seconds of all agents together."""

    seconds: float
    cpu: float


class Agents(Processes):
    """`count` agents and a spare one; context manager. All are prepared when it is entered."""

    def __init__(self, endpoints: str, count: int, processes: int = PROCESSES, patience: float = 300.0) -> None:
        super().__init__(count + SPARE, _serve, endpoints, count, patience, processes=processes, patience=patience)

    @property
    def made(self) -> Made:
        """What making all of them took."""
        return Made.of_all(self.ready)

    def do(self, order: Order) -> Phase:
        """Raises BenchmarkError when that does not come about in time, or not as ordered."""
        began = time.monotonic()
        answers: list[Done] = self.ask(order)
        seats = [seat for answer in answers for seat in answer.seats]
        ranks = sorted(seat.rank for seat in seats)
        if ranks != list(range(order.world)):
            different = len(set(ranks))
            raise BenchmarkError(
                f"a round of {order.world} nodes has {len(ranks)} ranks, {different} of them different"
            )
        return Phase(max(seat.at for seat in seats) - began, sum(answer.cpu for answer in answers))


def _serve(pipe: Connection, numbers: Sequence[int], endpoints: str, count: int, patience: float) -> None:
    logging.disable(logging.WARNING)
    # etcd has hosts of its own: hundreds of threads that wait for a processor must not push it aside. Where the kernel
    # groups processes by session (sched_autogroup_enabled), this counts only among those of one session.
    os.nice(10)
    threading.stack_size(512 * 1024)
    sys.setswitchinterval(1)  # else hundreds of threads that wait for the interpreter wake up 200 times a second each
    settings = RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint=_turned(endpoints, numbers[0]),
        run_id=RUN,
        min_nodes=max(count - 1, 1),
        max_nodes=count,
        local_addr="127.0.0.1",
        conf={"join_timeout": patience, "lease_ttl": LEASE_TTL, "request_timeout": REQUEST_TIMEOUT},
    )
    agents, made = making(lambda: {number: Agent(settings) for number in numbers})
    gc.freeze()  # a host has one agent, so it does not look through those of others for garbage
    spare = agents.pop(count, None)
    with ThreadPoolExecutor(len(numbers)) as pool:
        together = threading.Barrier(len(numbers))
        list(pool.map(lambda _: together.wait(), numbers))  # so that no thread has to be made in the first round
        pipe.send(made)
        while True:
            order: Order = pipe.recv()
            cpu = time.process_time()
            if order.add and spare is not None:
                agents[count], spare = spare, None
            if order.lose in agents:
                agents[order.lose].lose()
            seats = _obey(order, [agent for agent in agents.values() if not agent.lost], pool)
            pipe.send(Done(time.process_time() - cpu, seats))


def _obey(order: Order, agents: Sequence[Agent], pool: ThreadPoolExecutor) -> list[Seated]:
    """As agents do that look whether they are called back, until each is in a round as ordered."""
    joining: dict[Agent, Future[Seated]] = {}
    for agent in agents:
        if order.all_join or not agent.world:
            joining[agent] = pool.submit(agent.join)
    while True:
        for agent in agents:
            known = joining.get(agent)
            if (known is None or known.done()) and agent.is_called:
                joining[agent] = pool.submit(agent.join)
        if len(joining) < len(agents):
            threading.Event().wait(MONITOR_INTERVAL)
            continue
        late = next((one for one in joining.values() if not one.done()), None)
        if late is not None:
            wait([late], MONITOR_INTERVAL)  # to wait for all would mean to go to each of them, each time
        else:
            seats = [one.result() for one in joining.values()]
            if all(seat.world == order.world for seat in seats):
                return seats
            threading.Event().wait(MONITOR_INTERVAL)


def _turned(endpoints: str, by: int) -> str:
    """The same endpoints, beginning with another one: hosts are spread over the members."""
    known = endpoints.split(",")
    by %= len(known)
    return ",".join([*known[by:], *known[:by]])
