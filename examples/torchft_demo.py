"""`make demo-torchft`: torchft trains with no lighthouse, loses a replica group and its etcd, and goes on.

Three replica groups (`torchft_ddp.py`, one process each) meet through an etcd that is started here. All of them end
with this process, whatever ends it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import FtcoordError

PATIENCE: Final = 180.0
"""Seconds to wait for anything: a slow machine takes long to import torch three times."""
STEPS: Final = 150
"""Steps to see between two events, and after the last one."""
OUTAGE: Final = 3.0
"""Seconds that etcd is away."""
_SCRIPT: Final = Path(__file__).with_name("torchft_ddp.py")


class DemoError(FtcoordError):
    """The demo did not go as it should; the logs say why."""


class Replica:
    """One process of `torchft_ddp.py`, and what it said. `heard` is notified of every line, and of its end."""

    def __init__(self, group: int, name: str, folder: Path, address: str, heard: threading.Condition) -> None:
        self.group, self.name, self.lost = group, name, False
        self.steps: list[tuple[int, float, int]] = []
        self.weights = ""
        self._heard, self._log = heard, folder / f"{name}.log"
        own = {"REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": address, "STEPS": str(folder / "last_step")}
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(_SCRIPT)],
                env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # closed when this process dies, which ends the other
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    @property
    def step(self) -> int:
        """The last step that it committed; -1 before it trained."""
        return self.steps[-1][0] if self.steps else -1

    @property
    def failed(self) -> bool:
        return not self.lost and bool(self.process.poll())

    def lose(self) -> None:
        """SIGKILL."""
        self.lost = True
        self.end()

    def end(self) -> None:
        """Leave nothing of it behind. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self._log.open("a") as log:
            for line in lines:
                log.write(line)
                with self._heard:
                    self._understand(dict(pair.split("=", 1) for pair in line.split()))
                    self._heard.notify_all()
        self.process.wait()
        with self._heard:
            self._heard.notify_all()

    def _understand(self, said: dict[str, str]) -> None:
        if "step" in said:
            self.steps.append((int(said["step"]), float(said["loss"]), int(said["replicas"])))
        self.weights = said.get("weights", "")


class Demo:
    """One run of the demo in `folder`."""

    def __init__(self, folder: Path, server: EtcdServer, stack: ExitStack) -> None:
        self._folder, self._server, self._stack = folder, server, stack
        self._address = f"etcd://{server.get_endpoint()}/{folder.name}?min_replicas=2"
        self._started_at = time.monotonic()
        self._heard = threading.Condition()
        self._groups: dict[int, Replica] = {}

    def play(self) -> None:
        """The whole piece. Raises DemoError."""
        self.say(f"etcd serves; no lighthouse: TORCHFT_LIGHTHOUSE={self._address}")
        for group in range(3):
            self._start(group, f"group-{group}")
        self._await_steps(3)
        self._lose(1)
        self._start(1, "group-1-again")
        self._await_steps(3)
        self._restart_etcd()
        self._await_steps(3)
        last = max(one.step for one in self._groups.values()) + STEPS
        (self._folder / "last_step.new").write_text(str(last))
        (self._folder / "last_step.new").replace(self._folder / "last_step")
        self.say(f"all shall end at step {last}")
        self._finish(last)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_at:6.1f} s  {text}", flush=True)

    # -- what happens -------------------------------------------------------------------------------------------

    def _start(self, group: int, name: str) -> None:
        replica = Replica(group, name, self._folder, self._address, self._heard)
        self._stack.callback(replica.end)
        self._groups[group] = replica
        self.say(f"{name} (pid {replica.process.pid}) started")

    def _lose(self, group: int) -> None:
        lost = self._groups.pop(group)
        self.say(f"kill -9 {lost.name} (pid {lost.process.pid}) at step {lost.step}")
        lost.lose()
        self._await_steps(2, 1, "the other two go on without it")

    def _restart_etcd(self) -> None:
        self.say(f"kill -9 etcd (pid {self._server.pid}), and {OUTAGE:g} s without it")
        self._server.kill()
        threading.Event().wait(OUTAGE)  # time itself: an outage
        self._server.restart()
        self.say(f"etcd is back (pid {self._server.pid}), with its data")

    # -- what is awaited ----------------------------------------------------------------------------------------

    def _await_steps(self, replicas: int, count: int = STEPS, text: str = "training goes on") -> None:
        """Until all groups have committed so many further steps, the last of them with so many replicas."""
        groups = self._groups.values()
        goal = max(one.step for one in groups) + count
        self._until(
            lambda: all(one.step >= goal and one.steps[-1][2] == replicas for one in groups),
            f"training does not get on with {replicas} replicas",
        )
        step = min(one.step for one in groups)
        self.say(f"{text}: {replicas} replicas, step {step}, loss {self._loss(step - count, step):.4f}")

    def _finish(self, last: int) -> None:
        groups = self._groups.values()
        self._until(lambda: all(one.process.poll() == 0 and one.weights for one in groups), "the groups do not end")
        hashes = {one.name: one.weights for one in groups}
        if len(set(hashes.values())) > 1 or {one.step for one in groups} != {last}:
            raise self._failure(f"the groups did not end alike: {hashes}")
        self.say(f"all ended with 0 at step {last}, and with equal weights: {next(iter(hashes.values()))}")
        first, final = self._loss(0, 20), self._loss(last - 20, last)
        if final >= first / 2:
            raise self._failure(f"the loss did not fall by half: {first:.4f} -> {final:.4f}")
        self.say(f"the loss fell through it all: {first:.4f} -> {final:.4f}")

    def _loss(self, after: int, until: int) -> float:
        """The mean of the steps in between, as all groups that live reported them."""
        losses = [loss for one in self._groups.values() for step, loss, _ in one.steps if after < step <= until]
        return sum(losses) / len(losses)

    def _until(self, ready: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + PATIENCE
        with self._heard:
            while not ready():
                failed = [one.name for one in self._groups.values() if one.failed]
                if failed:
                    raise self._failure(f"{', '.join(failed)} failed")
                if not self._heard.wait(max(deadline - time.monotonic(), 0)):
                    raise self._failure(problem)

    def _failure(self, problem: str) -> DemoError:
        return DemoError(f"{problem}; look at the logs in {self._folder}")


def run(folder: Path) -> None:
    """Run the demo, with its logs in `folder`. Raises DemoError, ServerError."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"torchft on ftcoord: three replica groups train, and nothing but etcd is between them. Logs: {folder}")
    logging.basicConfig(filename=folder / "demo.log", level=logging.INFO)
    with ExitStack() as stack:
        server = stack.enter_context(EtcdServer(log_path=folder / "etcd.log"))
        Demo(folder, server, stack).play()


def main() -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(description="torchft without a lighthouse: about a minute")
    parser.add_argument("--logs", type=Path, help="where the logs go (default: a new temporary folder)")
    folder = parser.parse_args().logs
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        run(folder or Path(tempfile.mkdtemp(prefix="ftcoord-torchft-")))
    except FtcoordError as error:
        print(f"torchft_demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("torchft_demo: interrupted; everything it started has ended", file=sys.stderr)
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
