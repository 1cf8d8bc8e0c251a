"""`ftcoord run`: a process that dies is started again, and no other; signals go to all; it ends with the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import warm
from helpers import eventually

from ftcoord.commands.run import pause_after
from ftcoord.embedded.server import EtcdServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_train.py"
STAYS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
print("pid", os.getpid(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], *sys.argv[1:])
while True:
    time.sleep(0.1)
"""


class Run:
    """An `ftcoord run` and its output."""

    def __init__(self, log: Path, endpoint: str, *arguments: str, **env: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "ftcoord", "run", *arguments]
        with log.open("wb") as output:
            own = {**os.environ, "FTCOORD_ENDPOINTS": endpoint, **env}
            self.process = warm.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=own, torch=False)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def pids(self, pattern: str = r"\[(\d+)\] pid (\d+)") -> dict[int, int]:
        """The last pid of each local rank."""
        return {int(rank): int(pid) for rank, pid in re.findall(pattern, self.output)}

    def expect_exit(self, code: int) -> None:
        eventually(lambda: self.process.poll() is not None, lambda: f"it ends\n{self.output}")
        assert self.process.returncode == code, self.output


@contextmanager
def running(folder: Path, endpoint: str, *arguments: str, **env: str) -> Iterator[Run]:
    run = Run(folder / "log", endpoint, *arguments, **env)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "stays.py"
    path.write_text(STAYS)
    return str(path)


def test_the_one_that_died_is_started_again_and_signals_go_to_all(tmp_path: Path, script: str) -> None:
    with running(tmp_path, "127.0.0.1:1", "-n", "3", script, "--its", "own") as run:
        eventually(lambda: len(run.pids()) == 3, lambda: f"all run\n{run.output}")
        first = run.pids()
        assert f"[2] pid {first[2]} 2 3 --its own" in run.output
        os.kill(first[1], signal.SIGKILL)
        eventually(lambda: run.pids()[1] != first[1], lambda: f"it is started again\n{run.output}")
        assert {**run.pids(), 1: 0} == {**first, 1: 0}
        assert "process 1 was killed by SIGKILL; it is started again in 1 s" in run.output
        run.process.send_signal(signal.SIGUSR1)
        eventually(lambda: run.output.count("got USR1") == 3, "all get the signal")
        run.process.send_signal(signal.SIGTERM)
        run.expect_exit(1)
        assert "started again" not in run.output.partition("got USR1")[2]


def test_its_processes_end_with_it_also_if_it_is_killed(tmp_path: Path, script: str) -> None:
    with running(tmp_path, "127.0.0.1:1", "-n", "2", script) as run:
        eventually(lambda: len(run.pids()) == 2, lambda: f"all run\n{run.output}")
        run.process.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in run.pids().values()), "they end")


def test_a_script_that_fails_uses_up_its_restarts(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("raise SystemExit(3)")
    with running(tmp_path, "127.0.0.1:1", "--restarts", "1", str(path)) as run:
        run.expect_exit(1)
        assert "process 0 ended with exit code 3; it is started again in 1 s" in run.output
        assert "process 0 ended with exit code 3; it has used up its restarts" in run.output


def test_pauses_grow_with_lives_that_are_short() -> None:
    assert [pause_after(5, count) for count in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 30.0]
    assert pause_after(1000, 0) == 0


def test_a_signal_stops_all_at_one_step(etcd: EtcdServer, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "scripts" / "elastic_worker.py"
    arguments = ["-n", "2", "--job", tmp_path.name, str(worker), tmp_path.name, "2", "1000000", "stops=1", "pause=0.01"]
    with running(tmp_path, etcd.get_endpoint(), *arguments) as run:
        eventually(lambda: len(run.pids(r'\[(\d)\] .*"committed": (\d+)')) == 2, lambda: f"all train\n{run.output}")
        run.process.send_signal(signal.SIGTERM)
        run.expect_exit(0)
        assert len({*re.findall(r'"stopped": (\d+)', run.output)}) == 1
        assert len(re.findall(r'"ends": (\d+)', run.output)) == 2


def test_the_example_goes_on_when_one_is_killed(etcd: EtcdServer, tmp_path: Path) -> None:
    pattern = r"\[(\d+)\] pid (\d+), rank \d of 3: step"
    with running(tmp_path, etcd.get_endpoint(), "-n", "3", str(EXAMPLE), EPOCHS="12") as run:
        eventually(lambda: len(run.pids(pattern)) == 3, lambda: f"all train\n{run.output}")
        first = run.pids(pattern)
        os.kill(first[0], signal.SIGKILL)
        eventually(lambda: len(run.pids(r"\[(\d+)\] pid (\d+), rank \d of 2: step")) == 2, lambda: run.output)
        run.expect_exit(0)
        last = run.pids(r"\[(\d+)\] pid (\d+), rank \d of \d: step")
        assert {last[1], last[2]} == {first[1], first[2]}, "the others were not stopped"
