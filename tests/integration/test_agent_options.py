"""What torchrun lets its users choose beside the backend, and other ways to start it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import warm
from jobs import SCRIPTS, Job

from ftcoord.embedded.server import EtcdServer


def test_two_workers_on_each_agent(etcd: EtcdServer, tmp_path: Path) -> None:
    """All agents have as many: then each assigns ranks for itself, and not through the rendezvous's store."""
    env = {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
    with Job(tmp_path, etcd.get_endpoint(), "2", workers=2, env=env) as job:
        job.start("ab")
        first = job.round_of("ab")
        job.order("crash-3")
        job.round_of("ab", after=[first])
        job.finish("ab")


def test_the_events_of_the_rendezvous_are_recorded(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "1", "idle.py") as job:
        job.start("a", "--event-log-handler=console")
        job.round_of("a", kind="started")
        job.finish("a")
        text = job.agents["a"].terminal()
        events = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '"name": "torchelastic' in line]
        assert {json.loads(json.dumps(event["metadata"]))["rdzv_backend"] for event in events} == {"etcd-v3"}


IDS = ["a%2Fb", "a", "größe 你 好"]


def test_runs_of_any_id_share_an_etcd(etcd: EtcdServer, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, run_id in enumerate(IDS):
            folder = tmp_path / str(number)
            folder.mkdir()
            jobs.append(stack.enter_context(Job(folder, etcd.get_endpoint(), "1", "idle.py", run_id=run_id)))
            jobs[-1].start("a")
        for job, run_id in zip(jobs, IDS, strict=True):
            job.round_of("a", kind="started")
            assert {event.run_id for event in job.events("started")} == {run_id}
        jobs[0].finish("a")
        assert all(job.agents["a"].exit_code is None for job in jobs[1:])
        for job in jobs[1:]:
            job.finish("a")


def test_started_from_python(etcd: EtcdServer) -> None:
    done = warm.run(str(SCRIPTS / "launch.py"), etcd.get_endpoint())
    assert done.stdout.strip() == "{0: 'rank 0', 1: 'rank 1'}", done.stderr
