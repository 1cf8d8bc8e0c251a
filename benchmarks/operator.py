"""What operators wait for: each command as a process of its own, imports included, and the page:

    python -m benchmarks.operator --write docs/benchmarks.md
    python -m benchmarks.operator --nodes 3 --repeat 3

A command should answer within 300 ms, and `ftcoord status` of 10,000 nodes within 2 s. Beside them stands what they
cannot be faster than: a Python that does nothing, and a raw read of the same keys by the same client; and etcdctl.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import PATIENCE, BenchmarkError
from benchmarks.report import measured_with, publish, table, verdict
from benchmarks.runs import WrittenRun, write_run
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.embedded.server import EtcdServer, find_etcd
from ftcoord.etcd.client import EtcdClient

JOB: Final = "job"
SMALL_ROUNDS, LARGE_ROUNDS = 5, 75
"""Rounds that a run has had: a few, or as many as its history holds."""
LARGE: Final = 1000
"""Nodes from which on a run counts as a large one."""
TARGET: Final = 300
TARGET_LARGE: Final = 2000
"""Milliseconds: of a command, and of `ftcoord status` of a large run."""
CHURN: Final = 0.1
"""Seconds between two changes of a member while the page is asked whether it lives."""

_NOTHING: Final = "python -c pass"
_RAW: Final = "raw read of the keys"
_READ: Final = f"""
import sys
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import run_prefix, run_span
from ftcoord.etcd.api import read_snapshot
from ftcoord.etcd.client import EtcdClient

etcd = EtcdClient(EtcdConfig.load(sys.argv[1], env={{}}))
read_snapshot(etcd.range, lambda then: then.pages(run_span(run_prefix({KEY_PREFIX!r}, {JOB!r}))))
"""
_ENV: Final = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Of the commands: an installed ftcoord is compiled."""


@dataclass(slots=True)
class Timings:
    """Milliseconds of each time that something was done, and those of CPU that its process took."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        """For a table."""
        return [f"{median(self.wall):.0f} / {max(self.wall):.0f}", f"{median(self.cpu):.0f}"]


def run(sizes: Sequence[int], repeat: int) -> str:
    """Measure, and tell it in Markdown. Raises BenchmarkError."""
    commands, pages, verdicts = [], [], []
    for nodes in sizes:
        with EtcdServer(extra_args=AS_ETCD_DOES) as etcd, EtcdClient(_patient(etcd.get_endpoint())) as client:
            written = write_run(client, JOB, nodes, LARGE_ROUNDS if nodes >= LARGE else SMALL_ROUNDS)
            found = _commands(etcd.get_endpoint(), repeat)
            raw = median(found[_RAW].wall)
            for what, timings in found.items():
                commands.append([f"{nodes}", what, *timings.cells(), f"{median(timings.wall) / raw:.2f}"])
            verdicts.append(_verdict(nodes, found))
            pages.append([f"{nodes}", *_page(etcd.get_endpoint(), client, written, repeat)])
    return _section(commands, pages, repeat, verdicts)


def _verdict(nodes: int, found: dict[str, Timings]) -> str:
    """Of the slowest command, or with a large run of `ftcoord status`."""
    ours = {what: timings for what, timings in found.items() if what.startswith("ftcoord")}
    what = "ftcoord status" if nodes >= LARGE else max(ours, key=lambda one: median(ours[one].wall))
    target, taken = TARGET_LARGE if nodes >= LARGE else TARGET, median(ours[what].wall)
    told = f"with {nodes} nodes `{what}` takes {taken:.0f} ms, {median(ours[what].cpu):.0f} ms of it CPU"
    return verdict(told, taken <= target, f"{target} ms")


def _section(
    commands: Sequence[Sequence[str]], pages: Sequence[Sequence[str]], repeat: int, verdicts: Sequence[str]
) -> str:
    return f"""## Commands and the page

`python -m benchmarks.operator`, {measured_with()}
A run of that many nodes, each with its own lease, on an etcd server of this host. The small run's history has
{SMALL_ROUNDS} rounds, the large run's as many as it holds. Times include Python's start and imports: median / worst of
{repeat}, and median CPU. `watch` is timed until its first screen.

{table(["nodes", "what", "ms", "CPU, ms", "ms / raw read"], commands)}
{" ".join(verdicts)}

`ftcoord dashboard` with one browser: time from the request to the first page, and from a member's change in etcd to the
page that shows it. Meanwhile a member changes every {1000 * CHURN:g} ms.

{table(["nodes", "first page, ms", "bytes", "an update, ms", "bytes", "`/api/about`, ms", "memory, MiB"], pages)}"""


def _patient(endpoint: str) -> EtcdConfig:
    """For who writes thousands of keys to an etcd beside other work."""
    return EtcdConfig.load(endpoint, env={}, request_timeout=PATIENCE)


# -- commands ---------------------------------------------------------------------------------------------------


def _commands(endpoint: str, repeat: int) -> dict[str, Timings]:
    """By turns, after one that does not count: it compiles what was not compiled."""
    etcdctl = [str(Path(find_etcd()).with_name("etcdctl")), f"--endpoints={endpoint}", "get", "--prefix"]
    whats: dict[str, Callable[[], None]] = {
        _NOTHING: lambda: _process(sys.executable, "-c", "pass"),
        _RAW: lambda: _process(sys.executable, "-c", _READ, endpoint),
        "etcdctl get --prefix": lambda: _process(*etcdctl, f"{run_prefix(KEY_PREFIX, JOB)}/"),
        "ftcoord ls": lambda: _ftcoord(endpoint, "ls"),
        "ftcoord status": lambda: _ftcoord(endpoint, "status", JOB),
        "ftcoord status -o json": lambda: _ftcoord(endpoint, "status", JOB, "-o", "json"),
        "ftcoord history": lambda: _ftcoord(endpoint, "history", JOB),
        "ftcoord why": lambda: _ftcoord(endpoint, "why", JOB),
        "ftcoord doctor": lambda: _ftcoord(endpoint, "doctor"),
        "ftcoord watch": lambda: _watch(endpoint),
    }
    found = {what: Timings() for what in whats}
    for turn in range(repeat + 1):
        for what, call in whats.items():
            wall, cpu = time.perf_counter(), _cpu_of_children()
            call()
            if turn:
                found[what].wall.append(1000 * (time.perf_counter() - wall))
                found[what].cpu.append(1000 * (_cpu_of_children() - cpu))
        print(f"turn {turn} of {repeat}", file=sys.stderr, flush=True)
    return found


def _cpu_of_children() -> float:
    """Seconds of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ftcoord(endpoint: str, *arguments: str) -> None:
    _process(*_command(endpoint, *arguments))


def _command(endpoint: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ftcoord.cli", *arguments, "--endpoints", endpoint]


def _process(*command: str) -> None:
    """A command may end with 1, as where the doctor finds something. Raises BenchmarkError."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_ENV, check=False)
    if done.returncode > 1:
        raise BenchmarkError(f"{command} ended with {done.returncode}: {done.stderr}")


def _watch(endpoint: str) -> None:
    """On a terminal, until its first screen. Raises BenchmarkError."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(_command(endpoint, "watch", JOB), stdout=theirs, stderr=theirs, env=_ENV) as process:
        os.close(theirs)
        shown = b""
        try:
            while b"next round" not in shown:
                shown += os.read(ours, 65536)
        except OSError:  # what it was shown on is closed: it has ended
            raise BenchmarkError(f"`ftcoord watch` has ended: {shown.decode(errors='replace')}") from None
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
            os.close(ours)


# -- the page ---------------------------------------------------------------------------------------------------


def _page(endpoint: str, client: EtcdClient, written: WrittenRun, repeat: int) -> list[str]:
    """What one browser waits for. Raises BenchmarkError."""
    updates, sizes, answers = list[float](), list[int](), list[float]()
    with _dashboard(endpoint) as (address, pid):
        began = time.perf_counter()
        stream = _Stream(address)
        first = stream.next(lambda report: report["rounds"] is not None)
        first_ms = 1000 * (time.perf_counter() - began)
        for at in range(repeat):
            began, text = time.perf_counter(), f"change {at}"
            written.told_again(client, 0, text)
            sizes.append(stream.next(lambda report, text=text: text in json.dumps(report)))  # type: ignore[misc]
            updates.append(1000 * (time.perf_counter() - began))
        for at in range(5 * repeat):
            written.told_again(client, at % len(written.asks), f"churn {at}")
            began = time.perf_counter()
            _ask(address)
            answers.append(1000 * (time.perf_counter() - began))
            threading.Event().wait(CHURN)
        memory = f"{_memory(pid):.0f}"
        stream.close()
    return [f"{first_ms:.0f}", f"{first}", _spread(updates), f"{median(sizes):.0f}", _spread(answers), memory]


def _spread(numbers: Sequence[float]) -> str:
    return f"{median(numbers):.0f} / {max(numbers):.0f}"


@contextmanager
def _dashboard(endpoint: str) -> Iterator[tuple[str, int]]:
    """Its address, and its process."""
    command = _command(endpoint, "dashboard", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_ENV) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http://" not in line:
                raise BenchmarkError(f"`ftcoord dashboard` did not start: {line!r}")
            yield line.partition("http://")[2].partition(";")[0], process.pid
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _ask(address: str) -> None:
    """Ask the page what it is. Raises OSError."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("GET", "/api/about")
    connection.getresponse().read()
    connection.close()


def _memory(pid: int) -> float:
    """The most that a process ever had resident, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


class _Stream:
    """What one browser is sent of the run."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        self._connection.request("GET", f"/api/job?job={JOB}")
        self._lines = self._connection.getresponse()

    def next(self, is_wanted: Callable[[dict[str, object]], bool]) -> int:
        """Wait for such a page: its bytes. Raises BenchmarkError."""
        event = b""
        for line in self._lines:
            event = line if line.startswith(b"event:") else event
            if event == b"event: report\n" and line.startswith(b"data: "):
                report = json.loads(line.removeprefix(b"data: "))["report"]
                if report is not None and is_wanted(report):
                    return len(line)
        raise BenchmarkError("the page's stream has ended")

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator", description="Measure operators' commands.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10_000], help="sizes of the run")
    parser.add_argument("--repeat", type=int, default=10, help="repetitions")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    if options.repeat < 1 or min(options.nodes) < 1:
        parser.error("--nodes and --repeat must be at least 1")
    publish(run(options.nodes, options.repeat), options.write)


if __name__ == "__main__":
    main()
