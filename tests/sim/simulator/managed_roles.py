"""Replica groups of several ranks behind torchft's manager: all of it but the port, with the ranks in its process."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, TypeVar

from ftcoord import concurrency
from ftcoord.coordination import manager, ranks
from ftcoord.coordination.manager import ManagedGroup
from ftcoord.coordination.manager_client import ManagerClient
from ftcoord.coordination.ranks import RankGroup, RankRequest
from ftcoord.core.quorum_records import QuorumRecord
from simulator.oracles import require
from simulator.role import RESTART_PAUSE, Hold, Role
from simulator.stubs import replacing
from simulator.vote_rules import RankCalls

if TYPE_CHECKING:
    from simulator.world import Process, World

T = TypeVar("T")

CONNECT_TIMEOUT: Final = timedelta(seconds=5)
SECONDS: Final = (0.05, 0.5, 3.0)
"""How long a rank waits for the others."""
LATE: Final = 1.0
"""Seconds by which a call may end late: its process is one of several that share a processor."""
LAST_MOMENT: Final = 0.0005
"""Seconds: a vote takes that long in virtual time."""


class TaskFuture(Future[T]):
    """In place of `Future`: to wait for its result is a task's wait."""

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            ended = concurrency.event()
            self.add_done_callback(lambda _: ended.set())
            ended.wait(timeout)
        return super().result(0)


class PortStub:
    """In place of `RankPort`: all ranks are in their manager's process, and need none."""

    def __init__(self, _listener: object, group: RankGroup, *_rest: object) -> None:
        self._group = group  # as the port does: nobody else has it

    def close(self) -> None:
        pass


@contextlib.contextmanager
def managers_installed(world: World) -> Iterator[None]:
    """Managers without sockets: their ports are numbers."""
    numbers = iter(range(30_000, 60_000))
    with replacing() as put:
        put(ranks, "Future", TaskFuture)
        put(manager, "RankPort", PortStub)
        put(manager, "listen", lambda _bind: SimpleNamespace(getsockname=lambda: ("", next(numbers))))
        put(manager, "own_place", lambda *_: ("", "localhost"))
        put(manager, "parse_address", lambda *_: None)
        put(manager, "token_hex", lambda size: "0" * 2 * size)  # a history depends on its seed only
        put(manager, "stop_listening", lambda _listener: None)
        put(manager, "show_if_asked", lambda: None)
        put(manager, "serve_process", lambda _address: None)
        put(manager, "connect", lambda *_: (world.job, Hold(world.asking.client)))
        yield


class JudgedGroup(ManagedGroup):
    """Has an oracle look at what it asks for, and what it is told, in the name of all ranks."""

    def __init__(self, process: Process, role: Group, world_size: int) -> None:
        self._process, self._role = process, role
        super().__init__(
            role.name,
            "etcd",
            process.name,
            bind="[::]:0",
            store_addr="store:1",
            world_size=world_size,
            connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        )

    def _ask(self, requests: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        self._process.check(self._role.asks, {rank: int(one.metadata) for rank, one in requests.items()}, last)
        world = self._process.world
        world.oracles.quorums.asks(self._process.name, self._role.name, world.scheduler.time)
        told = super()._ask(requests, last)
        self._role.told_at = world.scheduler.time
        self._process.note("#", f"step {last.step} with quorum {told.number}, id {told.id}: {sorted(told.names)}")
        self._process.check(world.oracles.quorums.told, self._role.name, told)
        return told


class Group(Role):
    """A replica group: a manager, and ranks that ask for a quorum and vote in each step. Some give up early, some vote
    twice at once, and now and then the manager is another one."""

    told_at = -1.0
    name = ""
    calls: RankCalls

    def live(self, process: Process) -> None:
        self.name, size = process.name.partition(".")[0], self.draw.randint(1, 3)
        while not process.leaves.is_set():
            self.calls = RankCalls(size)
            self.world.oracles.calls.append((process.name, self.calls))
            try:
                group = JudgedGroup(process, self, size)
            except RuntimeError as error:
                process.note("!", f"is refused: {error}")
                process.rest(RESTART_PAUSE)
                continue
            self._run_ranks(process, group, size)

    def _run_ranks(self, process: Process, group: ManagedGroup, size: int) -> None:
        over = concurrency.event()
        threads = [
            concurrency.thread(
                Rank(self, process, group.address, rank, random.Random(self.draw.random())).live, f"rank{rank}", over
            )
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        process.rest(self.draw.choice((3.0, 100.0)))
        over.set()
        group.close()
        for thread in threads:
            thread.join()
        self.world.oracles.quorums.left(process.name, self.name)

    def asks(self, process: str, asking: Mapping[int, int], last: RankRequest) -> None:
        """The group is about to ask for a quorum."""
        problem = self.calls.problem_of_ask(asking, int(last.metadata))
        require("a group asks when all of its ranks do", not problem, f"{process}: {problem}")

    def ends(self, process: str, until: float, seconds: float) -> None:
        """A rank's vote has ended that was to last for so many seconds, until then; it may have stood still."""
        late, stood_still = self.world.scheduler.time - until, self.world.begun[process].resumed_at > until - seconds
        require("a vote ends in time", late < LATE or stood_still, f"{process}: a vote ends {late:.3f} s late")

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        """Not a quorum of all: the ranks of one group wait for each other while another one asks."""
        groups = {role.name: role for _, role in world.of(cls)}
        if len(groups) < world.job.min_replicas:
            return ""
        late = [name for name, one in groups.items() if one.told_at < since + 1]
        return f"{late} are in no quorum" if late else ""


class Rank:
    """One rank of a group, in its manager's process."""

    def __init__(self, group: Group, process: Process, address: str, rank: int, draw: random.Random) -> None:
        self._group, self._process, self._rank, self._draw = group, process, rank, draw
        self._moment, self._calls = process.world.moment, group.calls
        self._client = ManagerClient(address, CONNECT_TIMEOUT)
        self._step = 0

    def live(self, over: concurrency.Event) -> None:
        """Until its manager is over."""
        while not over.is_set():
            if not self._asks():
                over.wait(self._draw.choice((0.0, 0.1)))
                continue
            over.wait(self._draw.uniform(0, 0.3))
            if self._draw.random() < 0.3:
                self._await_last_moment(over)
            if self._draw.random() < 0.1:
                concurrency.thread(self._votes, f"rank{self._rank} again").start()
            self._step += self._votes()

    def _await_last_moment(self, over: concurrency.Event) -> None:
        """Wait until another rank is about to give up its vote."""
        left = self._calls.first_to_give_up() - self._process.world.scheduler.time
        if left < math.inf:
            over.wait(max(left - self._draw.uniform(0, LAST_MOMENT), 0))

    def _asks(self) -> bool:
        """Whether there is a quorum."""
        call = self._calls.begin(self._rank, None, self._moment())
        seconds = timedelta(seconds=self._draw.choice(SECONDS[1:]))
        try:
            self._client._quorum(self._rank, self._step, str(call.began), False, True, 0, seconds)
        except (TimeoutError, RuntimeError):
            return False
        finally:
            call.ended = self._moment()
        return True

    def _votes(self) -> bool:
        """What its vote came to: no, if it was told nothing."""
        seconds = timedelta(seconds=self._draw.choice(SECONDS))
        until = self._process.world.scheduler.time + seconds.total_seconds()
        vote = self._calls.begin(self._rank, self._draw.random() < 0.8, self._moment(), until)
        try:
            vote.told = self._client.should_commit(self._rank, self._step, bool(vote.yes), seconds)
        except (TimeoutError, RuntimeError):
            return False
        finally:
            vote.ended = self._moment()
            self._process.check(self._group.ends, until, seconds.total_seconds())
        self._process.note("#", f"rank {self._rank} is told {'to commit' if vote.told else 'not to commit'}")
        self._process.check(self._process.world.oracles.voted, self._calls, vote)
        return vote.told
