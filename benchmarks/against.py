"""This source tree beside another one of ftcoord, by turns, on one etcd:

    git worktree add /tmp/old REVISION
    python -m benchmarks.against /tmp/old

Every node, replica and client is a process of its own. Those of both trees live at the same time and act by turns, so
that whatever else the machine does meets both. Says for each measure the median of each tree and their ratio; what
counts is the ratio. Some ten minutes; `--only "a round"` takes those whose name begins so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, TextIO

from benchmarks.processes import BenchmarkError
from ftcoord.embedded.server import EtcdServer

TRIALS: Final = 5
HERE: Final = Path(__file__).resolve().parent.parent

ACTOR: Final = """
import sys
from datetime import timedelta

what, endpoint, name, number, size = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
long = timedelta(seconds=120)

if what == "round":
    from ftcoord.rendezvous.handler import create_handler
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    conf = {"join_timeout": 120}
    handler = create_handler(RendezvousParameters("etcd-v3", endpoint, name, size, size, "127.0.0.1", **conf))
    act, leave = handler.next_rendezvous, handler._leave
elif what == "quorum":
    from ftcoord.coordination import LighthouseClient

    client = LighthouseClient(f"etcd://{endpoint}/{name}?min_replicas={size}", long)
    act, leave = lambda: client.quorum(f"r{number}", long), client.close
else:
    import ftcoord

    store = ftcoord.EtcdStore(endpoint, f"/{name}/")
    store.set("k", "x" * 64)
    calls = {
        "set": lambda: store.set("k", "x" * 64),
        "get": lambda: store.get("k"),
        "add": lambda: store.add("n", 1),
        "multi_get of 64": lambda: store.multi_get(["k"] * 64),
    }
    act, leave = calls[what], lambda: None

print("ready", flush=True)
for _ in sys.stdin:
    act()
    print("done", flush=True)
leave()
"""


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured: how many processes act at once, and how often they do in a trial."""

    what: str
    size: int
    repeats: int

    def __str__(self) -> str:
        return f"a {self.what} of {self.size}" if self.size > 1 else f"store: {self.what}"


MEASURES: Final = (
    Measure("round", 2, 15),
    Measure("round", 8, 15),
    Measure("round", 32, 8),
    Measure("round", 64, 5),
    Measure("quorum", 2, 60),
    Measure("quorum", 8, 60),
    Measure("set", 1, 200),
    Measure("get", 1, 200),
    Measure("add", 1, 200),
    Measure("multi_get of 64", 1, 60),
)


class Actors:
    """The processes of one measure that import ftcoord from one tree."""

    def __init__(self, processes: list[subprocess.Popen[str]], said: TextIO) -> None:
        self._processes = processes
        self._said = said
        self._await()

    def act(self) -> float:
        """Seconds until all have acted once."""
        began = time.perf_counter()
        for process in self._processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        self._await()
        return time.perf_counter() - began

    def _await(self) -> None:
        for process in self._processes:
            assert process.stdout
            if not process.stdout.readline():
                self._said.seek(0)
                raise BenchmarkError(f"a process failed:\n{self._said.read()}")


@contextlib.contextmanager
def actors(tree: Path, measure: Measure, endpoint: str) -> Iterator[Actors]:
    """The processes of this measure, ready to act. They leave when the block ends, and are killed when it fails."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    group = [measure.what, endpoint, uuid.uuid4().hex]
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for number in range(measure.size):
            command = [sys.executable, "-c", ACTOR, *group, str(number), str(measure.size)]
            process = subprocess.Popen(
                command, cwd="/", env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield Actors(processes, said)
        for process in processes:
            process.communicate(timeout=60)


def trial(measure: Measure, here: Path, other: Path, endpoint: str) -> dict[Path, list[float]]:
    """Seconds of each act of both trees."""
    times: dict[Path, list[float]] = {here: [], other: []}
    with actors(here, measure, endpoint) as ours, actors(other, measure, endpoint) as theirs:
        turns = [(here, ours), (other, theirs)]
        for _, those in turns:
            those.act()  # the first one connects
        for _ in range(measure.repeats):
            for tree, those in turns:
                times[tree].append(those.act())
            turns.reverse()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the other source tree")
    parser.add_argument("--only", default="", help="measure what has a name that begins so, as `a round`")
    options = parser.parse_args()
    other = options.other.resolve()
    with EtcdServer() as server:
        for measure in (one for one in MEASURES if str(one).startswith(options.only)):
            found: dict[Path, list[float]] = defaultdict(list)
            for _ in range(TRIALS):
                for tree, times in trial(measure, HERE, other, server.get_endpoint()).items():
                    found[tree].append(median(times) * 1e3)
            here, there = median(found[HERE]), median(found[other])
            print(f"{measure!s:25} other {there:8.2f} ms, this {here:8.2f} ms, ratio {here / there:.2f}", flush=True)


if __name__ == "__main__":
    main()
