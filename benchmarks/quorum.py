"""Quorums of ftcoord beside torchft's lighthouse, in one run:

    python -m benchmarks.quorum --write docs/benchmarks.md

Needs `pip install torchft==0.2.0`. A few minutes.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import ranks, reforming
from benchmarks.crowd import Crowd
from benchmarks.lighthouses import KINDS, OURS, TIMEOUT, TORCHFT, serving
from benchmarks.metrics import AS_ETCD_DOES, Load
from benchmarks.report import publish, table
from benchmarks.store import measure_raw
from ftcoord.config import EtcdConfig
from ftcoord.coordination import LighthouseClient
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient

SIZES: Final = (2, 4, 8, 16, 32, 64)
TARGET_SMALL: Final = 3.0
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


def measure(kind: str, count: int, repeat: int) -> Round:
    """Rounds of `count` replicas that all ask at once."""
    with serving(kind, count) as (address, etcd), Crowd(partial(Asker, kind, address), count, Asker.ask) as crowd:
        before = Load.read(etcd) if etcd else None
        seconds = median(crowd.do(Asker.ask) for _ in range(repeat))
        return Round(seconds, Load.read(etcd).since(before) if etcd and before else None)


def measure_writes(count: int, repeat: int) -> float:
    """Seconds until the last of `count` raw writes is done, which all begin at once."""
    with (
        EtcdServer(extra_args=AS_ETCD_DOES) as etcd,
        Crowd(partial(Writer, etcd.get_endpoint()), count, Writer.ask) as crowd,
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
            [
                str(count),
                *cells,
                f"{1000 * writes[count]:.2f}",
                *(f"{ratio:.1f}x" for ratio in ratios),
                f"{each:.2f}",
            ]
        )
    small, large = found[sizes[0]][OURS].seconds / raw, found[sizes[-1]]
    return f"""## Quorums

Written by `python -m benchmarks.quorum --write docs/benchmarks.md`. A round: N replicas, in 4 processes (of ftcoord's,
those of a process share its connection), all ask at once; ms until the last one is answered, median of {repeat}.
A raw transaction that puts one key took {1000 * raw:.3f} ms by itself; "N writes" is N of them at once, from as many
clients in the same processes.

{table(["N", *(f"{kind}, ms" for kind in KINDS), "N writes, ms", *_RATIOS, "etcd writes a replica"], rows)}
- N = {sizes[0]}: {small:.1f} raw transactions (target {TARGET_SMALL:g}).
- N = {sizes[-1]}: {large[OURS].seconds / large[TORCHFT].seconds:.1f} times torchft's lighthouse (bar {TARGET_LARGE:g}).
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quorum", description="Measure quorums.")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of replicas")
    parser.add_argument("--repeat", type=int, default=30, help="rounds of each")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=ranks.WORLD_SIZES, help="ranks of a group")
    parser.add_argument("--trials", type=int, default=5, help="deaths of each")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes, world_sizes = tuple(options.sizes), tuple(options.world_sizes)
    parts = [run(sizes, options.repeat), ranks.run(world_sizes, options.repeat), reforming.run(options.trials)]
    publish("\n".join(parts), options.write)


if __name__ == "__main__":
    main()
