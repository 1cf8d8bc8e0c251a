"""Rounds and quorums of many nodes, on one etcd or a cluster:

    python -m benchmarks.scale --write docs/scaling.md
    python -m benchmarks.scale --members 3 --write docs/scaling.md
    python -m benchmarks.scale --quorums --sizes 64 256 1000 --write docs/scaling.md
    python -m benchmarks.scale --stores --sizes 64 256 1000 --write docs/scaling.md
    python -m benchmarks.scale --handlers --sizes 16 64 256 --write docs/scaling.md
    python -m benchmarks.scale --peer --sizes 64 256 --write docs/scaling.md

Each replaces its own section. What does not come about in time is reported as that. `--quorums` needs torchft 0.2.0.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import platform
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final
from unittest import mock

from benchmarks import agent_store
from benchmarks.agents import LEASE_TTL, RUN, SPARE, Agents, Host, Order, Phase
from benchmarks.crowd import Crowd
from benchmarks.failover import TTL
from benchmarks.lighthouses import OURS, TORCHFT, job_at, serving
from benchmarks.metrics import AS_ETCD_DOES, Holdings, Load
from benchmarks.nodes import BACKENDS, Nodes, endpoint_for
from benchmarks.processes import PROCESSES, BenchmarkError, Made
from benchmarks.quorum import Asker
from benchmarks.rendezvous import measure_round
from benchmarks.report import Trial, publish, table
from ftcoord.core.layout import KEY_PREFIX, all_seats_span, decided_key, run_prefix
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import EtcdClient
from tests.etcd_cluster import EtcdCluster

SIZES: Final = (64, 256, 1000, 4000)
SHARED_BY: Final = 8
"""Processes that the nodes share by default, where none gets more than `MOST_IN_ONE`. Users have one for each; memory,
and what a new process costs its first nodes, set a limit here."""
MOST_IN_ONE: Final = 250
"""Nodes in one process. 500 threads that wait in one process cost it a fifth more than in two."""
SETTLE: Final = 0.5
"""Seconds between a round and the next measurement: what the last events cost is counted with their round."""
STEPS: Final = 10
"""Quorums of one measurement."""
STORE_STEPS: Final = 3
IDLE: Final = 20.0
"""Seconds for which handlers are left alone."""
FIRST, AGAIN, LOST, ADDED = ROUNDS = ("first", "again", "one lost", "one added")


@dataclass(frozen=True, slots=True)
class Cost:
    """One round of `count` nodes: how long it took, what it cost them, and what it cost etcd."""

    name: str
    count: int
    phase: Phase
    load: Load

    def cells(self) -> list[str]:
        """For a table, per node where that is said."""
        load, count = self.load, self.count
        return [
            f"{self.phase.seconds:.2f}",
            f"{1000 * self.phase.cpu / count:.1f}",
            f"{load.bytes_out / count / 1000:.2f}",
            f"{sum(load.requests.values()) / count:.1f}",
            f"{load.events / count:.1f}",
            f"{load.writes / count:.2f}",
            f"{1000 * load.cpu / count:.1f}",
        ]


@dataclass(slots=True)
class Size:
    """What was measured at one size; what did not come about is not there, and `problem` says why."""

    count: int
    problem: str = ""
    made: Made | None = None
    making: Load | None = None
    held: Holdings | None = None
    head: int = 0
    record: int = 0
    rounds: tuple[Cost, ...] = ()


def shared_by(count: int, least: int) -> int:
    """Processes for so many nodes."""
    return max(least, math.ceil(count / MOST_IN_ONE))


def measure_size(count: int, members: int, processes: int, patience: float) -> Size:
    """Make `count` agents, and let them have four rounds."""
    found = Size(count)
    try:
        with EtcdCluster(members, extra_args=AS_ETCD_DOES) as cluster:
            before = Load.read(cluster.endpoints)
            with Agents(cluster.endpoints, count, shared_by(count, processes), patience) as agents:
                found.made, found.making = agents.made, Load.read(cluster.endpoints).since(before)
                for name, order in _orders(count):
                    found.rounds += (_measure_order(name, order, agents, cluster.endpoints),)
                    found.held = Holdings.read(cluster.endpoints)
                    found.head, found.record = _record_sizes(cluster.endpoints)
                    _say(f"N={count}: {name} {found.rounds[-1].phase.seconds:.2f} s")
    except BenchmarkError as error:
        found.problem = str(error)
        _say(f"N={count}: {error}")
    return found


def _orders(count: int) -> Iterator[tuple[str, Order]]:
    yield FIRST, Order(count, all_join=True)
    yield AGAIN, Order(count, all_join=True)
    yield LOST, Order(count - 1, lose=count // 2)
    yield ADDED, Order(count, add=True)


def _measure_order(name: str, order: Order, agents: Agents, endpoints: str) -> Cost:
    before = Load.read(endpoints)
    phase = agents.do(order)
    threading.Event().wait(SETTLE)
    return Cost(name, order.world, phase, Load.read(endpoints).since(before))


def _record_sizes(endpoints: str) -> tuple[int, int]:
    """Bytes of the decided record, and of that with the seats beside it."""
    prefix = run_prefix(KEY_PREFIX, RUN)
    with EtcdClient(endpoints) as client:
        head, seats = (
            sum(len(kv.value) for kv in client.range(Get(span)).kvs)
            for span in (Span(decided_key(prefix)), all_seats_span(prefix))
        )
    return head, head + seats


def rounds_section(sizes: Sequence[Size], members: int, processes: int, patience: float) -> str:
    """The tables of all sizes, in Markdown."""
    rows = [[str(size.count), cost.name, *cost.cells()] for size in sizes for cost in size.rounds]
    names = ["N", "round", "s", "CPU, ms", "kB out", "requests", "events", "writes", "etcd's CPU, ms"]
    problems = "".join(f"{_prose(f'- N = {size.count}: {size.problem}.')}\n" for size in sizes if size.problem)
    about = f"""Written by `python -m benchmarks.scale --members {members} --write docs/scaling.md`. {_machine()} N
    agents in {processes} processes, or more so that none has over {MOST_IN_ONE}; etcd has a higher scheduling
    priority, because it would have hosts of its own. Each process has one connection; each agent has its own watches
    and a lease of {LEASE_TTL} s; min = N - 1, max = N. "s" is until the last agent has returned from
    `next_rendezvous`. All other columns are per node: CPU of its process, bytes that etcd sent to clients, messages
    that etcd received, changes that watches delivered, etcd's writes (raft proposals), and the CPU of all etcd
    members together. "One lost": a lease is revoked, so its TTL is not included; the next round waits 1 s
    (`settle_timeout`) for nodes that may still come. "One added": a node joins, and the others are called back. A
    round that takes longer than {patience:g} s is abandoned."""
    held = table(_HELD, [_held_cells(size) for size in sizes if size.made and size.making and size.held])
    more = "### Cost of making the agents, and etcd's state after the last round"
    return _section(_title(members), about, table(names, rows), problems, more, held)


_HELD: Final = (
    "N",
    "made, s",
    "CPU, ms a node",
    "requests a node",
    "writes a node",
    "threads a node",
    "leases a node",
    "watches a node",
    "streams",
    "memory, MB",
    "database, MB",
    "head, B",
    "record, B",
)


def _held_cells(size: Size) -> list[str]:
    made, making, held = size.made, size.making, size.held
    assert made is not None
    assert making is not None
    assert held is not None
    count = size.count + SPARE
    return [
        str(size.count),
        f"{made.seconds:.1f}",
        f"{1000 * made.cpu / count:.1f}",
        f"{sum(making.requests.values()) / count:.1f}",
        f"{making.writes / count:.2f}",
        f"{made.threads / count:.2f}",
        f"{held.leases / count:.2f}",
        f"{held.watches / count:.2f}",
        f"{held.streams:.0f}",
        f"{held.memory / 1e6:.0f}",
        f"{held.database / 1e6:.1f}",
        str(size.head),
        str(size.record),
    ]


def _title(members: int) -> str:
    return "## Rounds on one etcd server" if members == 1 else f"## Rounds on {members} etcd members"


def _section(title: str, about: str, *parts: str) -> str:
    """A section in Markdown, its lines not too long; parts without text are left out."""
    return "\n\n".join(part.strip() for part in (title, _prose(about), *parts) if part) + "\n"


def _prose(text: str) -> str:
    """One paragraph."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def _machine() -> str:
    return f"Python {platform.python_version()}, {os.cpu_count()} cores, load average before {os.getloadavg()[0]:.1f}."


# -- quorums ----------------------------------------------------------------------------------------------------------


class Replica(Asker):
    """A replica on a host of its own: it shares no watch with the others of its process."""

    def __init__(self, kind: str, address: str, number: int) -> None:
        with mock.patch("ftcoord.coordination.address.SharedClient", Host):
            super().__init__(kind, address, number)


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of a step (median), and what all the steps cost etcd, where there is one."""

    seconds: float
    load: Load | None


def measure_steps(kind: str, count: int, members: int, processes: int, patience: float) -> Steps | BenchmarkError:
    """`STEPS` quorums of `count` replicas that all ask at once."""
    try:
        with (
            _meeting_at(kind, count, members) as (address, etcd),
            Crowd(partial(Replica, kind, address), count, Replica.ask, shared_by(count, processes), patience) as crowd,
        ):
            crowd.do(Replica.ask)
            before = Load.read(etcd) if etcd else None
            seconds = median(crowd.do(Replica.ask) for _ in range(STEPS))
            steps = Steps(seconds, Load.read(etcd).since(before) if etcd and before else None)
    except BenchmarkError as error:
        _say(f"{kind} N={count}: {error}")
        return error
    _say(f"{kind} N={count}: {1000 * steps.seconds:.1f} ms")
    return steps


@contextlib.contextmanager
def _meeting_at(kind: str, count: int, members: int) -> Iterator[tuple[str, str | None]]:
    if kind == TORCHFT:
        with serving(TORCHFT, count) as served:
            yield served
        return
    with EtcdCluster(members, extra_args=AS_ETCD_DOES) as cluster:
        yield job_at(cluster.endpoints, count), cluster.endpoints


def quorums_section(sizes: Sequence[int], members: int, processes: int, patience: float) -> str:
    """Quorums of ftcoord beside those of torchft's lighthouse, in Markdown."""
    rows, problems = [], ""
    for count in sizes:
        ours, theirs = (measure_steps(kind, count, members, processes, patience) for kind in (OURS, TORCHFT))
        for kind, steps in ((OURS, ours), (TORCHFT, theirs)):
            if isinstance(steps, BenchmarkError):
                problems += f"- {kind}, N = {count}: {steps}.\n"
        rows.append([str(count), *_step_cells(ours, theirs, count)])
    names = ["N", "ftcoord, ms", "torchft, ms", "ftcoord / torchft", "kB out", "requests", "events", "writes"]
    about = f"""Written by `python -m benchmarks.scale --quorums --write docs/scaling.md`. {_machine()} N replicas in
    {processes} processes, or more so that none has over {MOST_IN_ONE}, ask at once, {STEPS} times; ms until the last
    one is answered (median). The last four columns are ftcoord's, per replica and step. Replicas of one process share
    a connection, but no watches, as if each had a host of its own. In [benchmarks.md](benchmarks.md#quorums) those of
    one process share watches, so its ratio to torchft is smaller."""
    return _section("## Quorums of many replicas", about, table(names, rows), problems)


def _step_cells(ours: Steps | BenchmarkError, theirs: Steps | BenchmarkError, count: int) -> list[str]:
    known = [steps if isinstance(steps, Steps) else None for steps in (ours, theirs)]
    cells = [f"{1000 * steps.seconds:.1f}" if steps else "-" for steps in known]
    first, second = known
    cells.append(f"{first.seconds / second.seconds:.2f}" if first and second else "-")
    load = first.load if first else None
    if load is None:
        return [*cells, *"----"]
    each = count * STEPS
    requests = sum(load.requests.values())
    return [
        *cells,
        f"{load.bytes_out / each / 1000:.2f}",
        f"{requests / each:.2f}",
        f"{load.events / each:.1f}",
        f"{load.writes / each:.2f}",
    ]


# -- one handler ------------------------------------------------------------------------------------------------------


def handlers_section(sizes: Sequence[int]) -> str:
    """What a handler costs that has a process's connection for itself, as on a host of its own; in Markdown."""
    ours, _, _ = BACKENDS
    rows = []
    for count in sizes:
        with endpoint_for(ours) as endpoint:
            before = Load.read(endpoint)
            with Nodes(ours, endpoint, count) as nodes:
                making, made = Load.read(endpoint).since(before), nodes.made
                nodes.join()
                held, before = Holdings.read(endpoint), Load.read(endpoint)
                nodes.idle(IDLE)
                idle = Load.read(endpoint).since(before)
        rows.append(_handler_cells(count, made, making, held, idle))
        _say(f"N={count}: {rows[-1]}")
    names = ["N", "made: CPU, ms", "requests", "writes", "threads", "leases", "watches", "streams"]
    names += ["renewals a second", "other requests a second", "etcd's memory, MB"]
    about = f"""Written by `python -m benchmarks.scale --handlers --write docs/scaling.md`. {_machine()} Handlers made
    by torch's registry, in {PROCESSES} processes, each with a connection of its own; all columns are per handler.
    CPU, requests and writes are those of making it. Leases, watches and streams are counted in a running round, as are
    the requests of the {IDLE:g} s that follow (lease of {TTL} s). Threads are Python's after it was made, including
    those that each process has once."""
    return _section("## What a handler holds", about, table(names, rows))


def _handler_cells(count: int, made: Made, making: Load, held: Holdings, idle: Load) -> list[str]:
    renewals = idle.requests["LeaseKeepAlive"]
    return [
        str(count),
        f"{1000 * made.cpu / count:.1f}",
        f"{sum(making.requests.values()) / count:.1f}",
        f"{making.writes / count:.2f}",
        f"{made.threads / count:.2f}",
        f"{held.leases / count:.2f}",
        f"{held.watches / count:.2f}",
        f"{held.streams / count:.2f}",
        f"{renewals / count / IDLE:.2f}",
        f"{(sum(idle.requests.values()) - renewals) / count / IDLE:.2f}",
        f"{held.memory / 1e6:.0f}",
    ]


# -- the store of a round ----------------------------------------------------------------------------------------------


def stores_section(sizes: Sequence[int], members: int, processes: int, patience: float) -> str:
    """What torch's agents do with a round's store, in Markdown."""
    rows = agent_store.rows(sizes, members, STORE_STEPS, patience, processes)
    names = ["N", "step", "store", "ms", "etcd's CPU, ms", "kB out", "requests", "events", "writes"]
    about = f"""Written by `python -m benchmarks.scale --stores --write docs/scaling.md`. {_machine()} N agents in
    {processes} processes together do what torch's agents do: they assign ranks, and leave through a barrier; ms until
    the last one is done (median of {STORE_STEPS}). The last five columns are per agent. Stores of one process share a
    connection, but no watches. "A round's" is the store that `next_rendezvous` returns: it has a fence, and its keys
    are attached to the run's lease."""
    return _section("## The store of a round", about, table(names, rows))


# -- beside c10d ------------------------------------------------------------------------------------------------------


def peers_section(sizes: Sequence[int]) -> str:
    """Rounds of ftcoord beside those of torch's c10d, each node with a connection of its own, in Markdown."""
    ours, peer, _ = BACKENDS
    rows, problems = [], ""
    for count in sizes:
        own, other = measure_round(ours, count), _measure_peer(peer, count)
        if isinstance(other, BenchmarkError):
            problems += f"- {peer}, N = {count}: {other}.\n"
        rows += [
            [str(count), *cells] for cells in _peer_cells(own, None if isinstance(other, BenchmarkError) else other)
        ]
    names = ["N", "round", f"{ours}, s", f"{peer}, s", f"{peer} / {ours}"]
    names += [f"{backend}, CPU ms a node" for backend in (ours, peer)]
    about = f"""Written by `python -m benchmarks.scale --peer --write docs/scaling.md`. {_machine()} Handlers made by
    torch's registry, in {PROCESSES} processes, each with a connection of its own."""
    return _section("## Rounds beside c10d", about, table(names, rows), problems)


def _measure_peer(backend: str, count: int) -> Trial | BenchmarkError:
    """Also a round that never comes about is a result."""
    try:
        return measure_round(backend, count)
    except BenchmarkError as error:
        return error


def _peer_cells(own: Trial, other: Trial | None) -> Iterator[list[str]]:
    rounds = [(FIRST, own.first, other and other.first), (AGAIN, own.again, other and other.again)]
    for name, mine, theirs in rounds:
        _say(f"N={own.count} {name}: {mine.seconds:.2f} s, {theirs.seconds if theirs else math.inf:.2f} s")
        seconds = [f"{theirs.seconds:.2f}", f"{theirs.seconds / mine.seconds:.1f}x"] if theirs else ["none", ""]
        cpu = [f"{1000 * one.cpu / own.count:.1f}" if one else "" for one in (mine, theirs)]
        yield [name, f"{mine.seconds:.2f}", *seconds, *cpu]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="Measure many nodes.")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of nodes or replicas")
    parser.add_argument("--members", type=int, choices=(1, 3), default=1, help="members of the etcd cluster")
    parser.add_argument("--processes", type=int, default=SHARED_BY, help="processes that the nodes share, at least")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each thing that a size does")
    parser.add_argument("--quorums", action="store_true", help="quorums beside torchft's lighthouse, not rounds")
    parser.add_argument("--handlers", action="store_true", help="what each handler holds, not rounds")
    parser.add_argument("--stores", action="store_true", help="what agents do with a round's store, not rounds")
    parser.add_argument("--peer", action="store_true", help="rounds beside c10d, not rounds by themselves")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes, members, processes, patience = options.sizes, options.members, options.processes, options.timeout
    if options.peer:
        section = peers_section(sizes)
    elif options.handlers:
        section = handlers_section(sizes)
    elif options.stores:
        section = stores_section(sizes, members, processes, patience)
    elif options.quorums:
        section = quorums_section(sizes, members, processes, patience)
    else:
        measured = [measure_size(count, members, processes, patience) for count in sizes]
        section = rounds_section(measured, members, processes, patience)
    publish(section, options.write)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
