"""EtcdStore beside TCPStore and torch's own EtcdStore (etcd v2), and beside one raw etcd transaction, in one run:

    python -m benchmarks.store --write docs/benchmarks.md

Needs `pip install python-etcd urllib3`, and an etcd 3.4 or 3.5 (3.6 has no v2 API). A few minutes.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from torch.distributed import Store

from benchmarks.crowd import STORES, Crowd, add, make_store, meet, serving, timed, wait, warm
from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.report import publish, table
from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient

OURS, RIVAL, LEGACY = STORES
VALUE: Final = "x" * 64
ALONE: Final = ("set", "get", "add", "multi_get of 64", "wait of 64 keys")
LATE: Final = "get of a key that arrives later"
TOGETHER: Final = (LATE, "16 adders", "64 adders", "64 wait for 64 keys", "barrier of 64")

RAW: Final = "raw"
TURNS: Final = 5
AT_A_TIME: Final = 10

Row = dict[str, float]
"""Seconds, by store."""


def measure_alone(repeat: int) -> tuple[float, dict[str, Row]]:
    """One client, nobody else: median seconds of a raw transaction, and of each operation by store.

    All servers stand side by side and take turns of a few calls, so that all meet the machine in the same moods.
    """
    with ExitStack() as stack:
        endpoints = {kind: stack.enter_context(serving(kind)) for kind in STORES}
        client = stack.enter_context(EtcdClient(EtcdConfig.load(endpoints[OURS])))
        calls = {kind: operations(make_store(kind, endpoint)) for kind, endpoint in endpoints.items()}
        raw, rows = list[float](), dict[str, Row]({kind: {} for kind in STORES})
        for name in next(iter(calls.values())):
            turns = {kind: calls[kind][name] for kind in STORES} | {RAW: partial(put_raw, client)}
            times = in_turns(turns, repeat)
            raw += times.pop(RAW)
            for kind, seconds in times.items():
                rows[kind][name] = median(seconds)
        for kind, endpoint in endpoints.items():
            store = make_store(kind, endpoint)
            rows[kind][LATE] = median(late_get(store, kind, endpoint, n) for n in range(repeat // 10))
    return median(raw), rows


def operations(store: Store) -> dict[str, Callable[[], object]]:
    """What one client does, by name."""
    keys = [f"many/{number}" for number in range(64)]
    for key in keys:
        store.set(key, VALUE)
    return {
        "set": partial(store.set, "key", VALUE),
        "get": partial(store.get, keys[0]),
        "add": partial(store.add, "number", 1),
        "multi_get of 64": partial(store.multi_get, keys),
        "wait of 64 keys": partial(store.wait, keys),
    }


def in_turns(calls: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Seconds that `repeat` repetitions of each take, a few of one and then a few of the next."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat // AT_A_TIME):
        for name, call in calls.items():
            call()  # what the others left in the caches is not its fault
            times[name] += timed([call] * AT_A_TIME)
    return times


def late_get(store: Store, kind: str, endpoint: str, number: int) -> float:
    """Seconds from the moment at which another client begins to set the key until it is here."""
    begun: list[float] = []

    def setter() -> None:
        other = make_store(kind, endpoint)
        other.set("warm", "x")
        threading.Event().wait(0.05)  # for the reader to wait
        begun.append(time.perf_counter())
        other.set(f"late/{number}", VALUE)

    thread = threading.Thread(target=setter)
    thread.start()
    store.get(f"late/{number}")
    ended = time.perf_counter()
    thread.join()
    return ended - begun[0]


def measure_together(kind: str, repeat: int) -> Row:
    """Many clients at once: median seconds until the last one is done."""
    times: Row = {}
    with serving(kind) as endpoint:
        for count in (16, 64):
            with Crowd(partial(make_store, kind, endpoint), count, warm) as crowd:
                times[f"{count} adders"] = median(crowd.do(partial(add, key=f"n/{count}/{i}")) for i in range(repeat))
                if count == 64:
                    store = make_store(kind, endpoint)
                    for number in range(count):
                        store.set(f"there/{number}", VALUE)
                    times["64 wait for 64 keys"] = median(crowd.do(partial(wait, count=count)) for _ in range(repeat))
                    times["barrier of 64"] = median(
                        crowd.do(partial(meet, key=f"b/{i}", count=count)) for i in range(repeat)
                    )
    return times


def measure_raw(repeat: int) -> float:
    """One transaction that puts one key, through ftcoord's client."""
    with EtcdServer(extra_args=AS_ETCD_DOES) as server, server.get_client() as client:
        put = partial(put_raw, client)
        timed([put] * 3)
        return median(timed([put] * repeat))


def put_raw(client: EtcdClient) -> None:
    """The raw transaction that all is compared with."""
    client.txn((), [Put("/benchmark", VALUE.encode())])


def run(repeat: int, crowd_repeat: int) -> str:
    """Measure, and tell it in Markdown."""
    raws, parts = [], []
    for _ in range(TURNS):  # by turns, for the machine is not equally fast at all times
        raw, alone = measure_alone(repeat)
        raws.append(raw)
        parts.append({kind: {**alone[kind], **measure_together(kind, crowd_repeat)} for kind in STORES})
    raw = median(raws)
    found = {kind: {name: median(part[kind][name] for part in parts) for name in parts[0][kind]} for kind in STORES}
    ours, legacy = found[OURS], found[LEGACY]
    rows = []
    for name in (*ALONE, *TOGETHER):
        cells = [f"{1000 * found[kind][name]:.3f}" for kind in STORES]
        rows.append([name, *cells, f"{ours[name] / raw:.2f}", f"{legacy[name] / ours[name]:.1f}x"])
    worst = max(ours[name] for name in ("set", "get", "add")) / raw
    contended = min(legacy[name] / ours[name] for name in ("16 adders", "64 adders", "barrier of 64"))
    least = min(legacy[name] / ours[name] for name in ours)
    growth = ours["64 adders"] / ours["16 adders"]
    return f"""## The store

`python -m benchmarks.store`: medians of {TURNS} turns, values of 64 bytes, on one host, a fresh server for each turn.
One client's operations are measured {AT_A_TIME} calls at a time, alternating between the stores. "Raw" is an etcd
transaction that puts one key: {1000 * raw:.3f} ms.

{table(["operation", *(f"{kind}, ms" for kind in STORES), "ours / raw", "legacy / ours"], rows)}
- Slowest of set, get and add alone: {worst:.2f} raw transactions (target 1.3).
- Smallest ratio to the legacy store in any row: {least:.1f}x (target 1); in contended rows {contended:.1f}x (target 5).
- 64 adders take {growth:.1f} times as long as 16 (4 is linear).
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description="Measure stores.")
    parser.add_argument("--repeat", type=int, default=300, help="repetitions, in each turn, of what one client does")
    parser.add_argument("--crowd-repeat", type=int, default=3, help="the same of what many do together")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    publish(run(options.repeat, options.crowd_repeat), options.write)


if __name__ == "__main__":
    main()
