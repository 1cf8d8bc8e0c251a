"""All members of an elastic run stop at one agreed step, though one dies and one is slow: how often, and how soon."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch.distributed import HashStore

from benchmarks.processes import BenchmarkError
from benchmarks.report import measured_with, publish, table, verdict
from ftcoord import stop as agreed
from ftcoord.coordination.address import DAY_MS, Job
from ftcoord.core.elastic import Place
from ftcoord.core.layout import KEY_PREFIX, elastic_stop_key, run_prefix
from ftcoord.elastic.group import Group
from ftcoord.elastic.members import Members
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

RANKS: Final = 8
STEP: Final = 0.005
"""Seconds of a step. The straggler's take three times as long."""
CALLS: Final = 200_000
TOLD: Final = 0.3
"""Seconds from the request until all know the step, where nobody dies."""
CALL_US: Final = 2.0
PATIENCE: Final = 120.0


def _rank(pipe: Connection, endpoint: str) -> None:
    """A process that is a member of one run after another: its pipe brings each run's id, and how long a step takes."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # outside of a loop; there it asks
    while True:
        name, pause = pipe.recv()
        with closing(Members(Job("etcd", endpoint, name, min_replicas=1, join_timeout_ms=DAY_MS), PATIENCE)) as members:
            pipe.send(("stopped", *_train(pipe, members, pause)))
            agreed.set_place(None)


def _train(pipe: Connection, members: Members, pause: float) -> tuple[int, float]:
    """The step before which it has stopped, and when it knew that, on the monotonic clock."""
    step, group, knew = 0, None, [0.0]
    while True:
        before = group.arrangement if group is not None else None
        place = Place(2 * step, group.number if group else 0, group.rank if group else 0)
        arrangement = members.ask(place, before)
        assert arrangement is not None
        group = Group(arrangement, members.rank(arrangement), torch.device("cpu"))
        step = arrangement.step  # as with the state of rank 0
        members.follow(group)
        with closing(members.open_store()) as waits:
            group.at_end(waits.close)
            where = (members.store, waits, group.rank, group.world, members.ask_stop)
            agreed.set_place(agreed.Place(*where, reason_key="run/stop", keys=f"stops/{group.number}"))
            stop = agreed.AgreedStop()
            threading.Thread(target=_note, args=(stop, knew), daemon=True).start()
            pipe.send(("began", group.world, 0.0))
            while not group.over and not stop.at(step):
                step += 1
                time.sleep(pause)
                group.let_in()
            if stop.has_stopped:
                stop.close()
                if members.finish(group, f"stopped: at step {step}"):
                    return step, knew[0]
        members.tell_end(group)


def _note(stop: agreed.AgreedStop, knew: list[float]) -> None:
    stop._answered.wait()
    knew[0] = time.monotonic()


class Ranks:
    """All ranks' processes, forked from one that has imported torch. One that was killed is replaced."""

    def __init__(self, endpoint: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.stopping"])
        self._endpoint, self._all = endpoint, list[tuple[Any, Connection]]()
        self._etcd = EtcdClient(endpoint)

    def close(self) -> None:
        for process, _ in self._all:
            process.kill()
            process.join()
        self._etcd.close()

    def trial(self, name: str, choice: random.Random, *, kills: bool) -> float:
        """Seconds from the request until all that live know the step. Raises BenchmarkError if they differ."""
        while len(self._all) < RANKS:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_rank, args=(theirs, self._endpoint), daemon=True)
            process.start()
            theirs.close()
            self._all.append((process, mine))
        slow, asks = choice.sample(range(RANKS), 2)
        for rank, (_, pipe) in enumerate(self._all):
            pipe.send((name, STEP * (3 if rank == slow else 1)))
        for _, pipe in self._all:
            while _said(pipe) != ("began", RANKS, 0.0):
                pass
        time.sleep(choice.uniform(0, 0.1))
        announcer, asked_at = self._all[asks][0], time.monotonic()
        os.kill(announcer.pid, signal.SIGTERM)
        if kills:
            key = elastic_stop_key(run_prefix(KEY_PREFIX, name))
            while self._etcd.get(key).one is None and time.monotonic() < asked_at + PATIENCE:
                if any(pipe.poll() for _, pipe in self._all):  # they have stopped already
                    break
            announcer.kill()
            announcer.join()
            del self._all[asks]
        steps, at = set[int](), 0.0
        for _, pipe in self._all:
            while (said := _said(pipe))[0] != "stopped":
                pass
            steps.add(said[1])
            at = max(at, said[2])
        if len(steps) != 1:
            raise BenchmarkError(f"{name}: ranks have stopped at steps {sorted(steps)}")
        return at - asked_at


def _said(pipe: Connection) -> tuple[str, int, float]:
    with suppress(EOFError):
        if pipe.poll(PATIENCE):
            said: tuple[str, int, float] = pipe.recv()
            return said
    raise BenchmarkError("a rank does not get on")


def call_us() -> float:
    """Microseconds of a call of `at`, while nobody asks."""
    stop = agreed.AgreedStop(HashStore(), 0, 1, signals=())
    began = time.perf_counter()
    for step in range(CALLS):
        stop.at(step)
    return (time.perf_counter() - began) / CALLS * 1e6


def run(trials: int) -> str:
    """Measure, and tell it in Markdown."""
    call, choice = min(call_us() for _ in range(5)), random.Random(1)
    times: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as ends:
        ranks = ends.enter_context(closing(Ranks(ends.enter_context(EtcdServer()).get_endpoint())))
        for trial in range(trials):
            kills = trial % 2 == 1
            times[kills].append(ranks.trial(f"stopping-{trial}", choice, kills=kills))
            print(f"{trial}: {times[kills][-1]:.3f} s", file=sys.stderr, flush=True)
    return told(times, call)


def told(times: dict[bool, list[float]], call: float) -> str:
    """The section: the seconds of the trials, by whether the announcer was killed; and `call_us`."""
    trials = sum(map(len, times.values()))
    rows = [
        ["killed" if kills else "lives", str(len(found)), f"{median(found):.2f}", f"{max(found):.2f}"]
        for kills, found in times.items()
    ]
    usual = median(times[False])
    return f"""## An agreed stop

`python -m benchmarks.stopping`, {measured_with()}
{RANKS} processes count steps of {STEP * 1000:g} ms, one of them three times slower, as members of an elastic run. A
random one gets SIGTERM, and is killed with -9 in half of the trials once its request is recorded. All others stopped
before the same step: {trials} of {trials}. Seconds from the signal until the last of them knows that step; where the
announcer is killed, they form another group first.

{table(["announcer", "trials", "median", "worst"], rows)}
{verdict(f"median {usual:.2f} s where nobody dies", usual <= TOLD, f"{TOLD:g} s")}
{verdict(f"a call of `stop.at` takes {call:.2f} microseconds", call <= CALL_US, f"{CALL_US:g}")}
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stopping", description="Measure agreed stops.")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    publish(run(options.trials), options.write)


if __name__ == "__main__":
    main()
