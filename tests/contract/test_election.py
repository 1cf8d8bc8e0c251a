"""Elections on a real etcd, with processes that are killed, stopped and forked."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from helpers import DEADLINE, eventually, freeze, in_fork, python

import ftcoord
from ftcoord.core.layout import decided_key, election_prefix, members_span, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ClientClosed, ConfigError, FtcoordError, StateError
from ftcoord.etcd.api import Get, Put, Span
from ftcoord.etcd.client import EtcdClient

LEADER = """
import sys, ftcoord
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient
from ftcoord.config import EtcdConfig
client = EtcdClient(EtcdConfig.load(sys.argv[1], env={}))
with ftcoord.Election("run", "e", "victim", etcd=client, key_prefix=sys.argv[2], lease_ttl=2) as election:
    leadership = election.campaign()
    print(leadership.number, flush=True)
    sys.stdin.readline()
    print(client.txn([leadership.fence], [Put(sys.argv[2] + "/late", b"")]).succeeded, flush=True)
    print(leadership.wait_lost(60), flush=True)
"""
Make = Callable[..., ftcoord.Election]


@pytest.fixture
def make(client: EtcdClient, prefix: str) -> Iterator[Make]:
    with ExitStack() as stack:

        def election(candidate: str | None = None, **more: Any) -> ftcoord.Election:
            how = {"etcd": client, "key_prefix": prefix, **more}
            return stack.enter_context(ftcoord.Election("run", "e", candidate, **how))

        yield election


@pytest.fixture
def group(prefix: str) -> str:
    return election_prefix(run_prefix(prefix, "run"), "e")


def members(client: EtcdClient, group: str) -> list[str]:
    return [kv.key for kv in client.range(Get(members_span(group), keys_only=True)).kvs]


def group_threads() -> int:
    return sum(thread.name == "ftcoord-group" for thread in threading.enumerate())


def test_one_leads_and_then_the_other(make: Make, client: EtcdClient, prefix: str) -> None:
    first, second = make("first"), make("second")
    assert first.leader() is None
    leadership = first.campaign(DEADLINE)
    assert first.campaign(DEADLINE).number == leadership.number, "it leads still"
    term = second.leader()
    assert term is not None
    assert (term.number, term.name) == (leadership.number, "first")
    assert client.txn([leadership.fence], [Put(f"{prefix}/written", b"")]).succeeded
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.campaign, DEADLINE)
        leadership.resign()
        after = waiting.result()
    assert after.number > leadership.number
    assert (leadership.lost, after.lost) == (True, False)
    assert not client.txn([leadership.fence], [Put(f"{prefix}/written", b"")]).succeeded


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_leader_that_is_no_more_is_followed(
    make: Make, etcd: EtcdServer, client: EtcdClient, prefix: str, way: str
) -> None:
    """One that stood still writes nothing as the leader of a term that is over, and hears that it is."""
    with python("-c", LEADER, etcd.get_endpoint(), prefix) as victim:
        assert victim.stdout is not None
        assert victim.stdin is not None
        led = int(victim.stdout.readline())
        if way == "killed":
            victim.kill()
        else:
            freeze(victim.pid)
        after = make("next").campaign(DEADLINE)
        assert after.number > led
        if way == "stopped":
            victim.send_signal(signal.SIGCONT)
            print(file=victim.stdin, flush=True)
            assert victim.stdout.readline().split() == ["False"]
            assert victim.stdout.readline().split() == ["True"]
        assert client.get(f"{prefix}/late").one is None
        assert not after.lost


def test_nothing_is_left_of_an_election_that_is_dropped(client: EtcdClient, prefix: str, group: str) -> None:
    election = ftcoord.Election("run", "e", etcd=client, key_prefix=prefix)
    leadership = election.campaign(DEADLINE)
    del election
    gc.collect()
    assert members(client, group), "who leads is referred to by its leadership"
    del leadership
    gc.collect()
    eventually(lambda: not members(client, group), "it has left")
    eventually(lambda: not group_threads(), "its thread has ended")


def test_run_returns_what_the_work_returned_and_resigns(make: Make, client: EtcdClient, group: str) -> None:
    assert make().run(divmod, 7, 2) == (3, 1)
    assert not members(client, group)
    with pytest.raises(ZeroDivisionError):
        make().run(divmod, 7, 0)
    assert not members(client, group)


def test_a_campaign_that_is_not_in_time_takes_its_candidacy_back(make: Make, client: EtcdClient, group: str) -> None:
    held = make("first").campaign(DEADLINE)
    with pytest.raises(TimeoutError, match="second"):
        make("second").campaign(0.5)
    assert len(members(client, group)) == 1
    assert not held.lost


def test_a_campaign_that_is_interrupted_takes_its_candidacy_back(make: Make, client: EtcdClient, group: str) -> None:
    make("first").campaign(DEADLINE)
    second = make("second")
    done = threading.Event()

    def interrupt() -> None:
        eventually(lambda: len(members(client, group)) == 2, "it waits")
        _thread.interrupt_main()
        done.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        second.campaign(DEADLINE)
    thread.join()
    assert len(members(client, group)) == 1


@pytest.mark.parametrize("way", ["election", "client"])
def test_what_is_closed_while_it_waits(make: Make, etcd: EtcdServer, client: EtcdClient, group: str, way: str) -> None:
    make("first").campaign(DEADLINE)
    with EtcdClient(etcd.get_endpoint()) as own, ThreadPoolExecutor(1) as pool:
        second = make("second", etcd=own)
        waiting = pool.submit(second.campaign)
        eventually(lambda: len(members(client, group)) == 2, "it waits")
        (second if way == "election" else own).close()
        with pytest.raises(FtcoordError if way == "election" else ClientClosed):
            waiting.result(DEADLINE)


def test_a_record_that_cannot_be_read_is_said_and_left_alone(make: Make, client: EtcdClient, group: str) -> None:
    held, key = make("first").campaign(DEADLINE), decided_key(group)
    client.put(key, b"garbage")
    for election in (make("second"), make("third")):
        with pytest.raises(StateError, match=key):
            election.campaign(DEADLINE)
        with pytest.raises(StateError, match=key):
            election.leader()
    kv = client.get(key).one
    assert kv is not None
    assert kv.value == b"garbage"
    held.resign()
    client.delete(Span(key))
    assert not make("fourth").campaign(DEADLINE).lost


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"run": ""}, "run"),
        ({"run": 5}, "run"),
        ({"name": ""}, "name"),
        ({"candidate": 5}, "candidate"),
        ({"lease_ttl": 0}, "lease_ttl"),
        ({"lease_ttl": 2.5}, "lease_ttl"),
        ({"key_prefix": "no slash"}, "key_prefix"),
        ({"etcd": 5}, "endpoints"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_connected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ftcoord.Election(**{"run": "run", "name": "e", "etcd": "127.0.0.1:1", **arguments})


def test_a_forked_child_leads_nothing_and_ends_nothing(make: Make, client: EtcdClient, prefix: str) -> None:
    election = make()
    leadership = election.campaign(DEADLINE)
    for call in (election.campaign, election.leader, lambda: election.run(print)):
        assert "ForkedProcessError" in in_fork(call)
    in_fork(leadership.resign)
    in_fork(election.close)
    assert client.txn([leadership.fence], [Put(f"{prefix}/written", b"")]).succeeded
    assert not leadership.lost
