"""All ranks of a real torchrun job leave their loops at one step, whoever asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import eventually
from jobs import Job

from ftcoord.embedded.server import EtcdServer


def ftcoord(server: EtcdServer, *arguments: str) -> str:
    command = [sys.executable, "-m", "ftcoord", *arguments, "--endpoints", server.get_endpoint()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def expect_one_last_step(job: Job, ranks: int) -> None:
    eventually(lambda: len(job.events("finished")) == ranks, lambda: f"all ranks end\n{job.story()}")
    assert len({event.sum for event in job.events("finished")}) == 1, job.story()
    assert {event.restarts for event in job.events("started")} == {0}, job.story()


def test_an_operator_stops_a_job_which_may_be_started_again(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "2", "stopping.py", workers=2) as job:
        job.start("ab")
        first = job.round_of("ab")
        out = ftcoord(etcd, "stop", job.run_id, "--yes", "--reason", "maintenance")
        assert "to stop at one agreed step" in out
        assert out.rstrip().endswith(": maintenance")
        expect_one_last_step(job, 4)
        job.expect_exit(0, "ab")
        assert "maintenance" in ftcoord(etcd, "why", job.run_id)
        job.start("cd")
        job.round_of("cd", after=[first])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_is_preempted(etcd: EtcdServer, tmp_path: Path, rank: int) -> None:
    """Its agent stops first. The workers of the other one save for longer, and are not disturbed."""
    with Job(tmp_path, etcd.get_endpoint(), "2", "stopping.py") as job:
        job.start("ab")
        ranks = job.ranks(job.round_of("ab"))
        preempted, other = sorted(ranks, key=lambda agent: ranks[agent] != rank)
        job.order(f"slow-{1 - rank}")
        job.agents[preempted].signal(signal.SIGTERM)
        expect_one_last_step(job, 2)
        job.expect_exit(0, other)
        assert job.agents[preempted].wait() != 0


def test_a_worker_is_asked(etcd: EtcdServer, tmp_path: Path) -> None:
    """As by Slurm, which signals all processes of a job, or one of them."""
    with Job(tmp_path, etcd.get_endpoint(), "2", "stopping.py", workers=2) as job:
        job.start("ab")
        job.round_of("ab")
        os.kill(job.events("joined")[-1].pid, signal.SIGTERM)
        expect_one_last_step(job, 4)
        job.expect_exit(0, "ab")
        assert "received SIGTERM" in ftcoord(etcd, "why", job.run_id)
