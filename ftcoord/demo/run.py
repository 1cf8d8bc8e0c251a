"""Runs the demo: starts etcd and torchrun agents, kills one, starts a replacement, and prints what happens.

No process of it outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from ftcoord import concurrency
from ftcoord.config import without_etcd
from ftcoord.core.layout import decided_key
from ftcoord.core.rendezvous_records import Round, parse_round
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import FtcoordError
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Batch, Span, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.rendezvous.settings import RendezvousSettings

STALL_TIMEOUT: Final = 180.0
"""Seconds without progress until the demo gives up: a slow machine takes long to import torch four times."""
REPORT_INTERVAL: Final = 10.0
"""Seconds between two lines about what the demo waits for."""
LOG_TAIL: Final = 50
"""Lines of an agent's log that a failure shows: torchrun writes forty after the one with the cause."""
PHASE_STEPS: Final = 60
"""Training steps to see between two events."""
PR_SET_CHILD_SUBREAPER: Final = 36
"""Of Linux: processes that lose their parent become children of this one."""
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
        self.name = name
        self.lost = False
        self.log = folder / f"{name}.log"
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
        workers = descendants(self.pid)
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            _signal(workers, signal.SIGKILL)


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """On exit, kill the processes that were started below this one meanwhile, even those that lost their parent.

    On Linux only. A torchrun that gets SIGTERM just as it starts a worker ends without ending that worker.
    """
    before = descendants(os.getpid())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _signal([pid for pid in descendants(os.getpid()) if pid not in before], signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first."""
    parents = _parents()
    found = [pid]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


def _parents() -> dict[int, int]:
    """The parent of every process: from /proc, or where there is none from ps."""
    if not Path("/proc/self/stat").exists():
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return {int(child): int(parent) for child, parent in (line.split() for line in table.splitlines())}
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Demo:
    """One run of the demo in `folder`."""

    def __init__(
        self,
        folder: Path,
        server: EtcdServer,
        client: EtcdClient,
        stack: ExitStack,
        clock: Callable[[], float] = concurrency.now,
    ) -> None:
        self._folder, self._server, self._client, self._stack, self._clock = folder, server, client, stack, clock
        self._started_at = clock()
        self._run = f"demo-{folder.name}"
        self._agents: dict[str, Agent] = {}
        self._rounds: concurrency.Queue[Round | Exception] = concurrency.inbox()
        self._announced: set[tuple[int, bool]] = set()
        self._recalled_at = 0.0  # when the demo received the last recall
        self._progress = folder / "progress.jsonl"
        self._progress.touch()
        self._tick = concurrency.event()
        login = server.config().credentials
        self._login = {"FTCOORD_USER": login.user, "FTCOORD_PASSWORD": login.password} if login else {}

    def play(self) -> None:
        """Run the whole demo. Raises DemoError."""
        self._watch_rounds()
        self._start("a", "b", "c")
        first = self._await_round(3)
        lost = self._agents[self._seated(first)[0]]
        before = self._await_steps()
        self._say(f"kill -9 agent {lost.name} (pid {lost.pid}): rank 0's store is gone, and its worker is an orphan")
        killed_at = self._clock()
        lost.kill()
        second = self._await_round(2)
        recalled, took = self._recalled_at - killed_at, self._clock() - killed_at
        self._say(
            f"the survivors were recalled {recalled:.1f} s after the kill, and have a new round after {took:.1f} s"
        )
        alone = self._await_steps()
        if lost.name in self._seated(second):
            raise DemoError("the lost agent has a seat in the new round")
        self._start("d")
        self._await_round(3)
        together = self._await_steps()
        (self._folder / "last_step").write_text(str(together[-1]["step"] + PHASE_STEPS))
        self._await_end()
        self._check_losses([before, alone, together, self._reports()[-PHASE_STEPS // 2 :]])

    def _say(self, text: str) -> None:
        print(f"{self._clock() - self._started_at:6.1f} s  {text}", flush=True)

    # -- rounds, as etcd reports them -----------------------------------------------------------------------------

    def _watch_rounds(self) -> None:
        settings = RendezvousSettings.parse(
            backend="etcd-v3", endpoint="", run_id=self._run, min_nodes=2, max_nodes=3, local_addr=None, conf={}, env={}
        )
        key = decided_key(settings.prefix)
        self._client.watch(Span(key), self._client.get(key).revision + 1, self._on_decided)

    def _on_decided(self, item: WatchItem) -> None:
        if isinstance(item, Exception):  # that ends the watch
            self._rounds.put(item)
        elif isinstance(item, Batch):
            for event in item.events:
                if event.kind == "put":
                    self._rounds.put(parse_round(event.kv.key, event.kv.value))

    def _await_round(self, world: int) -> Round:
        """The next round with `world` nodes. A record is written several times: each state of it is printed once."""
        while True:
            now = self._until(self._next_record, lambda: f"a round of {world} nodes")
            state = (now.number, bool(now.recalled))
            if now.closed or not now.seats or state in self._announced:
                continue
            self._announced.add(state)
            if now.recalled:
                self._recalled_at = self._clock()
                self._say(f"round {now.number} is recalled: {self._named(now.recalled)}")
                continue
            ranks = ", ".join(f"{name} rank {rank}" for rank, name in enumerate(self._seated(now)))
            self._say(f"round {now.number}: {ranks}; bootstrap at {now.address}:{now.port}")
            if len(now.seats) == world:
                return now

    def _next_record(self) -> Round | None:
        """Raises EtcdError when the rounds can be followed no longer."""
        record = None if self._rounds.empty() else self._rounds.get()
        if isinstance(record, Exception):
            raise record
        return record

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
            agent = Agent(name, self._folder, torchrun, [str(_SCRIPT), str(self._folder)], variables=self._login)
            self._agents[name] = agent
            self._stack.callback(agent.stop)
        pids = ", ".join(f"{name} (pid {self._agents[name].pid})" for name in names)
        self._say(f"torchrun agent{'s' if len(names) > 1 else ''} {pids} started")

    def _reports(self) -> list[dict[str, Any]]:
        lines = self._progress.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _await_steps(self) -> list[dict[str, Any]]:
        """The reports of the next PHASE_STEPS steps."""
        seen = len(self._reports())

        def new() -> list[dict[str, Any]]:
            return self._reports()[seen:]

        reports = self._until(
            lambda: now if len(now := new()) >= PHASE_STEPS else None,
            lambda: f"{PHASE_STEPS} steps of training ({len(new())} so far)",
            lambda: len(new()),
        )
        last = reports[-1]
        self._say(f"training on {last['world']} nodes: step {last['step']}, loss {last['loss']:.4f}")
        return reports

    def _await_end(self) -> None:
        live = self._live()
        self._until(
            lambda: all(agent.process.poll() == 0 for agent in live),
            lambda: f"the end of {', '.join(agent.name for agent in live if agent.process.poll() is None)}",
            lambda: len(self._reports()) + sum(agent.process.poll() is not None for agent in live),
        )
        self._say(
            f"the job is done at step {self._reports()[-1]['step']}; {', '.join(a.name for a in live)} ended with 0"
        )

    def _live(self) -> list[Agent]:
        return [agent for agent in self._agents.values() if not agent.lost]

    def _until(
        self, ready: Callable[[], T | None], what: Callable[[], str], progress: Callable[[], int] = lambda: 0
    ) -> T:
        """Wait until `ready` returns something true, and return that.

        Args:
            what: what the demo waits for; printed now and then, and when it does not come.
            progress: changes with each step towards it. A slow machine may take any time, as long as there is progress
                every STALL_TIMEOUT seconds.
        """
        last, moved_at = progress(), self._clock()
        report_at = moved_at + REPORT_INTERVAL
        while not (result := ready()):
            now = self._clock()
            if (current := progress()) != last:
                last, moved_at = current, now
            if failed := [agent for agent in self._live() if agent.process.poll()]:
                names = ", ".join(f"{agent.name} (exit code {agent.process.poll()})" for agent in failed)
                raise self._failure(f"these agents failed: {names}", failed)
            if now > moved_at + STALL_TIMEOUT:
                raise self._failure(f"no progress for {STALL_TIMEOUT:g} s while waiting for {what()}", self._live())
            if now >= report_at:
                self._say(f"... waiting for {what()}")
                report_at = now + REPORT_INTERVAL
            self._tick.wait(0.1)
        return result

    def _check_losses(self, phases: list[list[dict[str, Any]]]) -> None:
        losses = [sum(report["loss"] for report in phase) / len(phase) for phase in phases]
        shown = " -> ".join(f"{loss:.4f}" for loss in losses)
        if any(later >= earlier for earlier, later in itertools.pairwise(losses)):
            raise self._failure(f"the loss did not keep falling: {shown}", [])
        self._say(f"the loss kept falling through both changes: {shown}")

    def _failure(self, problem: str, agents: Sequence[Agent]) -> DemoError:
        """The error, with the end of these agents' logs: later lines only show how the demo ended the agents."""
        parts = [problem, *(agent.last_words(LOG_TAIL) for agent in agents)]
        parts.append(f"the whole logs are in {self._folder}; their later lines only show how the demo ended the agents")
        load, processors = os.getloadavg()[0], os.cpu_count() or 1
        if load > 2 * processors:
            parts.append(f"this machine is busy (load {load:.0f} on {processors} processors): try again when it is not")
        return DemoError("\n".join(parts))


def run_demo(folder: Path | None) -> None:
    """Run the demo, with its logs in `folder` (default: a new one). Raises DemoError, ServerError."""
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo trains with PyTorch: pip install torch")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="ftcoord-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"ftcoord demo: torchrun trains on three nodes, with nothing but etcd between them. Logs: {folder}", flush=True
    )
    logging.basicConfig(filename=folder / "demo.log", level=logging.INFO)
    with ExitStack() as stack:
        stack.enter_context(no_orphans())
        server = stack.enter_context(EtcdServer(log_path=str(folder / "etcd.log"), login=True))
        client = stack.enter_context(server.get_client())
        demo = Demo(folder, server, client, stack)
        demo._say(f"etcd {client.status().version} serves on {server.get_endpoint()}")
        demo.play()
