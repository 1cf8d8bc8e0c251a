"""Real torchrun agents with real gloo workers on a real etcd: jobs that run, lose agents, grow, and end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job, eventually

from ftcoord.etcd.api import Get, KeyValue, Span
from ftcoord.etcd.server import EtcdServer


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def keys(server: EtcdServer) -> list[KeyValue]:
    """All that there is in etcd."""
    with server.get_client() as client:
        return list(client.range(Get(Span("", is_prefix=True), keys_only=True)).kvs)


def test_a_job_of_three_agents_runs(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "3", run_id="team/jöb 1") as job:
        (tmp_path / "logs" / "team").mkdir()  # torch puts the logs into <log dir>/<run id>_...
        job.start("abc")
        job.round_of("abc")
        joined = job.events("joined")
        assert {(event.sum, event.size, event.restarts) for event in joined} == {(3.0, 3, 0)}
        assert {(event.run_id, event.agent_store) for event in joined} == {("team/jöb 1", "True")}
        job.finish("abc")
        assert len(job.events("finished")) == 3
        assert "Traceback" not in job.terminals()
        job.start("d")
        job.expect_exit(1, "d")
        assert "is over" in job.agents["d"].terminal()
        assert "RendezvousClosedError" in job.agents["d"].terminal()


def test_agents_that_die_are_replaced(etcd: EtcdServer, tmp_path: Path) -> None:
    """Longer than every time to live, so this also shows that the state of a run is kept as long as it runs."""
    with Job(tmp_path, etcd.get_endpoint(), "2:3", conf={"run_ttl": 9}) as job:
        job.start("abc")
        first = job.round_of("abc")
        ranks = job.ranks(first)
        zero, one, two = sorted(ranks, key=lambda name: ranks[name])

        job.kill(one)
        second = job.round_of(zero + two)
        assert job.ranks(second) == {zero: 0, two: 1}

        job.start("d")
        third = job.round_of(zero + two + "d")
        assert job.ranks(third)[zero] == 0

        job.kill(zero)
        fourth = job.round_of(two + "d")
        assert len({first, second, third, fourth}) == 4
        job.finish(two + "d")
        assert all(kv.lease for kv in keys(etcd))
    eventually(lambda: not keys(etcd), lambda: f"all keys expire, and not only {keys(etcd)}")
