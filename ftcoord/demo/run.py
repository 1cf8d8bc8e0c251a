"""Runs the demo: starts etcd and torchrun agents, kills one, starts a replacement, and prints what happens.

No process of it outlives it: ftcoord ends the workers of an agent that is killed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from ftcoord import concurrency
from ftcoord.config import without_etcd
from ftcoord.core.layout import KEY_PREFIX
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import FtcoordError
from ftcoord.escaping import neutral
from ftcoord.etcd.client import EtcdClient
from ftcoord.operator.reading import JobWatch
from ftcoord.operator.report import RoundsStatus
from ftcoord.operator.status import Rules

STALL_TIMEOUT: Final = 180.0
"""Seconds without progress until the demo gives up: a slow machine takes long to import torch four times."""
REPORT_INTERVAL: Final = 10.0
"""Seconds between two lines about what the demo waits for."""
LOG_TAIL: Final = 50
"""Lines of an agent's log that a failure shows: torchrun writes forty after the one with the cause."""
PHASE_STEPS: Final = 60
"""Training steps to see between two events."""
_SCRIPT: Final = Path(__file__).with_name("train.py")

T = TypeVar("T")


class DemoError(FtcoordError):
    """The demo did not go as it should; the message has the end of the agents' logs, a line each."""

    def __str__(self) -> str:
        return "\n".join(map(neutral, self.args[0].splitlines()))


class Agent:
    """One torchrun agent; its output, and that of its workers, goes to `<folder>/<name>.log`.

    `program` is the module that is run as torchrun; `variables` are added to its environment,
    which names no other etcd.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        torchrun: Sequence[str],
        script: Sequence[str],
        program: str = "torch.distributed.run",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.lost, self.log = name, False, folder / f"{name}.log"
        command = [sys.executable, "-m", program, *torchrun, *script]
        ours = {"DEMO_AGENT": name, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**without_etcd(os.environ), **ours, **(variables or {})}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self, count: int) -> str:
        """The last `count` lines of its log, as a paragraph for a message."""
        lines = self.log.read_text(errors="replace").splitlines()[-count:] or ["(empty)"]
        return "\n  ".join([f"the end of {self.log}:", *lines])

    def kill(self) -> None:
        """SIGKILL the agent alone, as a user does it, or a kernel without memory: its worker is left behind."""
        self.lost = True
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 20) -> None:
        """SIGTERM, which torchrun passes on to its workers; after `timeout` seconds SIGKILL."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Demo:
    """One run of the demo in `folder`."""

    def __init__(self, folder: Path, server: EtcdServer, client: EtcdClient, stack: ExitStack) -> None:
        self._folder, self._server, self._stack = folder, server, stack
        self._started_at = concurrency.now()
        self._run = f"demo-{folder.name}"
        self._agents: dict[str, Agent] = {}
        self._watch = stack.enter_context(JobWatch(client, KEY_PREFIX, self._run, Rules(), every_timer=False))
        self._announced: set[tuple[int, bool]] = set()
        self._recalled_at = 0.0  # when the demo received the last recall
        self._progress = folder / "progress.jsonl"
        self._progress.touch()
        login = server.config().credentials
        self._login = {"FTCOORD_USER": login.user, "FTCOORD_PASSWORD": login.password} if login else {}

    def play(self) -> None:
        """Run the whole demo. Raises DemoError."""
        self._start("a", "b", "c")
        first = self._await_round(3)
        lost = self._agents[first[0]]
        phases = [self._await_steps()]
        self._say(f"kill -9 agent {lost.name} (pid {lost.pid}): rank 0's store is gone, and its worker is an orphan")
        killed_at = concurrency.now()
        lost.kill()
        self._await_round(2)
        recalled, took = self._recalled_at - killed_at, concurrency.now() - killed_at
        self._say(
            f"the survivors were recalled {recalled:.1f} s after the kill, and have a new round after {took:.1f} s"
        )
        phases.append(self._await_steps())
        self._start("d")
        self._await_round(3)
        phases.append(self._await_steps())
        (self._folder / "last_step").write_text(str(phases[-1][-1]["step"] + PHASE_STEPS))
        self._until(lambda: all(agent.process.poll() == 0 for agent in self._live()), "the end of all agents")
        names = ", ".join(agent.name for agent in self._live())
        self._say(f"the job is done at step {self._reports()[-1]['step']}; {names} ended with 0")
        losses = [sum(report["loss"] for report in phase) / len(phase) for phase in phases]
        shown = " -> ".join(f"{loss:.4f}" for loss in losses)
        if losses != sorted(losses, reverse=True):
            raise self._failure(f"the loss did not keep falling: {shown}", [])
        self._say(f"the loss kept falling through both changes: {shown}")

    def _say(self, text: str) -> None:
        print(f"{concurrency.now() - self._started_at:6.1f} s  {text}", flush=True)

    def _start(self, *names: str) -> None:
        endpoint = self._server.get_endpoint()
        torchrun = ["--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=etcd-v3"]
        torchrun += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={self._run}"]
        for name in names:
            agent = Agent(name, self._folder, torchrun, [str(_SCRIPT), str(self._folder)], variables=self._login)
            self._agents[name] = agent
            self._stack.callback(agent.stop)
        pids = ", ".join(f"{name} (pid {self._agents[name].pid})" for name in names)
        self._say(f"torchrun agent{'s' if len(names) > 1 else ''} {pids} started")

    def _live(self) -> list[Agent]:
        return [agent for agent in self._agents.values() if not agent.lost]

    def _await_round(self, world: int) -> list[str]:
        """The agents of the next round with `world` nodes, by rank. A round changes several times: it is printed when
        it begins, and when it is recalled."""
        while True:
            now = self._until(self._changed_round, f"a round of {world} nodes")
            number, recalled = now["number"], now["recalled"]
            self._announced.add((number, bool(recalled)))
            if recalled or (number - 1, True) not in self._announced:  # or that was over too soon to be seen
                self._recalled_at = concurrency.now()
            if recalled:
                self._say(f"round {number} is recalled: {self._named(recalled)}")
                continue
            hosts = {one["rank"]: one["host"] for one in now["members"] if one["rank"] is not None}
            hosts |= {one["rank"]: one["host"] for one in now["missing"]}
            seated = [self._named(host) for _, host in sorted(hosts.items())]
            ranks = ", ".join(f"{name} rank {rank}" for rank, name in enumerate(seated))
            self._say(f"round {number}: {ranks}; bootstrap at {now['address']}:{now['port']}")
            if now["size"] == world:
                return seated

    def _changed_round(self) -> RoundsStatus | None:
        """A round that was not printed yet; None if there is none within seconds. Raises EtcdError."""
        now = found["status"]["rounds"] if (found := self._watch.next()) is not None else None
        if now is None or now["closed"] or not now["size"]:
            return None
        return None if (now["number"], bool(now["recalled"])) in self._announced else now

    def _named(self, text: str) -> str:
        """Agents by their names in the demo, not by host and pid."""
        for agent in self._agents.values():
            text = text.replace(f"{socket.gethostname()} (pid {agent.pid})", agent.name)
        return text

    def _reports(self) -> list[dict[str, Any]]:
        lines = self._progress.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _await_steps(self) -> list[dict[str, Any]]:
        """The reports of the next PHASE_STEPS steps."""
        end = len(self._reports()) + PHASE_STEPS
        self._until(lambda: len(self._reports()) >= end, f"{PHASE_STEPS} steps of training")
        last = (reports := self._reports()[-PHASE_STEPS:])[-1]
        self._say(f"training on {last['world']} nodes: step {last['step']}, loss {last['loss']:.4f}")
        return reports

    def _until(self, ready: Callable[[], T | None], what: str) -> T:
        """Wait until `ready` returns something true, and return that. A slow machine may take any time, as long as
        there is another training step every STALL_TIMEOUT seconds.

        Args:
            what: what the demo waits for; printed now and then, and when it does not come.
        """
        moved_at = report_at = concurrency.now()
        steps = -1
        while not (result := ready()):
            now, before, steps = concurrency.now(), steps, len(self._reports())
            moved_at = now if steps != before else moved_at
            if failed := [agent for agent in self._live() if agent.process.poll()]:
                names = ", ".join(f"{agent.name} (exit code {agent.process.poll()})" for agent in failed)
                raise self._failure(f"these agents failed: {names}", failed)
            if now > moved_at + STALL_TIMEOUT:
                raise self._failure(f"no progress for {STALL_TIMEOUT:g} s while waiting for {what}", self._live())
            if now >= report_at + REPORT_INTERVAL:
                self._say(f"... waiting for {what} (at step {steps})")
                report_at = now
            concurrency.sleep(0.1)
        return result

    def _failure(self, problem: str, agents: Sequence[Agent]) -> DemoError:
        """The error, with the end of these agents' logs: later lines only show how the demo ended the agents."""
        logs = f"the whole logs are in {self._folder}; their later lines only show how the demo ended the agents"
        return DemoError("\n".join([problem, *(agent.last_words(LOG_TAIL) for agent in agents), logs]))


def run_demo(folder: Path | None) -> None:
    """Run the demo, with its logs in `folder` (default: a new one). Raises DemoError, ServerError."""
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo trains with PyTorch: pip install torch")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="ftcoord-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    what = "torchrun trains on three nodes, with nothing but etcd between them"
    print(f"ftcoord demo: {what}. Logs: {folder}", flush=True)
    logging.basicConfig(filename=folder / "demo.log", level=logging.INFO)
    with ExitStack() as stack:
        server = stack.enter_context(EtcdServer(log_path=str(folder / "etcd.log"), login=True))
        client = stack.enter_context(server.get_client())
        demo = Demo(folder, server, client, stack)
        demo._say(f"etcd {client.status().version} serves on {server.get_endpoint()}")
        demo.play()
