"""What torchrun lets its users choose beside the backend, and other ways to start it."""

from __future__ import annotations

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


def test_started_from_python(etcd: EtcdServer) -> None:
    done = warm.run(str(SCRIPTS / "launch.py"), etcd.get_endpoint())
    assert done.stdout.strip() == "{0: 'rank 0', 1: 'rank 1'}", done.stderr
