"""What elections and barriers promise, on a real etcd and among real processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import DEADLINE, in_fork, python

import ftcoord
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ConfigError
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient

LEADER = """
import sys, ftcoord
with ftcoord.Election("run", "e", "victim", etcd=sys.argv[1], key_prefix=sys.argv[2], lease_ttl=2) as election:
    print(election.campaign().number, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def elections(client: EtcdClient, prefix: str) -> Iterator[list[ftcoord.Election]]:
    """Two candidates."""
    found = [ftcoord.Election("run", "e", name, etcd=client, key_prefix=prefix) for name in ("first", "second")]
    yield found
    for election in found:
        election.close()


def test_one_leads_and_then_the_other(elections: list[ftcoord.Election], client: EtcdClient, prefix: str) -> None:
    first, second = elections
    assert first.leader() is None
    leadership = first.campaign(DEADLINE)
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


def test_work_is_done_by_the_leader(elections: list[ftcoord.Election]) -> None:
    first, second = elections
    assert first.run(lambda number: number + 1, 1) == 2
    assert second.run(lambda: first.leader() == second.leader())


def test_a_leader_that_is_killed_is_followed(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    with (
        python("-c", LEADER, etcd.get_endpoint(), prefix) as victim,
        ftcoord.Election("run", "e", etcd=client, key_prefix=prefix) as election,
    ):
        assert victim.stdout is not None
        led = int(victim.stdout.readline())
        victim.kill()
        assert election.campaign(DEADLINE).number > led


def test_parties_pass_again_and_again(client: EtcdClient, prefix: str) -> None:
    done = threading.Barrier(4)

    def meet(_: int) -> list[int]:
        with ftcoord.Barrier("run", "b", 4, etcd=client, key_prefix=prefix) as barrier:
            places = [barrier.wait(DEADLINE) for _ in range(5)]
            done.wait(DEADLINE)  # so that nobody leaves before all have heard that they passed
        return places

    with ThreadPoolExecutor(4) as pool:
        for places in zip(*pool.map(meet, range(4)), strict=True):
            assert sorted(places) == [0, 1, 2, 3]


@pytest.mark.parametrize("arguments", [("", 2), ("b", 0), ("b", 2.5), (5, 2)], ids=repr)
def test_bad_arguments_are_refused_before_anything_is_connected(arguments: tuple[object, object]) -> None:
    with pytest.raises(ConfigError):
        ftcoord.Barrier("run", *arguments, etcd="127.0.0.1:1")  # type: ignore[arg-type]


def test_a_forked_child_is_refused(elections: list[ftcoord.Election]) -> None:
    assert "ForkedProcessError" in in_fork(elections[0].campaign)
