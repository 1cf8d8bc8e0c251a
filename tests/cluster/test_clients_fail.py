"""Clients that are cut off, stopped and killed: the others move on, and nothing that comes late has an effect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from clusters import Cluster, pass_time
from cutting import Lines
from helpers import DEADLINE, eventually
from load import LEASE_TTL, Run, StoreLoad
from rdzv_nodes import Node, NodeProcess, Nodes, all_signalled, check_round, join_as_agents, processes, spawn
from replicas import agreed, managed, replica_processes, until_it_is_in

from ftcoord.core.lease import SessionState
from ftcoord.errors import RoundOver

pytestmark = pytest.mark.alone

LOST_ANSWERS = int(os.environ.get("FTCOORD_TEST_LOST_ANSWERS", "6"))
STOPS = [float(part) for part in os.environ.get("FTCOORD_TEST_STOPS", "0.3,1.1").split(",")]
"""In leases: for how long a client is stopped."""
SHORT_TTL = 3


def state(node: Node) -> SessionState:
    member = node.handler._node.participant.member
    assert member is not None
    return member.session.state


def test_cut_off_for_less_than_half_a_lease(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """In both directions and in each, at once: nobody is evicted."""
    ways = [{}, {"requests": False}, {"answers": False}]
    with ExitStack() as stack:
        lines = [stack.enter_context(Lines(cluster.endpoints.split(","))) for _ in ways]
        run = Run([cluster.endpoints, *(line.endpoints for line in lines)], prefix.rpartition("/")[2])
        stack.callback(run.close)
        for line, way in zip(lines, ways, strict=True):
            line.hold(**way)
        pass_time(LEASE_TTL / 2 - 0.5)
        for line in lines:
            line.release()
        pass_time(LEASE_TTL)
        figures(ways=len(ways), seconds=LEASE_TTL / 2 - 0.5, evictions=run.evictions())
        assert run.evictions() == 0


def test_cut_off_for_longer_than_a_lease(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """It stops trusting its lease before the others move on, and what it wrote meanwhile is refused when it arrives."""
    with ExitStack() as stack:
        line = stack.enter_context(Lines(cluster.endpoints.split(",")))
        run = Run(
            [cluster.endpoints, cluster.endpoints, line.endpoints], prefix.rpartition("/")[2], lease_ttl=SHORT_TTL
        )
        stack.callback(run.close)
        *others, cut = run.nodes
        assert cut.info is not None
        store = cut.info.store
        line.hold()
        since = time.monotonic()
        late = spawn(lambda: store.set("late", ""))
        for node in others:
            eventually(lambda node=node: node.signalled() or state(cut) is not SessionState.CONNECTED, what="it ends")
        assert state(cut) is not SessionState.CONNECTED, "it trusted its lease while the others moved on"
        all_signalled(others)
        took = time.monotonic() - since
        joins = [node.join() for node in others]
        assert {seat.round for seat in join_as_agents(others, joins)} == {2}
        line.release()
        with pytest.raises(RoundOver):
            late.result(DEADLINE)
        eventually(cut.signalled, what="it learns that its lease is gone")
        until = time.monotonic() + 2 * SHORT_TTL
        while time.monotonic() < until:  # it may say that it holds its old seat, but that is another round's
            assert cut.signalled(), "it is back in a round that others have left"
            assert not any(node.signalled() for node in others)
            pass_time(0.1)
        assert len({seat.round for seat in run.come_back()}) == 1
        figures(lease=SHORT_TTL, others_called_back_after=round(took, 2), stale_writes=0)


def test_lost_and_late_answers_have_no_double_effect(
    cluster: Cluster, prefix: str, figures: Callable[..., None]
) -> None:
    with Lines(cluster.endpoints.split(",")) as line:
        load = StoreLoad(line.endpoints, prefix)
        try:
            for count in range(LOST_ANSWERS):
                load.progress(10)
                line.hold(requests=False)
                pass_time(0.3 if count % 3 else 2.5)  # the longer ones are given up by the clients
                (line.reset if count % 2 else line.release)()
            load.progress(10)
            load.stop()
            load.judge()
        finally:
            load.close()
    figures(cuts=LOST_ANSWERS, operations=len(load.operations), lost_doubled_or_misordered=0)


def test_a_replica_is_cut_off_for_longer_than_its_lease(cluster: Cluster, prefix: str) -> None:
    """The others go on without it, and it comes back to a quorum with a higher id."""
    with ExitStack() as stack:
        line = stack.enter_context(Lines(cluster.endpoints.split(",")))
        rules = f"{prefix.rpartition('/')[2]}?min_replicas=2&join_timeout_ms=3000&heartbeat_timeout_ms=3000"
        addresses = [
            f"etcd://{endpoints}/{rules}" for endpoints in (cluster.endpoints, cluster.endpoints, line.endpoints)
        ]
        pairs = managed([stack.enter_context(replica_processes(address, 1))[0] for address in addresses])
        *others, (cut, address) = pairs
        together = eventually(lambda: _all_in(pairs), what="all three in one quorum")
        line.hold()
        waiting = cut.quorum(address, step=1)
        alone = eventually(lambda: _only(others, ["a", "b"]), what="a quorum without it")
        assert alone[0] > together[0]
        line.release()
        assert until_it_is_in(waiting, others)[0] in (together[0], *range(alone[0] + 1, alone[0] + 100))
        assert until_it_is_in(cut.quorum(address, step=2), others)[0] > alone[0]


def _only(pairs: list, names: list[str]) -> tuple[int, list[str]] | None:  # type: ignore[type-arg]
    told = agreed([process.quorum(at, step=1) for process, at in pairs])
    return told if told[1] == names else None


def _all_in(pairs: list) -> tuple[int, list[str]] | None:  # type: ignore[type-arg]
    told = [future.result(DEADLINE) for future in [process.quorum(at) for process, at in pairs]]
    return told[0] if all(one == told[0] and len(one[1]) == len(pairs) for one in told) else None


@contextmanager
def two_and_a_process(cluster: Cluster, run_id: str) -> Iterator[tuple[list[Node], NodeProcess]]:
    """Two nodes here and one in a process of its own, in one round."""
    conf = {"lease_ttl": SHORT_TTL, "last_call_timeout": DEADLINE}
    run = Nodes(cluster.endpoints, run_id, (2, 3), **conf)
    process = NodeProcess(cluster.endpoints, run_id, (2, 3), **conf)
    with ExitStack() as stack:
        stack.callback(run.end)
        stack.enter_context(processes(process))
        nodes = run.add(2)
        process.send("join")
        joins = [node.join() for node in nodes]
        seats = [process.seat(), *(join.result(DEADLINE) for join in joins)]
        check_round(sorted(seats, key=lambda seat: seat.rank))
        yield nodes, process


@pytest.mark.parametrize("leases", STOPS)
def test_a_client_is_stopped(cluster: Cluster, prefix: str, figures: Callable[..., None], leases: float) -> None:
    """With SIGSTOP, as a host that swaps is: for less than a lease and for longer. No stale write is accepted."""
    with two_and_a_process(cluster, prefix.rpartition("/")[2]) as (others, stopped):
        stopped.pause()
        since = time.monotonic()
        if leases > 1:
            all_signalled(others)
            seats = join_as_agents(others, [node.join() for node in others])
            assert {seat.world for seat in seats} == {2}
        pass_time(max(leases * SHORT_TTL - (time.monotonic() - since), 0))
        stopped.resume()
        since = time.monotonic()
        refused = stopped.ask("write")
        told = 0.0
        if leases > 1:
            assert refused == "RoundOverError"
            eventually(lambda: stopped.ask("waiting"), what="its workers are told")
            told = time.monotonic() - since
        elif leases < 0.5:
            assert refused == ""
            assert not any(node.signalled() for node in others)
    figures(lease=SHORT_TTL, stale_writes=0, told_after=round(told, 2))


def test_a_process_dies_with_the_leader(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """It is missed though the new leader gives every lease its full time again, and it is missed once."""
    with two_and_a_process(cluster, prefix.rpartition("/")[2]) as (others, victim):
        leader = cluster.leader()
        since = time.monotonic()
        victim.kill()
        cluster.kill(leader)
        all_signalled(others)
        seats = join_as_agents(others, [node.join() for node in others])
        took = time.monotonic() - since
        assert {(seat.round, seat.world) for seat in seats} == {(2, 2)}
        cluster.restart(leader)
        pass_time(SHORT_TTL)
        assert not any(node.signalled() for node in others)
    figures(lease=SHORT_TTL, new_round_after=round(took, 2), bound=2 * SHORT_TTL + 5)
