"""Members of etcd that die, hang, are cut off and upgraded, while everything is in use: nobody is evicted for that."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import pytest
from clusters import SIZE, Cluster, pass_time, revokes_wrongly
from load import everything

pytestmark = pytest.mark.alone

KILLS = int(os.environ.get("FTCOORD_TEST_KILLS", "2"))
PAUSE = float(os.environ.get("FTCOORD_TEST_PAUSE", "7"))
"""Seconds; longer than the leases."""


def test_the_leader_is_killed(
    cluster: Cluster, prefix: str, figures: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """With -9, under load, again and again."""
    stalls, quorum_stalls = [], []
    with everything(cluster.endpoints, prefix) as load:
        for _ in range(KILLS):
            load.progress()
            leader = cluster.leader()
            since = time.monotonic()
            cluster.kill(leader)
            load.progress()
            stalls.append(load.store.stall(since))
            quorum_stalls.append(load.training.stall(since))
            cluster.restart(leader)
        told = load.end()
    figures(
        kills=KILLS,
        **told,
        stall_median=round(statistics.median(stalls), 2),
        stall_max=round(max(stalls), 2),
        quorum_stall_median=round(statistics.median(quorum_stalls), 2),
        quorum_stall_max=round(max(quorum_stalls), 2),
    )
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    if KILLS >= 20:
        assert statistics.median(stalls) <= 3


def test_the_leader_hangs(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    hang(cluster, 0, prefix, figures)


@pytest.mark.forms("containers")
def test_a_follower_hangs(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    hang(cluster, 1, prefix, figures)


def hang(cluster: Cluster, after_leader: int, prefix: str, figures: Callable[..., None]) -> None:
    """The member that has this place after the leader, for longer than the leases."""
    with everything(cluster.endpoints, prefix) as load:
        load.progress()
        member = (cluster.leader() + after_leader) % SIZE
        since = time.monotonic()
        cluster.pause(member)
        load.progress()
        pass_time(PAUSE - (time.monotonic() - since))
        load.progress()
        assert load.evictions() == 0
        cluster.resume(member)
        load.progress()
        told = load.end(may_evict=revokes_wrongly(cluster))
        if told["evictions"]:
            assert len({seat.round for seat in load.run.come_back()}) == 1
    figures(seconds=PAUSE, **told)


@pytest.mark.forms("containers")
def test_the_leader_is_cut_off(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """For longer than the leases. In containers its peers do not hear it either: it believes that it leads."""
    with everything(cluster.endpoints, prefix) as load:
        load.progress()
        leader = cluster.leader()
        since = time.monotonic()
        cluster.cut_off(leader)
        load.progress()
        pass_time(PAUSE - (time.monotonic() - since))
        load.progress()
        cluster.heal(leader)
        load.progress()
        told = load.end()
    figures(seconds=PAUSE, **told)


@pytest.mark.forms("containers")
def test_every_member_is_restarted_in_turn(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    with everything(cluster.endpoints, prefix) as load:
        for i in range(SIZE):
            load.progress()
            cluster.restart(i)
        load.progress()
        told = load.end()
    figures(restarts=SIZE, **told)
