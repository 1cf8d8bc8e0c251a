"""Quorums of ftcoord beside torchft's lighthouse, in one run:

    python -m benchmarks.quorum --write docs/benchmarks.md

Needs `pip install torchft==0.2.0`. A few minutes. Two of its sections can be measured alone: `benchmarks.ranks` and
`benchmarks.restarts` take `--write` too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import ranks, restarts
from benchmarks.crowd import Crowd
from benchmarks.delay import delayed
from benchmarks.lighthouses import KINDS, OURS, TIMEOUT, TORCHFT, serving
from benchmarks.metrics import AS_ETCD_DOES, Load
from benchmarks.processes import PROCESSES
from benchmarks.report import publish, table
from benchmarks.store import measure_raw
from ftcoord.config import EtcdConfig
from ftcoord.coordination import LighthouseClient
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient

SIZES: Final = (2, 4, 8, 16, 32, 64)
MOST_PROCESSES: Final = 8
"""Sizes up to this have a process for each replica."""
ROUND_TRIPS: Final = (0.002, 0.005)
"""Seconds that a slow network adds."""
TARGET_SMALL: Final = 4.0
TARGET_EIGHT: Final = 2.5
TARGET_LARGE: Final = 2.0
_RATIOS: Final = ("ours / one write", "ours / N writes", "ours / torchft")


class Asker:
    """One replica, of any kind."""

    def __init__(self, kind: str, address: str, number: int) -> None:
        self._id, self._step = f"replica_{number:03}", 0
        self._client = _client_class(kind)(address, TIMEOUT)

    def ask(self) -> None:
        """One quorum."""
        self._step += 1
        self._client.quorum(replica_id=self._id, timeout=TIMEOUT, step=self._step, address="a", store_address="s")


class Writer:
    """Puts one key, raw, as often as it is asked: what the machine can do."""

    def __init__(self, endpoint: str, number: int) -> None:
        self._client = EtcdClient(EtcdConfig.load(endpoint))
        self._put = Put(f"/benchmark/{number}", b"x" * 64)

    def ask(self) -> None:
        """One transaction."""
        self._client.txn((), [self._put])


def _client_class(kind: str) -> Any:
    if kind == OURS:
        return LighthouseClient
    from torchft._torchft import LighthouseClient as Native

    return Native


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds that a round takes (median), and etcd's writes and requests for each replica and round."""

    seconds: float
    load: Load | None


def processes(count: int) -> int:
    """One for each replica, as users run them, up to the number that this machine can wake at once."""
    return count if count <= MOST_PROCESSES else PROCESSES


def measure(kind: str, count: int, repeat: int, round_trip: float = 0.0) -> Round:
    """Rounds of `count` replicas that all ask at once. `round_trip`: seconds that the network adds."""
    with (
        serving(kind, count) as (address, etcd),
        far_away(address, round_trip) as far,
        Crowd(partial(Asker, kind, far), count, Asker.ask, processes(count)) as crowd,
    ):
        before = Load.read(etcd) if etcd else None
        seconds = median(crowd.do(Asker.ask) for _ in range(repeat))
        return Round(seconds, Load.read(etcd).since(before) if etcd and before else None)


@contextlib.contextmanager
def far_away(address: str, round_trip: float) -> Iterator[str]:
    """The same etcd, or lighthouse, behind a slow network."""
    scheme, rest = address.split("://", 1)
    endpoint, slash, path = rest.partition("/")
    with delayed(endpoint, round_trip) as far:
        yield f"{scheme}://{far}{slash}{path}"


def run_far(sizes: tuple[int, ...], repeat: int) -> str:
    """What a network that takes its time costs, in its round trips."""
    rows = []
    for count in sizes:
        near = {kind: measure(kind, count, repeat).seconds for kind in (OURS, TORCHFT)}
        for round_trip in ROUND_TRIPS:
            cells = []
            for kind in (OURS, TORCHFT):
                far = measure(kind, count, repeat, round_trip).seconds
                cells += [f"{1000 * far:.2f}", f"{(far - near[kind]) / round_trip:.1f}"]
            rows.append([str(count), f"{1000 * round_trip:g}", *cells])
    names = [f"{kind}, {what}" for kind in (OURS, TORCHFT) for what in ("ms", "round trips")]
    return f"""## Quorums over a slow network

Each replica is a process; a proxy delays each round trip to etcd, or to torchft's lighthouse. "Round trips" is the
increase divided by the delay (target: at most 2 more than torchft).

{table(["N", "added, ms", *names], rows)}"""


def measure_writes(count: int, repeat: int) -> float:
    """Seconds until the last of `count` raw writes is done, which all begin at once."""
    with (
        EtcdServer(extra_args=AS_ETCD_DOES) as etcd,
        Crowd(partial(Writer, etcd.get_endpoint()), count, Writer.ask, processes(count)) as crowd,
    ):
        return median(crowd.do(Writer.ask) for _ in range(repeat))


def run(sizes: tuple[int, ...], repeat: int) -> str:
    """Measure, and tell it in Markdown."""
    raw = median([measure_raw(300), measure_raw(300), measure_raw(300)])
    found = {count: {kind: measure(kind, count, repeat) for kind in KINDS} for count in sizes}
    writes = {count: measure_writes(count, repeat) for count in sizes}
    rows = []
    for count, of_count in found.items():
        ours, theirs = of_count[OURS], of_count[TORCHFT]
        cells = [f"{1000 * of_count[kind].seconds:.2f}" for kind in KINDS]
        ratios = (ours.seconds / raw, ours.seconds / writes[count], ours.seconds / theirs.seconds)
        each = ours.load.writes / repeat / count if ours.load else 0.0
        rows.append(
            [str(count), *cells, f"{1000 * writes[count]:.2f}", *(f"{ratio:.1f}x" for ratio in ratios), f"{each:.2f}"]
        )
    small, large = found[sizes[0]][OURS].seconds / raw, found[sizes[-1]]
    return f"""## Quorums

`python -m benchmarks.quorum`: N replicas ask at once; ms until the last one is answered, median of {repeat}. Up to
{MOST_PROCESSES} replicas have a process each; more share {PROCESSES} processes, with one connection each. On separate
hosts the ratio to torchft is larger: [scaling.md](scaling.md#quorums-of-many-replicas).
"One write" is an etcd transaction that puts one key ({1000 * raw:.3f} ms), "N writes" are N of them at once.

{table(["N", *(f"{kind}, ms" for kind in KINDS), "N writes, ms", *_RATIOS, "etcd writes per replica"], rows)}
- N = {sizes[0]}: {small:.1f} raw transactions (target {TARGET_SMALL:g}).
- N = 8: the target is {TARGET_EIGHT:g} times torchft.
- N = {sizes[-1]}: {large[OURS].seconds / large[TORCHFT].seconds:.1f} times torchft (target {TARGET_LARGE:g}).
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quorum", description="Measure quorums.")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of replicas")
    parser.add_argument("--repeat", type=int, default=30, help="rounds of each")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=ranks.WORLD_SIZES, help="ranks of a group")
    parser.add_argument("--trials", type=int, default=10, help="deaths of each")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose sections to replace")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes, world_sizes = tuple(options.sizes), tuple(options.world_sizes)
    near = tuple(size for size in sizes if size <= MOST_PROCESSES)
    parts: list[Callable[[], str]] = [
        lambda: run(sizes, options.repeat),
        lambda: run_far(near, options.repeat),
        lambda: ranks.run(world_sizes, max(options.repeat, ranks.REPEAT)),
        lambda: restarts.run(options.trials),
    ]
    for part in parts:
        publish(part(), options.write)


if __name__ == "__main__":
    main()
