"""The demo's director: starts etcd and the agents, takes one away, brings another, and says what happens."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ftcoord.core.records import Round, parse_round
from ftcoord.demo.agents import Agent, no_orphans
from ftcoord.errors import FtcoordError
from ftcoord.etcd.api import Batch, Span, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.server import EtcdServer
from ftcoord.rendezvous.settings import RendezvousSettings

PATIENCE: Final = 180.0
"""Seconds to wait for anything: a slow machine takes long to import torch four times."""
STEPS: Final = 60
"""Steps to see between two events."""
_SCRIPT: Final = Path(__file__).with_name("train.py")


class DemoError(FtcoordError):
    """The demo did not go as it should; the agents' logs say why."""


class Demo:
    """One run of the demo in `folder`."""

    def __init__(self, folder: Path, server: EtcdServer, client: EtcdClient, stack: ExitStack) -> None:
        self._folder, self._server, self._client, self._stack = folder, server, client, stack
        self._started_at = time.monotonic()
        self._run = f"demo-{folder.name}"
        self._agents: dict[str, Agent] = {}
        self._rounds: queue.SimpleQueue[Round] = queue.SimpleQueue()
        self._progress = folder / "progress.jsonl"
        self._progress.touch()
        self._tick = threading.Event()

    def play(self) -> None:
        """The whole piece. Raises DemoError."""
        self._watch_rounds()
        self._start("a", "b", "c")
        first = self._await_round(3)
        lost = self._agents[self._seated(first)[0]]
        before = self._await_steps()
        self._say(f"kill -9 agent {lost.name} (pid {lost.pid}) and its worker: rank 0 and its store are gone")
        killed_at = time.monotonic()
        lost.lose()
        second = self._await_round(2)
        took = time.monotonic() - killed_at
        self._say(f"{lost.name} is out, the survivors have a new round {took:.1f} s after the kill (lease TTL 10 s)")
        alone = self._await_steps()
        if lost.name in self._seated(second):
            raise DemoError("the lost agent has a seat in the new round")
        self._start("d")
        self._await_round(3)
        together = self._await_steps()
        (self._folder / "last_step").write_text(str(together[-1]["step"] + STEPS))
        self._await_end()
        self._check_losses([before, alone, together, self._reports()[-STEPS // 2 :]])

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_at:6.1f} s  {text}", flush=True)

    # -- rounds, as etcd tells them -----------------------------------------------------------------------------

    def _watch_rounds(self) -> None:
        settings = RendezvousSettings.parse(
            backend="etcd-v3", endpoint="", run_id=self._run, min_nodes=2, max_nodes=3, local_addr=None, conf={}, env={}
        )
        self._client.watch(Span(f"{settings.prefix}/decided"), 1, self._on_decided)

    def _on_decided(self, item: WatchItem) -> None:
        if isinstance(item, Batch):
            for event in item.events:
                if event.kind == "put":
                    self._rounds.put(parse_round(event.kv.key, event.kv.value))

    def _await_round(self, world: int) -> Round:
        """The next round with so many nodes."""
        while True:
            self._until(lambda: not self._rounds.empty(), f"no round of {world} nodes came about")
            now = self._rounds.get()
            if now.recalled:
                self._say(f"round {now.number} is recalled: {self._named(now.recalled)}")
            elif not now.closed and len(now.seats) == world:
                ranks = ", ".join(f"{name} rank {rank}" for rank, name in enumerate(self._seated(now)))
                self._say(f"round {now.number}: {ranks}; bootstrap at {now.address}:{now.port}")
                return now

    def _seated(self, now: Round) -> list[str]:
        return [self._named(seat.host) for seat in now.seats]

    def _named(self, text: str) -> str:
        """Agents by their names in the demo, not by host and pid."""
        for agent in self._agents.values():
            text = text.replace(f"{socket.gethostname()} (pid {agent.pid})", agent.name)
        return text

    # -- agents and training ------------------------------------------------------------------------------------

    def _start(self, *names: str) -> None:
        torchrun = [
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--max-restarts=10",
            "--rdzv-backend=etcd-v3",
            f"--rdzv-endpoint={self._server.get_endpoint()}",
            f"--rdzv-id={self._run}",
        ]
        for name in names:
            agent = Agent(name, self._folder, torchrun, [str(_SCRIPT), str(self._folder)])
            self._agents[name] = agent
            self._stack.callback(agent.stop)
        pids = ", ".join(f"{name} (pid {self._agents[name].pid})" for name in names)
        self._say(f"torchrun agent{'s' if len(names) > 1 else ''} {pids} started")

    def _reports(self) -> list[dict[str, Any]]:
        lines = self._progress.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _await_steps(self) -> list[dict[str, Any]]:
        """The reports of the next STEPS steps."""
        seen = len(self._reports())
        reports = self._until(
            lambda: len(now := self._reports()) >= seen + STEPS and now[seen:], "training does not go on"
        )
        last = reports[-1]
        self._say(f"training on {last['world']} nodes: step {last['step']}, loss {last['loss']:.4f}")
        return list(reports)

    def _await_end(self) -> None:
        live = [agent for agent in self._agents.values() if not agent.lost]
        self._until(lambda: all(agent.process.poll() == 0 for agent in live), "the agents do not end")
        self._say(
            f"the job is done at step {self._reports()[-1]['step']}; {', '.join(a.name for a in live)} ended with 0"
        )

    def _until(self, ready: Callable[[], Any], problem: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (result := ready()):
            failed = [agent.name for agent in self._agents.values() if not agent.lost and agent.process.poll()]
            if failed:
                raise self._failure(f"agent {', '.join(failed)} failed")
            if time.monotonic() > deadline:
                raise self._failure(problem)
            self._tick.wait(0.1)
        return result

    def _check_losses(self, phases: list[list[dict[str, Any]]]) -> None:
        losses = [sum(report["loss"] for report in phase) / len(phase) for phase in phases]
        shown = " -> ".join(f"{loss:.4f}" for loss in losses)
        if any(later >= earlier for earlier, later in itertools.pairwise(losses)):
            raise self._failure(f"the loss did not keep falling: {shown}")
        self._say(f"the loss kept falling through both changes: {shown}")

    def _failure(self, problem: str) -> DemoError:
        return DemoError(f"{problem}; look at the logs in {self._folder}")


def run_demo(folder: Path | None) -> None:
    """Run the demo, with its logs in `folder` (default: a new one). Raises DemoError, ServerError."""
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo trains with PyTorch: pip install 'ftcoord[torch,server]'")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="ftcoord-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"ftcoord demo: torchrun trains on three nodes, with nothing but etcd between them. Logs: {folder}", flush=True
    )
    logging.basicConfig(filename=folder / "demo.log", level=logging.INFO)
    with ExitStack() as stack:
        stack.enter_context(no_orphans())
        server = stack.enter_context(EtcdServer(log_path=str(folder / "etcd.log")))
        client = stack.enter_context(server.get_client())
        demo = Demo(folder, server, client, stack)
        demo._say(f"etcd {client.status().version} serves on {server.get_endpoint()}")
        demo.play()
