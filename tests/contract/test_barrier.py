"""Barriers on a real etcd, with processes that are killed, stopped and forked."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from helpers import DEADLINE, eventually, freeze, in_fork, python

import ftcoord
from ftcoord.core.layout import barrier_prefix, decided_key, members_span, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ClientClosed, ConfigError, FtcoordError, StateError
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import EtcdClient

PARTY = """
import sys, ftcoord
with ftcoord.Barrier("run", "b", 2, etcd=sys.argv[1], key_prefix=sys.argv[2], lease_ttl=2) as barrier:
    print(barrier.wait(), flush=True)
"""
Make = Callable[..., ftcoord.Barrier]


@pytest.fixture
def make(client: EtcdClient, prefix: str) -> Iterator[Make]:
    with ExitStack() as stack:

        def barrier(parties: int = 2, **more: Any) -> ftcoord.Barrier:
            how = {"etcd": client, "key_prefix": prefix, **more}
            return stack.enter_context(ftcoord.Barrier("run", "b", parties, **how))

        yield barrier


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def group(prefix: str) -> str:
    return barrier_prefix(run_prefix(prefix, "run"), "b")


def members(client: EtcdClient, group: str) -> list[str]:
    return [kv.key for kv in client.range(Get(members_span(group), keys_only=True)).kvs]


def waiting(pool: ThreadPoolExecutor, barrier: ftcoord.Barrier, client: EtcdClient, group: str) -> Future[int]:
    """A wait on a thread of its own, which has arrived."""
    there = len(members(client, group))
    future = pool.submit(barrier.wait)
    eventually(lambda: len(members(client, group)) > there, "it has arrived")
    return future


def test_parties_pass_again_and_again(make: Make, pool: ThreadPoolExecutor) -> None:
    barriers = [make(4) for _ in range(4)]
    for _ in range(5):
        assert sorted(pool.map(lambda one: one.wait(DEADLINE), barriers)) == [0, 1, 2, 3]


def test_one_party_passes_alone(make: Make) -> None:
    barrier = make(1)
    assert [barrier.wait(DEADLINE) for _ in range(3)] == [0, 0, 0]


def test_a_party_that_was_killed_does_not_count(
    make: Make, etcd: EtcdServer, client: EtcdClient, prefix: str, group: str
) -> None:
    with python("-c", PARTY, etcd.get_endpoint(), prefix) as victim:
        eventually(lambda: members(client, group), "it has arrived")
        victim.kill()
        victim.wait()
    eventually(lambda: not members(client, group), "its lease ends")
    with pytest.raises(TimeoutError, match="'b'"):
        make().wait(1)


def test_a_party_that_was_stopped_passes_when_it_is_back(
    make: Make, etcd: EtcdServer, client: EtcdClient, prefix: str, group: str, pool: ThreadPoolExecutor
) -> None:
    with python("-c", PARTY, etcd.get_endpoint(), prefix) as party:
        assert party.stdout is not None
        eventually(lambda: members(client, group), "it has arrived")
        freeze(party.pid)
        eventually(lambda: not members(client, group), "its lease ends")
        other = waiting(pool, make(), client, group)
        party.send_signal(signal.SIGCONT)
        assert sorted([int(party.stdout.readline()), other.result(DEADLINE)]) == [0, 1]


def test_who_is_not_in_time_has_not_arrived(make: Make, client: EtcdClient, group: str) -> None:
    barrier = make()
    with pytest.raises(TimeoutError):
        barrier.wait(0.5)
    assert not members(client, group)


def test_who_is_interrupted_has_not_arrived(make: Make, client: EtcdClient, group: str) -> None:
    barrier = make()

    def interrupt() -> None:
        eventually(lambda: members(client, group), "it waits")
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        barrier.wait(DEADLINE)
    thread.join()
    assert not members(client, group)


@pytest.mark.parametrize("way", ["barrier", "client"])
def test_what_is_closed_while_it_waits(
    make: Make, etcd: EtcdServer, client: EtcdClient, group: str, pool: ThreadPoolExecutor, way: str
) -> None:
    with EtcdClient(etcd.get_endpoint()) as own:
        first = waiting(pool, make(3), client, group)  # it decides, so nothing ever happens to the second
        barrier = make(3, etcd=own)
        second = waiting(pool, barrier, client, group)
        (barrier if way == "barrier" else own).close()
        with pytest.raises(FtcoordError if way == "barrier" else ClientClosed):
            second.result(DEADLINE)
    eventually(lambda: len(members(client, group)) == 1, "it counts no longer")
    assert sorted(pool.map(lambda one: one.wait(DEADLINE), [make(3), make(3)])) in ([0, 1], [0, 2], [1, 2])
    assert first.result(DEADLINE) in range(3)


def test_nothing_is_left_of_a_barrier_that_is_dropped(client: EtcdClient, prefix: str, group: str) -> None:
    barrier = ftcoord.Barrier("run", "b", 1, etcd=client, key_prefix=prefix)
    barrier.wait(DEADLINE)
    assert members(client, group)
    del barrier
    gc.collect()
    eventually(lambda: not members(client, group), "it has left")
    eventually(
        lambda: not any(thread.name == "ftcoord-group" for thread in threading.enumerate()), "its thread has ended"
    )


def test_a_record_that_cannot_be_read_is_said_and_left_alone(make: Make, client: EtcdClient, group: str) -> None:
    key = decided_key(group)
    client.put(key, b"garbage")
    for _ in range(2):
        with pytest.raises(StateError, match=key):
            make(1).wait(DEADLINE)
    kv = client.get(key).one
    assert kv is not None
    assert kv.value == b"garbage"
    client.delete(Span(key))
    assert make(1).wait(DEADLINE) == 0


def test_another_number_of_parties_is_refused_while_somebody_wants_the_first(
    make: Make, client: EtcdClient, group: str, pool: ThreadPoolExecutor
) -> None:
    first, second = make(2), make(2)
    before = waiting(pool, first, client, group)
    with pytest.raises(ConfigError, match="wait at this barrier for 2"):
        make(3).wait(DEADLINE)
    assert sorted([second.wait(DEADLINE), before.result(DEADLINE)]) == [0, 1]
    first.close()
    second.close()
    assert make(1).wait(DEADLINE) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"run": ""}, "run"),
        ({"name": ""}, "name"),
        ({"name": 5}, "name"),
        ({"parties": 0}, "parties"),
        ({"parties": 2.5}, "parties"),
        ({"lease_ttl": 0}, "lease_ttl"),
        ({"key_prefix": "no slash"}, "key_prefix"),
        ({"etcd": []}, "endpoints"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_connected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ftcoord.Barrier(**{"run": "run", "name": "b", "parties": 2, "etcd": "127.0.0.1:1", **arguments})


def test_a_forked_child_passes_nothing_and_ends_nothing(make: Make, client: EtcdClient, group: str) -> None:
    barrier = make(1)
    barrier.wait(DEADLINE)
    assert "ForkedProcessError" in in_fork(barrier.wait)
    in_fork(barrier.close)
    assert members(client, group)
    assert barrier.wait(DEADLINE) == 0
