"""Everything at speed for a while: what grows? soak.py [MINUTES] prints a table, and fails when something did.

Rounds, quorums, changes of a store, timers, broken connections, processes with a sentinel that are killed, and one of
everything public that is made, used and dropped, on a local cluster. Memory is judged by its slope over the second
half, in MiB an hour; processes, threads, file descriptors, keys and leases by being back where they were.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "cluster"))

import grpc
from below import descendants
from clusters import LocalCluster, client_of
from cutting import Lines
from forgettable import KEPT, MAKERS
from helpers import eventually
from load import Guarded, Run, StoreLoad, Training
from victims import KILLED, a_process

from ftcoord.etcd.api import Get, KeyValue, Span
from ftcoord.etcd.messages import declare

PREFIX = "/ftcoord/v2/"
TRAINING = "training"
"""Its last quorum is remembered for days, so that no id comes twice."""
DROPPED = "dropped"
"""The run of what is dropped. What its groups decided last is remembered, too."""
VICTIMS = f"{PREFIX}victims"
"""Where those have their keys that are killed. What they died of is remembered for an hour."""
OWN_ETCD = {"EtcdServer"}
SAMPLE = 5.0
SLOPE = 30.0
"""MiB an hour; a leak of one round or reconnect grows by far more at this speed."""
KEPT_FILES = 8
_LEASES = declare("soak", {"Request": "", "Lease": "id 1 int64", "Response": "leases 2 Lease*"})


def memory() -> float:
    """Resident, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def held() -> tuple[int, int, int]:
    """Processes below this one, threads and files."""
    gc.collect()
    return len(descendants(os.getpid())), threading.active_count(), len(os.listdir("/proc/self/fd"))


def open_files() -> list[str]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(names)


def back_to(before: tuple[int, int, int]) -> bool:
    """gRPC keeps a few pipes for its next threads: as many as there ever were at once, so not more and more."""
    processes, threads, files = held()
    return processes <= before[0] and threads <= before[1] and files <= before[2] + KEPT_FILES


def leases(cluster: LocalCluster) -> int:
    """But for those of what is remembered: a process that is killed leaves one, and so does a run."""
    remembered = {kv.lease for kv in below(cluster) if is_remembered(kv)}
    return len(lease_ids(cluster) - remembered)


def is_remembered(kv: KeyValue) -> bool:
    """Causes of deaths for an hour, and the history of a run for longer."""
    return "/deaths/" in kv.key or "/events/" in kv.key


def lease_ids(cluster: LocalCluster) -> set[int]:
    """Not asked for by HTTP: after some minutes of this, etcd's HTTP side ends each connection without an answer."""
    with grpc.insecure_channel(cluster.endpoints.split(",")[0]) as channel:
        ask = channel.unary_unary(
            "/etcdserverpb.Lease/LeaseLeases",
            request_serializer=_LEASES["Request"].SerializeToString,
            response_deserializer=_LEASES["Response"].FromString,
        )
        return {lease.id for lease in ask(_LEASES["Request"](), timeout=60).leases}


def below(cluster: LocalCluster) -> list[KeyValue]:
    """All keys of ftcoord's, without their values."""
    with client_of(cluster) as client:
        return list(client.range(Get(Span(PREFIX, is_prefix=True), keys_only=True), timeout=60).kvs)


def keys(cluster: LocalCluster) -> list[str]:
    """But for what is remembered."""
    found = below(cluster)
    remembered = {kv.lease for kv in found if kv.key.startswith(f"{PREFIX}{DROPPED}") and kv.key.endswith(KEPT)}
    remembered |= {kv.lease for kv in found if is_remembered(kv)}
    return [kv.key for kv in found if not kv.key.startswith(f"{PREFIX}{TRAINING}/") and kv.lease not in remembered]


def slope(samples: list[tuple[float, float]]) -> float:
    """Of the second half, per hour."""
    half = samples[len(samples) // 2 :]
    return statistics.linear_regression(*zip(*half, strict=True)).slope * 3600 if len(half) > 2 else 0.0


def one_pass(lines: Lines, number: int) -> int:
    """A run of three nodes that meet again and again, while its connections break; how many rounds."""
    run = Run([lines.endpoints] * 3, f"soak-{number}", lease_ttl=2, run_ttl=9)
    try:
        for _ in range(10):
            run.come_back()
        lines.reset()
        run.come_back()
    finally:
        run.close()
    return 12


class Cycle:
    """Keeps something until the collector finds it."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


def make_and_drop(cluster: LocalCluster) -> int:
    """Half of them in a reference cycle; how many."""
    names = sorted(MAKERS.keys() - OWN_ETCD)
    for name in names:
        for hold in (lambda made: made, Cycle):
            hold(MAKERS[name](cluster.endpoints, DROPPED))
    gc.collect()
    return 2 * len(names)


def kill_one(cluster: LocalCluster) -> None:
    """A process with a lease, whose sentinel says what it died of, gives its lease up and ends."""
    with client_of(cluster) as client, a_process(cluster.endpoints, client, VICTIMS) as victim:
        victim.kill()
        assert victim.await_end().endswith(KILLED)


def work(cluster: LocalCluster, minutes: float) -> tuple[list[tuple[float, float]], dict[str, int]]:
    samples: list[tuple[float, float]] = []
    done = {"rounds": 0, "reconnects": 0, "dropped objects": 0, "killed processes": 0}
    with ExitStack() as stack:
        lines = stack.enter_context(Lines(cluster.endpoints.split(",")))
        store = StoreLoad(lines.endpoints, f"{PREFIX}soak-store", ttl=5, keep=False)
        stack.callback(store.close)
        training = Training(cluster.endpoints, TRAINING, keep=100)
        stack.callback(training.close)
        guarded = Guarded(lines.endpoints, "soak-timers")
        stack.callback(guarded.close)
        # From here: the first, short work must do all once, or what it leaves by design counts as left by the second.
        until, sampled = time.monotonic() + 60 * minutes, 0.0
        while time.monotonic() < until:
            done["rounds"] += one_pass(lines, done["reconnects"])
            done["reconnects"] += 1
            done["dropped objects"] += make_and_drop(cluster)
            kill_one(cluster)
            done["killed processes"] += 1
            store.progress(1)
            if time.monotonic() > sampled + SAMPLE:
                sampled = time.monotonic()
                samples.append((sampled, memory()))
        training.stop()
        training.check()
        guarded.check()
        store.stop()
    answered = {"store operations": store.answered(), "quorums": training.count(), "timers": guarded.steps}
    return samples, {**done, **answered}


def main(minutes: float = 30.0) -> None:
    cluster = LocalCluster()
    try:
        work(cluster, 0.05)  # what is loaded and made once
        eventually(lambda: not keys(cluster), lambda: f"keys are left: {keys(cluster)}")
        before, leases_before = held(), leases(cluster)
        samples, done = work(cluster, minutes)
        eventually(lambda: not keys(cluster), lambda: f"keys are left: {keys(cluster)}")
        eventually(lambda: back_to(before), lambda: f"{held()} were {before}: {open_files()}")
        eventually(lambda: leases(cluster) <= leases_before, lambda: f"{leases(cluster)} leases were {leases_before}")
        after, leases_after = held(), leases(cluster)
    finally:
        cluster.close()
    growth = slope(samples)
    print(f"{minutes:g} minutes: " + ", ".join(f"{count} {name}" for name, count in done.items()))
    print(f"memory {samples[0][1]:.1f} -> {samples[-1][1]:.1f} MiB, slope {growth:.1f} MiB/h")
    print(f"processes, threads and files {before} -> {after}, keys 0 -> 0, leases {leases_before} -> {leases_after}")
    assert growth < SLOPE or minutes < 5, f"memory grows by {growth:.1f} MiB an hour"


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
