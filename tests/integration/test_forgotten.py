"""Whoever is dropped dies: every public object that has a thread, a lease, a key or a process, in every way to go."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import forgettable
import pytest
import warm
from forgettable import MAKERS, Left, look
from helpers import DEADLINE, eventually

from ftcoord import concurrency
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

pytestmark = pytest.mark.sentinel
PUBLIC_MODULES = ("ftcoord", "ftcoord.coordination", "ftcoord.timer", "ftcoord.store")
NOTHING_TO_CLOSE = {
    "AgreedStop",  # its thread waits as long as its round, and closes nothing
    "Compare",
    "Delete",
    "EtcdConfig",
    "EtcdRendezvousBackend",
    "Get",
    "LighthouseServer",
    "Put",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "SessionState",
    "Span",
    "TimerInfo",
    "Timestamp",
}
"""Values; and what uses another's client, and writes under leases that nobody renews."""
ONE_OF_EACH_KIND = ("EtcdClient", "EtcdStore", "Gateway", "ManagerServer", "Session")
"""A member of a group, a watch, what needs torch, a server of gRPC's, one with a port, a lease."""
DROPPED = sorted(MAKERS.keys() - {"EtcdStore", "EtcdTimerServer"})
"""All but stores, which stay open for C++ (tests/contract/test_store_ends.py), and what works until it is stopped."""
LOADS_TORCH = {"EtcdRendezvousHandler", "EtcdStore", "EtcdTimerClient", "EtcdTimerServer"}
STRICT = ("-X", "dev", "-W", "ignore")
PROGRAM = str(Path(forgettable.__file__))
Start: TypeAlias = Callable[..., contextlib.AbstractContextManager["subprocess.Popen[str]"]]
_runs = itertools.count(1)


@pytest.fixture(scope="module")
def home() -> Iterator[EtcdServer]:
    """An etcd in which all leases are those of this file."""
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def eyes(home: EtcdServer) -> Iterator[EtcdClient]:
    """A client that looks at it. Its threads are there from the beginning."""
    with home.get_client() as client:
        client.status()
        yield client


@pytest.fixture
def run() -> str:
    return f"run{next(_runs)}"


@pytest.fixture
def start(name: str) -> Start:
    """How a process is started that makes one, with Python's own checks."""
    return starting(name, *STRICT)


@pytest.fixture
def start_to_fork(name: str) -> Start:
    """The same without these checks, and without a sentinel."""
    return functools.partial(starting(name), env={**os.environ, "FTCOORD_SENTINEL": "0"})


def starting(name: str, *options: str) -> Start:
    """Comes before `now`, which must not take the zygote for something that is left."""
    how = {"torch": name in LOADS_TORCH, "whole": name in LOADS_TORCH}
    warm.zygote(*options, **how)
    return functools.partial(warm.python, *options, **how)


@pytest.fixture
def now(home: EtcdServer, eyes: EtcdClient, run: str) -> Callable[[], Left]:
    """What there is now that was not there when the test began."""
    eventually(lambda: not forgettable.threads(), "the end of other tests")
    before = look(home, eyes, run)
    return lambda: look(home, eyes, run) - before


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What a test says of the collector holds only if that does not run by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def nothing(now: Callable[[], Left]) -> None:
    eventually(lambda: not now(), lambda: f"the end of {now()}\n{forgettable.stacks()}")


def test_every_public_class_is_in_the_table() -> None:
    """Whoever adds one says here how it is made, or that it has nothing to close."""
    found = set[str]()
    for module in PUBLIC_MODULES:
        names = importlib.import_module(module).__all__
        public = {name: getattr(importlib.import_module(module), name) for name in names}
        found |= {name for name, one in public.items() if inspect.isclass(one) and not issubclass(one, Exception)}
    assert found == {name for name in MAKERS if name[0].isupper()} | NOTHING_TO_CLOSE


@pytest.mark.parametrize("name", DROPPED)
def test_dropped(name: str, home: EtcdServer, run: str, now: Callable[[], Left]) -> None:
    """At once, without the collector."""
    made = [MAKERS[name](home.get_endpoint(), run)]
    assert now(), "there is something to close"
    made.clear()
    nothing(now)


class Knot:
    """An object that refers to itself."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_in_a_reference_cycle(name: str, home: EtcdServer, run: str, now: Callable[[], Left]) -> None:
    knot = [Knot(MAKERS[name](home.get_endpoint(), run))]
    knot.clear()
    there = now()
    assert there, "the collector did not run"
    gc.collect()
    nothing(now)


def end_of(start: Start, name: str, home: EtcdServer, run: str, end: str) -> tuple[int, str]:
    """Have a process make one and end; its exit code, and what it wrote to standard error."""
    with start(PROGRAM, name, home.get_endpoint(), run, end, stderr=subprocess.PIPE) as process:
        out, err = process.communicate("\n", timeout=DEADLINE)
        assert out == "made\n", err
        return process.returncode, err


@pytest.mark.parametrize("name", MAKERS)
def test_the_end_of_the_process(name: str, start: Start, home: EtcdServer, run: str, now: Callable[[], Left]) -> None:
    """When it is gone, so are its leases: without a word."""
    assert end_of(start, name, home, run, "") == (0, "")
    if name == "EtcdStore":  # by design, its keys live on for its `ttl`
        nothing(now)
    assert not now()


@pytest.mark.parametrize("name", [*ONE_OF_EACH_KIND, "EtcdRendezvousHandler", "EtcdTimerServer"])
def test_the_end_of_the_process_while_etcd_is_away(name: str, start: Start, fragile: EtcdServer, run: str) -> None:
    """Without a word of what does not matter any longer, and without waiting for each request's time-out."""
    with start(PROGRAM, name, fragile.get_endpoint(), run) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        fragile.kill()
        began = time.monotonic()
        process.communicate("\n", timeout=DEADLINE)
        assert process.returncode == 0
        assert time.monotonic() - began < 10 * concurrency.EXIT_TIMEOUT


@pytest.mark.parametrize("name", [*ONE_OF_EACH_KIND, "EtcdServer"])
def test_a_forked_child_that_ends(
    name: str, start_to_fork: Start, home: EtcdServer, run: str, now: Callable[[], Left]
) -> None:
    """It drops and collects what the parent made, which lives on. The parent is killed in the end; a sentinel would
    write into the next test then. tests/integration/test_sentinel.py forks with one."""
    with start_to_fork(PROGRAM, name, home.get_endpoint(), run, "fork") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 [] True\n"
        if name not in WITHOUT_LEASE:
            there = now()
            assert there.leases
            assert there.keys


WITHOUT_LEASE = {"EtcdClient", "EtcdServer", "Gateway"}
