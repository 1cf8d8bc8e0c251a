"""What the death of an agent, or of a worker, does to workers that would hang: on real torchrun agents."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import warm
from helpers import eventually, freeze
from jobs import SCRIPTS, Job
from test_torchrun import decided
from victims import runs

from ftcoord.demo.agents import descendants
from ftcoord.embedded.server import EtcdServer
from ftcoord.primitives.orphans import GRACE
from ftcoord.primitives.sentinel import PROGRAM


def run_of_one(folder: Path, endpoint: str, **conf: object) -> Job:
    """A run with one agent and one worker, which does not end by SIGTERM, and hides its environment at SIGUSR1."""
    folder.mkdir()
    env = {"STUBBORN": "a", "TITLED": "a"}
    return Job(folder, endpoint, "1", "idle.py", conf={"lease_ttl": 600, **conf}, env=env)


def worker_of(job: Job) -> int:
    """The pid of the one worker, once it runs."""
    job.round_of("a", kind="started")
    (started,) = job.events("started")
    return started.pid


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


def kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


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


def test_a_worker_that_has_written_over_its_environment_ends_too_and_no_other_runs(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """As `setproctitle` does: its mark is not to be seen any longer."""
    endpoint = etcd.get_endpoint()
    with ExitStack() as ends:
        dies, lives = (
            ends.enter_context(run_of_one(tmp_path / name, endpoint)) for name in ("titled-dies", "titled-lives")
        )
        workers = []
        for job in (dies, lives):
            job.start("a")
            pid = worker_of(job)
            workers.append(pid)
            ends.callback(kill, os.pidfd_open(pid))  # the job would not find it
            sentinel_of(job)
            job.await_watched(job.round_of("a", kind="started"))
            os.kill(pid, signal.SIGUSR1)
            eventually(lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes().endswith(b"\0\0"), "it is hidden")
        orphan, other = workers
        kill_agent(dies)
        eventually(lambda: not runs(orphan), lambda: f"its worker {orphan} ends\n{dies.story()}")
        assert runs(other), lives.story()
        lives.finish("a")


def test_a_worker_that_the_agent_has_forked_ends_too(etcd: EtcdServer, tmp_path: Path) -> None:
    """`start_method=fork`: it shows the agent's own environment, which has no mark."""
    agent = warm.Popen([sys.executable, str(SCRIPTS / "forked_worker.py"), etcd.get_endpoint(), str(tmp_path)])
    with ExitStack() as ends:
        ends.callback(agent.communicate)
        ends.callback(agent.kill)
        eventually(lambda: (tmp_path / "noted").exists(), "the agent has told of its worker")
        (worker,) = (int(file.name.partition("-")[2]) for file in tmp_path.glob("worker-*"))
        ends.callback(kill, os.pidfd_open(worker))
        eventually(lambda: any(PROGRAM in command(pid) for pid in descendants(agent.pid)), "it has a sentinel")
        agent.kill()
        agent.wait()
        eventually(lambda: not runs(worker), "its worker ends")


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
