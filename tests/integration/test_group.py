"""Groups: members that come and go, deciders that die, answers that are lost, and one chain of decisions."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import members
import pytest
from helpers import DEADLINE, Seen, eventually, python
from members import CALL_TIMEOUT, Blind, Counting, Lossy, Node, Overtaken, read

from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import Compacted, LeaseLost
from ftcoord.etcd.api import Batch, Etcd, Get, RangeResult, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.retry import TimeLimit

MEMBER = str(Path(members.__file__))
Join = Callable[..., Node]


@pytest.fixture
def join(client: EtcdClient, prefix: str) -> Iterator[Join]:
    """`join(etcd=client, **more)`: a new member, which leaves in the end."""
    nodes: list[Node] = []

    def make(etcd: Etcd = client, **more: Any) -> Node:
        nodes.append(Node(etcd, prefix, **more))
        return nodes[-1]

    yield make
    for node in nodes:
        node.leave()
    eventually(lambda: not any(thread.name == "ftcoord-group" for thread in threading.enumerate()), what="the threads")


@pytest.fixture
def history(client: EtcdClient, prefix: str) -> Iterator[Callable[[int], list[dict[str, Any]]]]:
    """`history(n)`: all rolls ever decided, at least up to number n, checked to be one chain."""
    seen = Seen()
    watch = client.watch(Span(f"{prefix}/decided"), client.get(prefix).revision + 1, seen)

    def all_of_them(last: int) -> list[dict[str, Any]]:
        rolls = records(seen.batches)
        while not rolls or rolls[-1]["number"] < last:
            if isinstance(item := seen.next(), Batch):
                seen.batches.append(item)
            rolls = records(seen.batches)
        assert [roll["number"] for roll in rolls] == list(range(1, len(rolls) + 1))
        return rolls

    yield all_of_them
    watch.cancel()


def records(batches: list[Batch]) -> list[dict[str, Any]]:
    return [read(event.kv) for batch in batches for event in batch.events if event.kind == "put"]


def test_members_come_and_go(join: Join, history: Any) -> None:
    first = join()
    first.sees(first)
    second, third = join(), join()
    for node in (first, second, third):
        assert node.sees(first, second, third)["by"] == first.id
    second.leave()
    for node in (first, third):
        node.sees(first, third)
    rolls = history(first.rolls[-1]["number"])
    for before, after in itertools.pairwise(rolls):
        assert before["members"] != after["members"]


def test_a_member_changes_what_it_asks_for(join: Join) -> None:
    first, second = join(ask="a"), join(ask="a")
    first.sees(first, second)
    for ask in "bc":
        for node in (first, second):
            node.ask(ask)
    expected = {first.id: "c/1", second.id: "c/1"}
    for node in (first, second):
        node.hears(lambda roll: roll["members"] == expected)
        assert node.group.decided is not None
        assert read(node.group.decided)["members"] == expected


def test_the_next_oldest_decides_when_the_decider_leaves(join: Join) -> None:
    nodes = [join() for _ in range(4)]
    for i in range(3):
        nodes[i].leave()
        assert nodes[-1].sees(*nodes[i + 1 :])["by"] == nodes[i + 1].id


def test_a_member_in_the_middle_leaves_before_the_decider(join: Join) -> None:
    first, second, third, fourth = (join() for _ in range(4))
    fourth.sees(first, second, third, fourth)
    third.leave()
    second.leave()
    assert fourth.sees(first, fourth)["by"] == first.id
    first.leave()
    assert fourth.sees(fourth)["by"] == fourth.id


def started(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_decider_that_is_killed_is_replaced(etcd: EtcdServer, join: Join, prefix: str, history: Any) -> None:
    with python(MEMBER, etcd.get_endpoint(), prefix) as decider:
        victim = started(decider)
        second, third = join(), join()
        assert third.sees(victim, second, third)["by"] == victim
        decider.kill()
        for node in (second, third):
            assert node.sees(second, third)["by"] == second.id
    history(second.rolls[-1]["number"])


def test_a_process_that_ends_in_order_leaves_at_once(etcd: EtcdServer, join: Join, prefix: str) -> None:
    node = join()
    with python(MEMBER, etcd.get_endpoint(), prefix) as other:
        node.sees(node, started(other))
        other.communicate(timeout=DEADLINE)
        assert other.returncode == 0
        node.sees(node)


def test_many_deciders_at_once_decide_as_one(client: EtcdClient, join: Join, history: Any) -> None:
    nodes = [join(Blind(client)) for _ in range(4)]
    for node in nodes:
        node.sees(*nodes)
    late = join(Blind(client))
    nodes[0].leave()
    for node in (*nodes[1:], late):
        node.sees(*nodes[1:], late)
    history(late.rolls[-1]["number"])


def test_only_the_decider_watches_the_members(client: EtcdClient, join: Join, prefix: str) -> None:
    doors = [Counting(client) for _ in range(5)]
    nodes = [join(door) for door in doors]
    for node in nodes:
        node.sees(*nodes)
    ahead = [Span(f"{prefix}/members/", is_prefix=True), *(Span(node.group.key) for node in nodes[:-1])]
    for door, other in zip(doors, ahead, strict=True):  # whoever sees them all may still look for the one before it
        eventually(
            lambda door=door, other=other: set(door.watched) == {Span(f"{prefix}/decided"), other},
            "each watches the one before it",
        )
    counted = [len(door.events) for door in doors]
    known = len(nodes[1].rolls)
    others = [join() for _ in range(5)]
    for node in nodes:
        node.sees(*nodes, *others)
    decisions = len(nodes[1].rolls) - known
    assert decisions <= 5
    for door, before in list(zip(doors, counted, strict=True))[1:]:
        assert door.events[before:] == [f"{prefix}/decided"] * decisions
    nodes[2].leave()
    nodes[4].sees(*nodes[:2], *nodes[3:], *others)
    eventually(lambda: Span(nodes[1].group.key) in doors[3].watched, what="the new predecessor to be watched")


class Reading(Counting):
    """Also counts the reads of several keys."""

    reads = 0

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        self.reads += get.span.is_prefix
        return self.real.range(get, timeout=timeout)


def test_keys_that_are_no_members_delay_nobody(
    client: EtcdClient, join: Join, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever joins looks for older members among them. There is one, and no tail tells of it."""
    first, door = join(), Reading(client)
    for number in range(300):
        client.put(f"{prefix}/members/garbage {number}", b"garbage")
    client.delete(Span(f"{prefix}/tail"))
    second = join(door)
    second.sees(first, second)
    assert door.reads <= 6
    first.leave()
    second.sees(second)
    assert caplog.text.count("300 keys below") == 1


def test_a_decision_writes_all_or_nothing(client: EtcdClient, join: Join, prefix: str) -> None:
    first, second = join(), join()
    first.sees(first, second)
    number = first.rolls[-1]["number"]
    rolls = client.range(Get(Span(f"{prefix}/roll/", is_prefix=True)))
    assert [kv.key.rpartition("/")[2] for kv in rolls.kvs] == [str(i + 1) for i in range(number)]
    decided = client.get(f"{prefix}/decided").one
    assert decided is not None
    assert {kv.lease for kv in rolls.kvs} == {decided.lease} != {0}


def test_the_record_outlives_its_ttl_but_not_its_deciders(
    etcd: EtcdServer, client: EtcdClient, join: Join, prefix: str
) -> None:
    ttl = 6  # of what must live on while the machine stalls for some seconds
    with python(MEMBER, etcd.get_endpoint(), prefix, str(ttl)) as last:
        node = join(record_ttl=ttl)
        node.sees(node, started(last))
        mine = node.group.decided
        assert mine is not None
        decided = f"{prefix}/decided"
        threading.Event().wait(2 * ttl)
        assert client.get(decided).one == mine
        node.leave()
        survivor = eventually(
            lambda: client.get(decided).one not in (None, mine) and client.get(decided).one, what="a decision"
        )
        threading.Event().wait(1.5 * ttl)
        assert client.get(decided).one == survivor
        last.kill()
        eventually(lambda: client.range(Get(Span(prefix, is_prefix=True))).count == 0, what="the expiry of all keys")


def test_a_record_that_was_deleted_is_written_again(client: EtcdClient, join: Join, prefix: str) -> None:
    first, second = join(), join()
    for _ in range(3):
        number = first.sees(first, second)["number"]
        second.hears(lambda roll, number=number: roll["number"] == number)
        client.delete(Span(f"{prefix}/decided"))
        first.hears(lambda roll, number=number: roll["number"] > number)
        second.sees(first, second)


def test_a_record_whose_lease_was_revoked_is_written_again(client: EtcdClient, join: Join, prefix: str) -> None:
    first, second = join(), join()
    number = first.sees(first, second)["number"]
    second.hears(lambda roll: roll["number"] == number)
    assert first.group.decided is not None
    client.revoke(first.group.decided.lease)
    second.hears(lambda roll: roll["number"] > number)
    assert second.group.decided is not None
    assert client.renew(second.group.decided.lease) == members.RECORD_TTL


def test_a_record_that_nobody_can_read_stops_decisions_but_no_thread(
    client: EtcdClient, join: Join, prefix: str
) -> None:
    first, second = join(), join()
    good = first.sees(first, second)
    client.put(f"{prefix}/decided", b"\xffgarbage")
    third = join()
    for node in (first, second, third):
        eventually(lambda node=node: node.errors, what="the garbage to be seen")
    threading.Event().wait(1.5)
    stored = client.get(f"{prefix}/decided").one
    assert stored is not None
    assert stored.value == b"\xffgarbage"
    client.put(f"{prefix}/decided", json.dumps(good | {"nonce": "by hand"}).encode())
    for node in (first, second, third):
        assert node.sees(first, second, third)["number"] == good["number"] + 1


def test_a_decider_without_a_lease_decides_no_more(client: EtcdClient, join: Join, history: Any) -> None:
    first, second = join(), join()
    second.sees(first, second)
    client.revoke(first.session.lease_id)
    assert second.sees(second)["by"] == second.id
    third = join()
    assert third.sees(second, third)["by"] == second.id
    with pytest.raises(LeaseLost, match="join again"):
        first.group.enter(b"as if nothing had happened", TimeLimit(CALL_TIMEOUT))
    rolls = history(third.rolls[-1]["number"])
    assert rolls[-1]["by"] == second.id


@pytest.mark.parametrize("mine", [0, 1], ids=["the decider's", "another's"])
def test_a_member_key_that_was_deleted_comes_back(client: EtcdClient, join: Join, mine: int) -> None:
    nodes = join(ask="one"), join(ask="two")
    nodes[1].sees(*nodes)
    key = nodes[mine].group.key
    client.delete(Span(key))
    nodes[mine].group.check()
    kv = eventually(lambda: client.get(key).one, what="the key is back")
    assert kv.value.startswith((b"one", b"two")[mine])
    third = join()
    assert set(nodes[mine].sees(*nodes, third)["members"]) == {*(node.id for node in nodes), third.id}


@pytest.mark.parametrize("mine", [0, 1], ids=["the decider's", "another's"])
def test_a_member_key_that_was_overwritten_is_put_right(client: EtcdClient, join: Join, mine: int) -> None:
    nodes = join(), join()
    nodes[1].sees(*nodes)
    client.put(nodes[mine].group.key, b"by somebody else, and under no lease")
    nodes[mine].group.check()
    third = join()
    third.hears(lambda roll: len(roll["members"]) == 3 and not any("else" in ask for ask in roll["members"].values()))


@pytest.mark.parametrize("name", ["0123456789abcdef", "junk", "a/b"])
def test_a_key_among_the_members_that_is_none(client: EtcdClient, prefix: str, join: Join, name: str) -> None:
    """Older than all members, and never to go: it is not followed, and not counted."""
    client.put(f"{prefix}/members/{name}", b"junk")
    first, second = join(), join()
    second.sees(first, second)
    first.leave()
    second.sees(second)
    assert client.get(f"{prefix}/members/{name}").one is not None


def test_a_member_whose_key_etcd_lost_asks_again(fragile: EtcdServer, prefix: str) -> None:
    """etcd 3.5.0 to 3.5.2 can lose a write when killed; a restart without the key is the same to its member."""
    with fragile.get_client() as client, contextlib.ExitStack() as nodes:
        first, second = (Node(client, prefix, ask=ask, ttl=600) for ask in ("one", "two"))
        for node in (first, second):
            nodes.callback(node.leave)
        first.sees(first, second)
        for lost in (second, first):
            client.delete(Span(lost.group.key))
            fragile.kill()
            fragile.restart()
            roll = second.sees(first, second)
            assert roll["members"][lost.id].startswith("one" if lost is first else "two")


@pytest.mark.parametrize("seed", range(5))
def test_lost_requests_and_answers_change_nothing(client: EtcdClient, join: Join, history: Any, seed: int) -> None:
    nodes = [join(Lossy(client, 100 * seed + i)) for i in range(4)]
    for node in nodes:
        node.sees(*nodes)
    nodes[0].leave()
    late = join(Lossy(client, 100 * seed + 99))
    nodes[1].ask("something else")
    expected = {*(node.id for node in nodes[1:]), late.id}
    for node in (*nodes[1:], late):
        node.hears(
            lambda roll: set(roll["members"]) == expected and roll["members"][nodes[1].id].startswith("something else")
        )
    rolls = history(late.rolls[-1]["number"])
    for before, after in itertools.pairwise(rolls):
        assert before["members"] != after["members"], "decided twice"


def test_members_that_overtake_each_other_while_their_writes_are_settled(client: EtcdClient, join: Join) -> None:
    """None may take a younger one for the one before it: they would wait for each other."""
    nodes: list[Node] = []
    nodes.append(join(Overtaken(client, lambda: nodes.append(join(Overtaken(client, lambda: nodes.append(join())))))))
    for node in nodes:
        node.sees(*nodes)
    nodes[0].leave()
    for node in nodes[1:]:
        node.sees(*nodes[1:])


def test_an_enter_of_unknown_outcome_can_be_repeated_with_another_value(client: EtcdClient, join: Join) -> None:
    """The first one may have happened: that is no reason to believe that somebody else wrote the key."""
    nodes = [join(Lossy(client, seed)) for seed in range(20)]
    for node in nodes:
        stored = client.get(node.group.key).one
        assert stored is not None
        assert stored.lease == node.session.lease_id


def test_etcd_is_restarted_in_the_middle(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        nodes = [Node(client, "/g", ttl=60) for _ in range(3)]
        nodes[0].sees(*nodes)
        for _ in range(2):
            fragile.kill()
            fragile.restart()
            nodes.append(Node(client, "/g", ttl=60))
            for node in nodes:
                node.sees(*nodes)
        fragile.kill()
        fragile.restart()
        nodes[0].leave()
        for node in nodes[1:]:
            node.sees(*nodes[1:])
        for node in nodes[1:]:
            node.leave()


def test_history_is_compacted_while_nobody_is_connected(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        doors = [Counting(client) for _ in range(3)]
        nodes = [Node(door, "/g", ttl=60) for door in doors]
        for node in nodes:
            node.sees(*nodes)
        revision = [client.put("/unrelated", b"").revision for _ in range(50)][-1]
        client.compact(revision)
        fragile.kill()
        fragile.restart()
        for door in doors:
            eventually(lambda door=door: len(door.errors) == 2, what="the end of both watches")
            assert {type(error) for error in door.errors} == {Compacted}
        nodes[1].leave()
        late = Node(client, "/g", ttl=60)
        for node in (nodes[0], nodes[2], late):
            node.sees(nodes[0], nodes[2], late)
        for node in (nodes[0], nodes[2], late):
            node.leave()
