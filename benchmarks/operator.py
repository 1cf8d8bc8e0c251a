"""How long the commands of operators take, imports included, beside what they read from etcd; and the page:

    python -m benchmarks.operator --nodes 3 100 10000

Under a minute for 10,000 nodes. A command should be there within 300 ms, and `ftcoord status` of 10,000 nodes within
2 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.report import publish, table
from ftcoord.config import EtcdConfig
from ftcoord.core import rendezvous_records
from ftcoord.core.layout import KEY_PREFIX, decided_key, member_id, member_key, run_prefix, run_span
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat
from ftcoord.dashboard.pages import Wanted, page_of
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.reading import SnapshotReader, read_snapshot
from ftcoord.etcd.rpc.lean import LeanClient
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import plain

COMMANDS: Final = (("ls",), ("status", "big"), ("history", "big"), ("why", "big"), ("doctor",))
TTL: Final = 3600
"""Seconds."""


def run(sizes: list[int], repeat: int) -> str:
    """Measure, and tell it in Markdown."""
    rows = []
    with EtcdServer() as etcd, EtcdClient(etcd.get_endpoint()) as client:
        for nodes in sizes:
            _write_run(client, nodes)
            rows += [[f"{nodes}", *row] for row in _measured(etcd.get_endpoint(), repeat)]
    return f"""## Commands and the page

Written by `python -m benchmarks.operator`. A run of so many nodes on an etcd of this host; medians of {repeat} times.
Commands are processes of their own, so with Python's start and all imports.

{table(["nodes", "what", "ms"], rows)}"""


def _measured(endpoint: str, repeat: int) -> list[list[str]]:
    whats: list[tuple[str, Callable[[], object]]] = [("python -c pass", lambda: _process("-c", "pass"))]
    for arguments in COMMANDS:
        whats.append((f"ftcoord {arguments[0]}", lambda given=arguments: _command(endpoint, *given)))  # type: ignore[misc]
    with closing(LeanClient(EtcdConfig.load(endpoint, env={}))) as etcd:
        status = tell_job(read_job(etcd, KEY_PREFIX, "big"), Rules())
        whats += [
            ("a raw read of the run's keys", lambda: read_snapshot(etcd.range, _read_all)),
            ("a status, without a process", lambda: tell_job(read_job(etcd, KEY_PREFIX, "big"), Rules())),
            ("a page of the status, as JSON", lambda: json.dumps(page_of(status, Wanted()), default=plain)),
            ("the same, when something is looked for", lambda: page_of(status, Wanted("host7"))),
        ]
        return [[what, f"{1000 * median(_timed(call) for _ in range(repeat)):.1f}"] for what, call in whats]


def _read_all(then: SnapshotReader) -> int:
    return sum(len(kv.value) for kv in then.pages(run_span(run_prefix(KEY_PREFIX, "big"))))


def _command(endpoint: str, *arguments: str) -> None:
    _process("-m", "ftcoord.cli", *arguments, "--endpoints", endpoint)


def _process(*arguments: str) -> None:
    """A command may end with 1, as for a run without a history."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(f"{arguments}: {done.stderr}")


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _write_run(client: EtcdClient, nodes: int) -> None:
    """A run whose nodes are seated in one round, each under a lease of its own."""
    prefix = run_prefix(KEY_PREFIX, "big")
    client.delete(run_span(prefix))
    leases = [client.grant(TTL).id for _ in range(nodes)]
    seats = tuple(Seat(member_id(lease), f"node{at}", f"host{at}") for at, lease in enumerate(leases))
    record = Round(1, seats, "10.0.0.1", 29500, (), 1, nodes, ready=True)
    puts = [Put(decided_key(prefix), rendezvous_records.encode(record))]
    for at, lease in enumerate(leases):
        ask = JoinRequest(f"node{at}", "10.0.0.1", 29500, 0, f"host{at}", f"n{at}", 1, nodes, seated=1)
        puts.append(Put(member_key(prefix, member_id(lease)), rendezvous_records.encode(ask), lease))
    for at in range(0, len(puts), 100):
        client.txn((), puts[at : at + 100])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator", description="Measure operators' commands.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 1000, 10_000], help="sizes of the run")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    publish(run(options.nodes, options.repeat), options.write)


if __name__ == "__main__":
    main()
