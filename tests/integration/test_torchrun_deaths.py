"""What the death of an agent, or of a worker, does to workers that would hang: on real torchrun agents."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import warm
from below import descendants
from helpers import DEADLINE, eventually, freeze
from jobs import Job
from test_torchrun import decided, keys
from victims import runs

from ftcoord.embedded.server import EtcdServer
from ftcoord.primitives.orphans import GRACE
from ftcoord.primitives.sentinel import PROGRAM

DEAF = "trap '' INT TERM USR1; exec sleep 600"
"""A worker that heeds no signal but SIGKILL."""
ORDERLY = """
import subprocess, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.rendezvous.handler import create_handler

endpoint, run = sys.argv[1:]
handler = create_handler(RendezvousParameters("etcd-v3", endpoint, run, 1, 1))
handler.next_rendezvous()
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(worker.pid, Sentinel.of_process().pid, flush=True)
sys.stdin.read(1)
if run == "tidy":
    worker.kill()
    worker.wait()
handler.shutdown()
"""
"""An agent that knows nothing of its worker in the end, unless it is tidy."""


def run_of_one(folder: Path, endpoint: str, **conf: object) -> Job:
    """A run with one agent and one worker, which does not end by SIGTERM."""
    folder.mkdir()
    env = {"STUBBORN": "a"}
    return Job(folder, endpoint, "1", "idle.py", conf={"lease_ttl": 600, **conf}, env=env)


def worker_of(job: Job) -> int:
    """The pid of the one worker, once it runs."""
    job.round_of("a", kind="started")
    (started,) = job.events("started")
    return started.pid


def deaf_worker_of(job: Job) -> int:
    """The pid of the one DEAF worker, once it heeds no signal."""
    (pid,) = eventually(lambda: [pid for pid in job.processes("a") if command(pid) == "sleep\x00600\x00"], job.story)
    return pid


def sentinel_of(job: Job, name: str = "a") -> int:
    """The pid of an agent's sentinel, once there is one."""

    def found() -> list[int]:
        return [pid for pid in descendants(job.agents[name].pid) if PROGRAM in command(pid)]

    (pid,) = eventually(found, "the agent has a sentinel")
    return pid


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def kill_agent(job: Job) -> None:
    """With -9, alone: it leaves its worker behind."""
    job.agents["a"].signal(signal.SIGKILL)
    assert job.agents["a"].wait() == -signal.SIGKILL


def test_the_worker_of_an_agent_that_is_killed_ends_and_that_of_another_run_lives(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Both runs are on one host, and the workers take no notice of SIGTERM."""
    endpoint = etcd.get_endpoint()
    with run_of_one(tmp_path / "dies", endpoint) as dies, run_of_one(tmp_path / "lives", endpoint) as lives:
        for job in (dies, lives):
            job.start("a")
        orphan, other = worker_of(dies), worker_of(lives)
        sentinel_of(dies)
        kill_agent(dies)
        eventually(lambda: not dies.processes("a"), lambda: f"its worker {orphan} ends\n{dies.story()}")
        assert other in lives.processes("a"), lives.story()
        lives.finish("a")
        assert [event.pid for event in lives.events("finished")] == [other]


@pytest.mark.parametrize("after", [0.0, 0.15, 0.3])
def test_the_worker_of_an_agent_that_is_killed_just_after_its_start_ends_and_the_cause_is_known(
    etcd: EtcdServer, tmp_path: Path, after: float
) -> None:
    """The lease is younger than half a second. It has 600 s."""
    with run_of_one(tmp_path / f"young-{after}", etcd.get_endpoint()) as job:
        job.start("a", entry=["--no-python", "/bin/sh", "-c", DEAF])
        agent = job.agents["a"].pid
        deaf_worker_of(job)
        threading.Event().wait(after)
        kill_agent(job)
        eventually(lambda: not job.processes("a"), lambda: f"its worker ends\n{job.story()}")
        (death,) = eventually(lambda: keys(etcd, job, "deaths/"), "the cause is written")
        assert f"(pid {agent}) was killed by signal 9 (SIGKILL)" in death.value.decode()
        assert not keys(etcd, job, "members/"), "its lease is revoked"


@pytest.mark.parametrize("run", ["forgets", "tidy"])
def test_what_an_agent_leaves_behind_ends_though_it_ends_in_an_orderly_way(etcd: EtcdServer, run: str) -> None:
    """A signal's handler raises while it starts a worker: torch does not know of that worker, and sends it nothing.
    The sentinel of an agent that leaves nobody ends too."""
    with warm.python("-c", ORDERLY, etcd.get_endpoint(), run) as agent:
        assert agent.stdout is not None
        worker, sentinel = map(int, agent.stdout.readline().split())
        eventually(lambda: PROGRAM in command(sentinel), "its sentinel is another program by now")
        agent.communicate(".", timeout=DEADLINE)
        assert agent.returncode == 0
        eventually(lambda: not runs(worker), "its worker ends")
        eventually(lambda: not runs(sentinel), "its sentinel ends")


def test_no_worker_stays_however_often_ctrl_c_is_pressed(etcd: EtcdServer, tmp_path: Path) -> None:
    """While the agent stops its workers, it gets more signals, and gives up. The workers heed none."""
    with run_of_one(tmp_path / "impatient", etcd.get_endpoint()) as job:
        job.start("a", entry=["--no-python", "/bin/sh", "-c", DEAF])
        deaf_worker_of(job)
        while job.agents["a"].exit_code is None:
            job.agents["a"].signal(signal.SIGINT)
            threading.Event().wait(0.05)
        eventually(lambda: not job.processes("a"), lambda: f"its worker ends\n{job.story()}")


def test_a_signal_to_all_processes_of_a_node_leaves_no_worker(etcd: EtcdServer, tmp_path: Path) -> None:
    """As a scheduler sends before it takes the node away. The agent ends by it, and the worker does not."""
    with run_of_one(tmp_path / "preempted", etcd.get_endpoint()) as job:
        job.start("a", entry=["--no-python", "/bin/sh", "-c", DEAF])
        agent = job.agents["a"].pid
        for pid in (deaf_worker_of(job), sentinel_of(job), agent):
            os.kill(pid, signal.SIGUSR1)
        job.agents["a"].wait()
        (death,) = eventually(lambda: keys(etcd, job, "deaths/"), "the cause is written")
        assert f"(pid {agent}) was killed by signal 10 (SIGUSR1)" in death.value.decode()
        eventually(lambda: not job.processes("a"), lambda: f"its worker ends\n{job.story()}")


def test_workers_are_left_alone_where_that_is_wanted(etcd: EtcdServer, tmp_path: Path) -> None:
    with run_of_one(tmp_path / "run", etcd.get_endpoint(), orphans="leave") as job:
        job.start("a")
        orphan, sentinel = worker_of(job), sentinel_of(job)
        kill_agent(job)
        eventually(lambda: PROGRAM not in command(sentinel), "the sentinel has done all that it does")
        threading.Event().wait(GRACE + 1)  # nothing tells that nobody will kill it
        assert job.processes("a") == [orphan]
        job.order("stop")
        eventually(lambda: job.events("finished"), job.story)


def test_peers_of_a_worker_that_fails_are_called_back_though_another_one_of_its_node_does_not_end(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Its agent waits for that one for 30 s before it comes back, and its peers may hang in a collective."""
    conf, env = {"lease_ttl": 600}, {"STUBBORN": "b"}
    with Job(tmp_path, etcd.get_endpoint(), "2", "idle.py", workers=2, conf=conf, env=env) as job:
        job.start("ab")
        address = job.round_of("ab", kind="started")
        first = {event.rank: event for event in job.rounds("started")[address]}
        failing = max(rank for rank, event in first.items() if event.agent == "b")
        (stubborn,) = (event.pid for rank, event in first.items() if event.agent == "b" and rank != failing)
        peers = {event.pid for event in first.values() if event.agent == "a"}
        job.await_watched(address)
        job.order(f"crash-{failing}")
        eventually(lambda: not peers & set(job.processes("a")), lambda: f"the peers are stopped\n{job.story()}")
        assert stubborn in job.processes("b"), "its agent still waits for it, so it has not come back"
        recalled = decided(etcd, job).recalled
        assert f"(rank {failing}, local rank 1) exited with code 1" in recalled, recalled
        os.kill(stubborn, signal.SIGKILL)  # else it takes the rest of the 30 s
        job.round_of("ab", kind="started", after=[address])
        job.finish("ab")


def test_a_node_that_was_stopped_while_the_others_went_on_and_finished_is_called_back(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Its workers would wait for those of peers that have left."""
    with Job(tmp_path, etcd.get_endpoint(), "2:3", "idle.py") as job:
        job.start("ab")
        job.start("c", entry=["--no-python", "/bin/sh", "-c", "sleep 3456"])
        agent = job.agents["c"]

        def workers() -> list[int]:
            return [pid for pid in descendants(agent.pid) if "sleep 3456" in command(pid).replace("\0", " ")]

        eventually(lambda: workers() and decided(etcd, job).ready, job.story)
        before = job.rounds("started")
        stopped = [sentinel_of(job, "c"), agent.pid]
        for pid in stopped:
            freeze(pid)
        job.round_of("ab", kind="started", after=before)
        job.finish("ab")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        job.expect_exit(1, "c")
        assert "the workers are stopped: " in agent.terminal()  # it may read round 2 before it reads its end
        eventually(lambda: not job.processes("c"), lambda: f"nothing of it is left\n{job.story()}")
