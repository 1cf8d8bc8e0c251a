"""All leases end at once, though nobody has died: what runs is left alone, unless etcd has lost its round."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import SIZE, Cluster
from etcd_cluster import FragileEtcd
from load import two_jobs

pytestmark = pytest.mark.alone

HANGS = [float(part) for part in os.environ.get("FTCOORD_TEST_HANGS", "3.7").split(",")]
"""In leases, for how long etcd hangs: 37 s with the default. 60 are ten minutes; `tests/sim` has those too."""
TTL = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FragileEtcd]:
    with FragileEtcd(data_dir=str(tmp_path / "etcd")) as server:
        yield server


@pytest.mark.parametrize("leases", HANGS)
def test_the_only_etcd_hangs(server: FragileEtcd, prefix: str, figures: Callable[..., None], leases: float) -> None:
    """It ends all leases when it goes on."""
    with two_jobs(server.get_endpoint(), prefix, TTL) as jobs:
        before = [node.lease() for node in jobs.run.nodes]
        server.pause()
        jobs.wait(leases * TTL)
        server.resume()
        jobs.stay_undisturbed()
        lost = sum(node.lease() != lease for node, lease in zip(jobs.run.nodes, before, strict=True))
        assert lost, "this was no test"
        round_, quorum = jobs.go_on()
    figures(seconds=leases * TTL, leases_lost=lost, evictions=0, round_after=round_, quorum_after=quorum)


def test_the_majority_hangs(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    hang(cluster, SIZE - 1, prefix, figures)


@pytest.mark.forms("containers")
def test_all_members_hang(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    hang(cluster, SIZE, prefix, figures)


def hang(cluster: Cluster, count: int, prefix: str, figures: Callable[..., None]) -> None:
    """The leader and others; they revoke leases when they go on (etcd issue 15247)."""
    with two_jobs(cluster.endpoints, prefix, TTL) as jobs:
        leader = cluster.leader()
        gone = [(leader + i) % SIZE for i in range(count)]
        for i in gone:
            cluster.pause(i)
        jobs.wait(HANGS[0] * TTL)
        for i in gone:
            cluster.resume(i)
        jobs.stay_undisturbed()
        round_, quorum = jobs.go_on()
    figures(seconds=HANGS[0] * TTL, members=count, evictions=0, round_after=round_, quorum_after=quorum)


def test_a_snapshot_is_restored(server: FragileEtcd, tmp_path: Path, prefix: str, figures: Callable[..., None]) -> None:
    """Its record is of an earlier round, and its leases are of nobody."""
    data, snapshot = tmp_path / "etcd", tmp_path / "snapshot"
    with two_jobs(server.get_endpoint(), prefix, TTL) as jobs:
        server.kill()
        shutil.copytree(data, snapshot)
        server.restart()
        jobs.stay_undisturbed()
        jobs.go_on()
        server.kill()
        shutil.rmtree(data)
        shutil.copytree(snapshot, data)
        server.restart()
        round_, quorum = jobs.start_over()
    figures(round_after=round_, quorum_after=quorum)
