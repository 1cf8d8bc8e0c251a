"""Elastic jobs for tests: real torchrun agents as processes of their own, and the events of their workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import warm
from helpers import eventually

import ftcoord

QUICK = {"lease_ttl": 2, "last_call_timeout": 3, "settle_timeout": 0.5}
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Event:
    """What a worker reported; see scripts/report.py."""

    event: str
    agent: str
    pid: int
    rank: int
    world: int
    master: str
    run_id: str
    agent_store: str
    restarts: int
    sum: float = 0.0
    size: int = 0


class Agent:
    """One torchrun process in a session of its own. Its terminal is the file `log`."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], log: Path, cold: bool) -> None:
        self.name, self.log = name, log
        start = subprocess.Popen if cold or warm.LOADED_WITH & env.keys() else warm.Popen
        with log.open("wb") as terminal:
            self._process = start(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -signal when one ended it."""
        return self._process.poll()

    def watches(self, pids: Iterable[int]) -> bool:
        """Whether it has a pidfd for each of these processes."""
        found = set()
        with contextlib.suppress(OSError):  # it has ended: the caller's message shows how
            for file in Path(f"/proc/{self.pid}/fdinfo").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    found |= {int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("Pid:")}
        return found.issuperset(pids)

    def terminal(self) -> str:
        """All that it printed, and its workers with it."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        eventually(lambda: self.exit_code is not None, lambda: f"{self.name} ends\n{self.terminal()}")
        code = self.exit_code
        assert code is not None
        return code

    def end(self) -> None:
        """Kill it, and take leave of it."""
        self._process.kill()
        self._process.wait()


class Job:
    """A run and its agents, named a, b, c, ... by the test. A context manager: nothing outlives it.

    Args:
        folder: for the logs, the workers' events and the orders to them.
        endpoint: as `--rdzv-endpoint`.
        nodes: as `--nnodes`.
        backend: as `--rdzv-backend`.
        conf: rdzv_conf of all agents. The test's defaults make it quick; no test relies on how quick.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        nodes: str,
        script: str = "train.py",
        *,
        backend: str = "etcd-v3",
        run_id: str | None = None,
        workers: int = 1,
        restarts: int = 10,
        conf: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.run_id = folder, run_id or folder.name
        self.agents: dict[str, Agent] = {}
        self._backend = backend
        self._endpoint, self._nodes, self._script = endpoint, nodes, script
        self._workers, self._restarts, self._env = workers, restarts, env or {}
        self._conf = {**QUICK, **(conf or {})}
        for name in ("events", "orders", "terminals", "logs", "tmp"):
            (folder / name).mkdir()

    # -- doing --------------------------------------------------------------------------------------------------

    def start(
        self,
        names: Iterable[str],
        *options: str,
        entry: Sequence[str] = (),
        conf: dict[str, object] | None = None,
        cold: bool = False,
    ) -> None:
        """Start an agent for each name, with more torchrun `options` and another `entry` point if given.

        `cold`: as a user's command, from the first line on; the others are the same command in a process that has torch
        loaded, see warm.py.
        """
        chosen = {**self._conf, **(conf or {})}
        for name in names:
            command = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--rdzv-backend={self._backend}", f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self.run_id}"),
                f"--rdzv-conf={','.join(f'{key}={value}' for key, value in chosen.items())}",
                *(f"--nnodes={self._nodes}", f"--nproc-per-node={self._workers}", f"--max-restarts={self._restarts}"),
                f"--log-dir={self.folder / 'logs'}",
                *options,
                *(entry or [str(SCRIPTS / self._script)]),
            ]
            terminal = self.folder / "terminals" / name
            self.agents[name] = Agent(name, command, self._environment(name), terminal, cold)

    def kill(self, name: str) -> None:
        """SIGKILL for an agent and its workers: what others see of a machine that dies."""
        self.agents[name].end()
        for pid in self.processes({name}):
            _kill(pid)

    def order(self, name: str) -> None:
        """Tell the workers; see scripts/train.py."""
        (self.folder / "orders" / name).touch()

    def finish(self, names: str) -> None:
        """Let the job end, and check that these agents exit 0."""
        self.order("stop")
        self.expect_exit(0, names)

    # -- watching -----------------------------------------------------------------------------------------------

    def events(self, kind: str) -> list[Event]:
        """Those of this kind, in no particular order."""
        lines = [line for file in (self.folder / "events").iterdir() for line in file.read_text().split("\n")[:-1]]
        return [event for line in lines if (event := Event(**json.loads(line))).event == kind]

    def rounds(self, kind: str) -> dict[str, list[Event]]:
        """The events by their round, which is known by its bootstrap address."""
        rounds: dict[str, list[Event]] = {}
        for event in self.events(kind):
            rounds.setdefault(event.master, []).append(event)
        return rounds

    def round_of(self, *names: str, kind: str = "joined", after: Iterable[str] = ()) -> str:
        """Wait for a round whose workers are just those of these agents (of several choices); its address.

        Rounds in `after` do not count.
        """

        def found() -> str | None:
            for address, events in self.rounds(kind).items():
                world = events[0].world
                complete = len(events) == world == len({e.agent for e in events}) * self._workers
                if complete and address not in after and {e.agent for e in events} in map(set, names):
                    assert sorted(event.rank for event in events) == list(range(world)), self.story()
                    return address
            return None

        eventually(lambda: found() is not None, lambda: f"a round of {names}\n{self.story()}")
        address = found()
        assert address is not None
        return address

    def await_watched(self, address: str) -> None:
        """Wait until the agents of a round watch their workers, which they do a moment after the start."""
        for name in {event.agent for event in self.rounds("started")[address]}:
            pids = [event.pid for event in self.rounds("started")[address] if event.agent == name]
            agent = self.agents[name]
            eventually(
                lambda agent=agent, pids=pids: agent.watches(pids),
                lambda name=name: f"{name} watches its workers\n{self.story()}",
            )

    def ranks(self, address: str) -> dict[str, int]:
        """The rank of each agent's worker in a round (of one worker an agent)."""
        return {event.agent: event.rank for event in self.rounds("started")[address]}

    def expect_exit(self, code: int, names: str) -> None:
        for name in names:
            assert self.agents[name].wait() == code, self.story()

    def processes(self, names: Iterable[str]) -> list[int]:
        """The pids of these agents, their workers and whatever else they started, by their environment."""
        wanted = {f"FTCOORD_AGENT={name}".encode() for name in names}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                if f"FTCOORD_JOB={self.folder}".encode() in environment and wanted & set(environment):
                    found.append(int(folder.name))
        return found

    def terminals(self) -> str:
        return "\n".join(agent.terminal() for agent in self.agents.values())

    def story(self) -> str:
        """All there is to know, for the message of a failed test."""
        events = (f"{e.event} {e.agent} rank {e.rank} of {e.world} at {e.master}" for e in self._all_events())
        ends = (f"--- {a.name} (exit code {a.exit_code}):\n{a.terminal()}" for a in self.agents.values())
        return "\n".join([*events, *ends])

    # -- the end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.end()
        for pid in self.processes(self.agents):
            _kill(pid)

    def _environment(self, name: str) -> dict[str, str]:
        source = str(Path(str(ftcoord.__file__)).parent.parent)
        own = {"FTCOORD_JOB": str(self.folder), "FTCOORD_AGENT": name, "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, **self._env}

    def _all_events(self) -> list[Event]:
        return [event for kind in ("started", "joined", "crashed", "finished") for event in self.events(kind)]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
