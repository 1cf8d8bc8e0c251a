"""This source tree beside another one of ftcoord, by turns, on one etcd:

    git worktree add /tmp/old REVISION
    python -m benchmarks.against /tmp/old

Each trial is a process of its own, in which all nodes, replicas or clients of that trial are threads. Says for each
measure the median of each tree and their ratio; what counts is the ratio. A few minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Final

from ftcoord.embedded.server import EtcdServer

TRIALS: Final = 7
HERE: Final = Path(__file__).resolve().parent.parent

TRIAL: Final = """
import sys, time, uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median

import ftcoord
from ftcoord.coordination import LighthouseClient
from ftcoord.rendezvous.create import create_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters

endpoint, name = sys.argv[1], uuid.uuid4().hex
long = timedelta(seconds=120)


def measure(what, repeats, call):
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    print(f"{what}\\t{median(times) * 1e3}", flush=True)


for size in (2, 8):
    run = f"{name}-{size}"
    conf = {"join_timeout": 120}
    handlers = [create_handler(RendezvousParameters("etcd-v3", endpoint, run, size, size, "127.0.0.1", **conf))
                for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        measure(f"a round of {size}", 15, lambda: list(pool.map(lambda one: one.next_rendezvous(), handlers)))
    for one in handlers:
        one._leave()

for size in (2, 8):
    address = f"etcd://{endpoint}/{name}-{size}?min_replicas={size}"
    replicas = [LighthouseClient(address, long) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        measure(f"a quorum of {size}", 60, lambda: list(pool.map(
            lambda one: one[1].quorum(f"r{one[0]}", long), enumerate(replicas))))
    for one in replicas:
        one.close()

store = ftcoord.EtcdStore(endpoint, f"/{name}/")
measure("store: set", 200, lambda: store.set("k", "x" * 64))
measure("store: get", 200, lambda: store.get("k"))
measure("store: add", 200, lambda: store.add("n", 1))
measure("store: multi_get of 64", 60, lambda: store.multi_get(["k"] * 64))
"""


def trial(tree: Path, endpoint: str) -> dict[str, float]:
    """Milliseconds of each measure, in a process that imports ftcoord from this tree."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, endpoint], cwd="/", env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"a trial of {tree} failed:\n{done.stderr}")
    return {what: float(value) for what, value in (line.split("\t") for line in done.stdout.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the other source tree")
    other = parser.parse_args().other.resolve()
    found: dict[str, dict[Path, list[float]]] = defaultdict(lambda: {HERE: [], other: []})
    with EtcdServer() as server:
        for number in range(TRIALS):
            for tree in (HERE, other) if number % 2 else (other, HERE):
                for what, value in trial(tree, server.get_endpoint()).items():
                    found[what][tree].append(value)
    for what, times in found.items():
        here, there = median(times[HERE]), median(times[other])
        print(f"{what:25} other {there:8.2f} ms, this {here:8.2f} ms, ratio {here / there:.2f}")


if __name__ == "__main__":
    main()
