"""What a decider of quorums does while its group asks, one replica after another: as little as it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest.mock import patch

from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import QuorumPolicy
from ftcoord.coordination.replica import Replica
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.verdict import Verdict
from ftcoord.primitives.group.pace import TakeoverToken
from ftcoord.primitives.group.policy import View

SIZE = 5
ALL = Job("etcd", "", "all", min_replicas=SIZE, join_timeout_ms=60_000, heartbeat_timeout_ms=5000)
MOST = Job("etcd", "", "most", min_replicas=1, join_timeout_ms=8000, heartbeat_timeout_ms=5000)


@contextmanager
def replicas_of(world: World, job: Job, size: int) -> Iterator[list[Replica]]:
    """They have had a first quorum together; the first one decides, and nobody else, however long that takes."""
    nobody_looks = TakeoverToken()
    nobody_looks.take(world)
    with ExitStack() as stack:
        replicas = []
        for number in range(size):
            name = f"replica {number}"
            replica = Replica(world.etcd.client(), job, name, keeps_lease=True, takeover=nobody_looks)
            stack.callback(replica.leave, 1)
            replicas.append(replica)
            replica.beat(concurrency.now() + 10)
        for done in [begin(world, one, 0) for one in replicas]:
            done()
        yield replicas


def begin(world: World, replica: Replica, step: int, timeout: float = 60) -> Callable[[], QuorumRecord | None]:
    """Have it ask; returns what waits for the answer, None for none in time."""
    answers: list[QuorumRecord] = []
    request = QuorumRequest(replica.replica_id, "", "", step, 1, False, "", 0, ())

    def ask() -> None:
        with suppress(TimeoutError):
            answers.append(replica.ask(request, concurrency.now() + timeout))

    thread = concurrency.thread(ask, f"asks for {replica.replica_id}")
    thread.start()

    def done() -> QuorumRecord | None:
        thread.join(120)
        return answers[0] if answers else None

    return done


@simulated
def test_a_decider_decides_once_all_ask_and_not_for_each(world: World) -> None:
    """It looks when the first one asks, when it asks itself, after `HOLD` where others take longer, and at the last."""
    looks = 0
    decide = QuorumPolicy.decide

    def counted(self: QuorumPolicy, view: View, me: str, now: float) -> Verdict[bytes]:
        nonlocal looks
        looks += 1
        return decide(self, view, me, now)

    with replicas_of(world, ALL, SIZE) as (decider, *others):
        world.sleep(1)
        with patch.object(QuorumPolicy, "decide", counted):
            calls = [begin(world, decider, 1)]
            for one in others:
                world.sleep(0.001)
                calls.append(begin(world, one, 1))
            quorums = [done() for done in calls]
        assert [quorum and quorum.number for quorum in quorums] == [2] * SIZE
        assert looks <= 2, "one for the first that asks, and one for the last"


@simulated
def test_a_time_out_runs_from_the_first_ask_though_the_decider_need_not_look_at_it(world: World) -> None:
    """Nothing can be due before five of nine ask. The second one says again after 5 s what it asks, as all that wait
    do, and the first one gives up: so the second one has asked for longest when four more come."""
    with replicas_of(world, MOST, 9) as (_, first, second, *others):
        world.sleep(20)
        begun = world.scheduler.time
        begin(world, first, 1, timeout=6)
        world.sleep(0.005)
        waits = begin(world, second, 1)
        world.sleep(7)
        calls = [waits, *(begin(world, one, 1) for one in others[:4])]
        quorums = [done() for done in calls]
        assert all(quorum and len(quorum.seats) == 5 for quorum in quorums)
        assert 8 <= world.scheduler.time - begun < 8.5
