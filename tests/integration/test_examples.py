"""examples/train.py as the README starts it: it goes on after a `kill -9`, and from its checkpoint after a restart. And
examples/lost_peer.py: the others hear of what one died. And examples/leader.py: the next one leads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import warm
from helpers import DEADLINE, eventually
from jobs import Job
from victims import sentinels_of

from ftcoord.embedded.server import EtcdServer

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train.py"
PROGRESS = re.compile(r"rank \d of (\d): step (\d+) of \d+, loss (\d+\.\d+)")


def progress(job: Job, name: str) -> list[tuple[int, int, float]]:
    """World, step and loss of the lines that an agent's worker printed."""
    found = PROGRESS.findall(job.agents[name].terminal())
    return [(int(world), int(step), float(loss)) for world, step, loss in found]


def await_step(job: Job, name: str, world: int, after: int = 0) -> int:
    """Wait for a line of `name` about a step later than `after` in such a world; the step."""

    def step() -> int:
        return max((step for size, step, _ in progress(job, name) if size == world and step > after), default=0)

    return eventually(step, lambda: f"{name} trains in a world of {world}, beyond step {after}\n{job.story()}")


def test_training_goes_on_when_an_agent_is_killed_and_started_again(etcd: EtcdServer, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    env = {"CHECKPOINT": str(checkpoint), "STEPS": "1000000"}
    with Job(tmp_path, etcd.get_endpoint(), "2:3", conf={"last_call_timeout": 15}, env=env) as job:
        job.start("abc", entry=[str(SCRIPT)])
        await_step(job, "a", 3)
        eventually(checkpoint.exists, "the first checkpoint")
        orphans = set(job.processes("a")) - {job.agents["a"].pid}
        os.kill(job.agents["a"].pid, signal.SIGKILL)  # the agent alone, as a user does it: its worker is left behind
        assert job.agents["a"].wait() == -signal.SIGKILL
        killed_at = max(await_step(job, "b", 2), await_step(job, "c", 2))
        eventually(lambda: not orphans & set(job.processes("a")), "the killed agent's worker ends by itself")
        job.start("a", entry=[str(SCRIPT)])
        last = await_step(job, "a", 3, after=killed_at)
        for name in "abc":
            await_step(job, name, 3, after=last)
        firsts = [step for world, step, _ in progress(job, "b") if world == 2]
        assert firsts[0] > 50, f"the survivors began anew\n{job.story()}"
        assert progress(job, "b")[-1][2] < progress(job, "b")[0][2], job.story()


def test_a_finished_training_says_so_when_it_is_started_again(etcd: EtcdServer, tmp_path: Path) -> None:
    env = {"CHECKPOINT": str(tmp_path / "checkpoint.pt"), "STEPS": "200"}
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Job(folder, etcd.get_endpoint(), "1", run_id=f"{tmp_path.name}-{number}", env=env) as job:
            job.start("a", entry=[str(SCRIPT)])
            job.expect_exit(0, "a")
            assert "has 200 steps; delete it to train again" in job.agents["a"].terminal()
            assert [step for _, step, _ in progress(job, "a")] == ([] if number else [50, 100, 150, 200])


def test_a_worker_hears_of_what_its_peer_died(etcd: EtcdServer, tmp_path: Path) -> None:
    env = {**os.environ, "FTCOORD_ENDPOINTS": etcd.get_endpoint(), "JOB": tmp_path.name, "WORLD_SIZE": "2"}
    with ExitStack() as ends:

        def start(rank: int) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{rank}.log").open("wb") as output:
                process = warm.Popen(
                    [sys.executable, str(EXAMPLES / "lost_peer.py")],
                    env={**env, "RANK": str(rank)},
                    stdout=output,
                    stderr=output,
                )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        def said(rank: int) -> str:
            return (tmp_path / f"{rank}.log").read_text()

        survivor, victim = start(0), start(1)
        eventually(
            lambda: all(f"rank {rank} of 2 trains" in said(rank) for rank in range(2)),
            lambda: f"both train\n{said(0)}\n{said(1)}",
        )
        eventually(lambda: sentinels_of(victim.pid), "the victim has its sentinel")
        victim.kill()
        assert survivor.wait(DEADLINE) == 1, said(0)
    death = f"{os.uname().nodename} (pid {victim.pid}) was killed by signal 9 (SIGKILL)"
    assert f"rank 1 is lost: {death}" in said(0)


def test_another_process_leads_when_the_leader_is_killed(etcd: EtcdServer, tmp_path: Path) -> None:
    env = {**os.environ, "FTCOORD_ENDPOINTS": etcd.get_endpoint()}
    with ExitStack() as ends:

        def start(number: int) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{number}.log").open("wb") as output:
                process = warm.Popen(
                    [sys.executable, str(EXAMPLES / "leader.py"), tmp_path.name], env=env, stdout=output, stderr=output
                )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        def terms() -> list[tuple[int, int]]:
            """Each term that a process said it leads, and that process, in the order of the terms."""
            said = "".join((tmp_path / f"{number}.log").read_text() for number in range(3))
            return sorted((int(term), int(pid)) for pid, term in re.findall(r"pid (\d+) leads term (\d+)", said))

        processes = {process.pid: process for process in map(start, range(3))}
        for count in (1, 2, 3):
            eventually(lambda count=count: len(terms()) == count, lambda: f"another one leads: {terms()}")
            processes[terms()[-1][1]].kill()
        assert len({pid for _, pid in terms()}) == len({term for term, _ in terms()}) == 3
