"""Replicas that ask the decider itself, over real sockets: what a step costs, and what bad connections cost."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import builders
import pytest
from cutting import Cutter
from helpers import DEADLINE, eventually
from rdzv_nodes import spawn
from replicas import replica_processes

from ftcoord import concurrency
from ftcoord.coordination import ask_desk
from ftcoord.coordination.address import Job
from ftcoord.coordination.gateway import GatewaySessions
from ftcoord.coordination.port import Line, Port, listen
from ftcoord.coordination.replica import Replica
from ftcoord.core import asks as rules
from ftcoord.core.layout import decided_key, decider_key, members_span
from ftcoord.core.office import parse_office
from ftcoord.core.quorum_records import QuorumRecord, parse_replica
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Delete, Get, Span
from ftcoord.etcd.client import EtcdClient

Asked: TypeAlias = "Future[QuorumRecord]"
SHORT = 0.5
THROUGH_ETCD = "replicas of this process ask through etcd"


class Crew:
    """Replicas in one process that have a line each, as if each were in a process of its own."""

    def __init__(self, etcd: EtcdClient, job: Job, stack: ExitStack) -> None:
        self.etcd, self.job, self._stack = etcd, job, stack
        self._places = itertools.count(1)

    def join(self, name: str, alone: bool = True) -> Replica:
        """A replica that is a member. One that is not alone shares the line of the one before."""
        place = next(self._places) if alone else next(self._places) - 1
        self._places = itertools.count(place + 1)
        replica = Replica(self.etcd, replace(self.job, endpoints=f"127.0.0.1:{place}"), name, keeps_lease=True)
        self._stack.callback(replica.leave, DEADLINE)
        replica.beat(concurrency.now() + DEADLINE)
        eventually(lambda: self.value(decider_key(self.job.prefix)), "the first one decides")
        return replica

    def value(self, key: str) -> Any:
        return self.etcd.range(Get(Span(key))).one

    def keys_ask(self) -> list[str]:
        """The replicas whose keys ask."""
        found = [parse_replica(kv.key, kv.value) for kv in self.etcd.range(Get(members_span(self.job.prefix))).kvs]
        return sorted(one.request.replica_id for one in found if one.asked)

    def revision(self) -> int:
        """At which the quorum was written last."""
        return int(self.value(decided_key(self.job.prefix)).mod_revision)


def ask(replica: Replica, step: int = 0, seconds: float = DEADLINE) -> Asked:
    request = builders.request(replica.replica_id, step=step)
    return spawn(partial(replica.ask, request, concurrency.now() + seconds))


def agreed(*asked: Asked) -> QuorumRecord:
    quorums = [one.result(DEADLINE) for one in asked]
    assert all(one == quorums[0] for one in quorums)
    return quorums[0]


def steps(quorum: QuorumRecord) -> dict[str, int]:
    return {one.replica_id: one.step for one in quorum.requests}


@pytest.fixture
def crew(client: EtcdClient, prefix: str) -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(client, Job("etcd", "", prefix, min_replicas=2, heartbeat_timeout_ms=3000), stack)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], str]], None]:
    """`elsewhere(f)`: the decider publishes the address `f(its port)`."""
    listens = ask_desk.listen_for

    def install(change: Callable[[int], str]) -> None:
        def listen_for(job: Job) -> tuple[socket.socket, str]:
            listener, _ = listens(job)
            return listener, change(listener.getsockname()[1])

        monkeypatch.setattr(ask_desk, "listen_for", listen_for)

    return install


@pytest.fixture
def through(elsewhere: Callable[[Callable[[int], str]], None]) -> Iterator[list[Cutter]]:
    """What stands between those that ask and each decider."""
    with ExitStack() as stack:
        cutters: list[Cutter] = []

        def behind(port: int) -> str:
            cutters.append(stack.enter_context(Cutter(port)))
            return f"127.0.0.1:{cutters[-1].port}"

        elsewhere(behind)
        yield cutters


# -- what a step costs -------------------------------------------------------------------------------------------------


def test_a_step_writes_one_key(crew: Crew) -> None:
    a, b = crew.join("a"), crew.join("b")
    agreed(ask(a), ask(b))
    before = crew.revision()
    for step in range(1, 11):
        assert steps(agreed(ask(a, step), ask(b, step))) == {"a": step, "b": step}
    assert crew.revision() - before == 10
    assert crew.keys_ask() == []


def test_replicas_of_a_process_share_a_connection(crew: Crew, through: list[Cutter]) -> None:
    replicas = [crew.join("a"), *(crew.join(name, alone=name == "b") for name in "bcd")]
    for step in range(3):
        assert steps(agreed(*[ask(one, step) for one in replicas])) == dict.fromkeys("abcd", step)
    assert sum(one.taken for one in through) == 1


def test_the_replicas_of_a_gateway_ask_by_one_connection(crew: Crew, through: list[Cutter]) -> None:
    a = crew.join("a")
    sessions = GatewaySessions(crew.etcd, replace(crew.job, endpoints="127.0.0.1:99"), lambda: None)
    try:
        for name in "bcd":
            sessions.beat(name, "ipv4:127.0.0.1:1", concurrency.now() + DEADLINE)
        for step in range(3):
            requests = [builders.request(name, step=step) for name in "bcd"]
            until = concurrency.now() + DEADLINE
            asked = [spawn(partial(sessions.ask, one, "ipv4:127.0.0.1:1", until, bool)) for one in requests]
            assert steps(agreed(*asked, ask(a, step))) == dict.fromkeys("abcd", step)
        assert (sum(one.taken for one in through), crew.keys_ask()) == (1, [])
    finally:
        sessions.close()


# -- who asks no more --------------------------------------------------------------------------------------------------


def test_a_request_that_was_given_up_counts_no_more(crew: Crew) -> None:
    a, b = crew.join("a"), crew.join("b")
    agreed(ask(a), ask(b))
    with pytest.raises(TimeoutError, match="need min_replicas 2"):
        ask(b, 1, SHORT).result(DEADLINE)
    waiting = ask(a, 1)
    with pytest.raises(TimeoutError):
        waiting.result(SHORT)
    assert steps(agreed(waiting, ask(b, 2))) == {"a": 1, "b": 2}


def test_a_process_that_is_gone_asks_no_more(crew: Crew) -> None:
    """Its connection ends before its lease."""
    a, b, c = crew.join("a"), crew.join("b"), crew.join("c")
    agreed(ask(a), ask(b), ask(c))
    lost = ask(b, 1)
    eventually(lambda: "1 participants" in a.participant.reason, "its request has come")
    b._use._line.close()
    eventually(lambda: "0 participants" in a.participant.reason, "it counts no more")
    b.orphan()
    with pytest.raises(RuntimeError):
        lost.result(DEADLINE)


def test_a_decider_that_wakes_up_does_not_count_who_has_given_up_meanwhile(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}/{prefix.strip('/')}?min_replicas=2&join_timeout_ms=2000&heartbeat_timeout_ms=10000"
    with replica_processes(job, 3) as (one, two, three):
        for process, name in zip((one, two, three), "abc", strict=True):  # the first to join decides
            assert process.ask(name, timeout=SHORT).exception(DEADLINE)
        first = [process.ask(name) for process, name in zip((one, two, three), "abc", strict=True)]
        assert {told.result(DEADLINE)[0] for told in first} == {1}
        one.stop()
        gives_up = two.ask("b", timeout=SHORT, step=1)
        assert isinstance(gives_up.exception(DEADLINE), TimeoutError)
        waits = three.ask("c", step=1)
        one.resume()
        late = one.ask("a", step=1)
        assert late.result(DEADLINE)[1] == waits.result(DEADLINE)[1] == ["a", "c"]


# -- deciders that cannot be reached -----------------------------------------------------------------------------------


def unreachable(kind: str, stack: ExitStack) -> Callable[[int], str]:
    """How to change the decider's address so that nobody reaches it."""
    taken = stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))  # and does not listen: refused
    if kind == "refused":
        return lambda _: f"127.0.0.1:{taken.getsockname()[1]}"
    if kind == "silent":
        taken.listen()
        return lambda _: f"127.0.0.1:{taken.getsockname()[1]}"
    if kind == "closed":
        ended = stack.enter_context(Cutter(taken.getsockname()[1]))
        return lambda _: f"127.0.0.1:{ended.port}"
    if kind == "nonsense":
        return lambda _: "nowhere"
    other = Port(listen("127.0.0.1:0"), b"x" * 16, Deaf())
    stack.callback(other.close)
    return lambda _: f"127.0.0.1:{other._listener.getsockname()[1]}"


class Deaf:
    """Handles nothing."""

    name, hint = "other", ""

    def handle(self, batch: object) -> None:
        pass

    def tick(self) -> float:
        return float("inf")

    def failed(self, error: BaseException) -> None:
        pass


@pytest.mark.parametrize("kind", ["refused", "silent", "closed", "nonsense", "wrong proof"])
def test_a_decider_that_is_not_reached_is_asked_through_etcd(
    crew: Crew, elsewhere: Callable[[Callable[[int], str]], None], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        elsewhere(unreachable(kind, stack))
        a, b = crew.join("a"), crew.join("b")
        for step in range(3):
            assert steps(agreed(ask(a, step), ask(b, step))) == {"a": step, "b": step}
        assert crew.keys_ask() == ["b"]  # the decider asks itself
        assert sum(THROUGH_ETCD in line for line in caplog.messages) == 1
        with pytest.raises(TimeoutError):
            ask(b, 3, SHORT).result(DEADLINE)
        eventually(lambda: not crew.keys_ask(), "what was given up is taken back")


def test_a_process_that_is_cut_off_in_one_direction_asks_through_etcd_and_then_by_port_again(
    crew: Crew, through: list[Cutter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends is lost, and nobody closes its connection: the decider lives, and its office does not end."""
    monkeypatch.setattr(rules, "TRIES_LATER", 0.5)
    a, b = crew.join("a"), crew.join("b")
    agreed(ask(a), ask(b))
    held = crew.value(decider_key(crew.job.prefix))
    through[0].freeze()
    assert steps(agreed(ask(a, 1), ask(b, 1))) == {"a": 1, "b": 1}
    assert crew.value(decider_key(crew.job.prefix)) == held

    def asks_by_port() -> bool:
        agreed(ask(a, 2), ask(b, 2))
        return not crew.keys_ask()

    eventually(asks_by_port, "they ask by port again")


def test_a_connection_that_ends_is_made_again_and_asks_the_same(crew: Crew, through: list[Cutter]) -> None:
    a, b = crew.join("a"), crew.join("b")
    agreed(ask(a), ask(b))
    waiting = ask(b, 1)
    eventually(lambda: "1 participants" in a.participant.reason, "it asks")
    taken = through[0].taken
    through[0].reset()
    eventually(lambda: through[0].taken > taken, "it connects again")
    eventually(lambda: "1 participants" in a.participant.reason, "it asks again")
    assert steps(agreed(ask(a, 1), waiting)) == {"a": 1, "b": 1}
    assert crew.keys_ask() == []


# -- offices that end --------------------------------------------------------------------------------------------------


def test_the_next_decider_is_asked_the_same(crew: Crew) -> None:
    a, b, c = crew.join("a"), crew.join("b"), crew.join("c")
    agreed(ask(a), ask(b), ask(c))
    waiting = [ask(b, 1), ask(c, 1)]
    eventually(lambda: "2 participants" in a.participant.reason, "they ask")
    crew.etcd.revoke(crew.value(decider_key(crew.job.prefix)).lease)
    assert steps(agreed(*waiting, ask(a, 1))) == {"a": 1, "b": 1, "c": 1}
    assert crew.keys_ask() == []


def test_a_member_whose_key_is_gone_joins_again_and_asks_the_same(crew: Crew) -> None:
    a, b = crew.join("a"), crew.join("b")
    agreed(ask(a), ask(b))
    before = b.participant.lease
    waiting = ask(b, 1)
    eventually(lambda: "1 participants" in a.participant.reason, "it asks")
    member = b.participant.member
    assert member is not None
    crew.etcd.txn((), [Delete(Span(member.group.own.key))])
    # Else the decider may not know it yet.
    eventually(lambda: b.participant.lease not in (0, before), "it has joined again")
    assert steps(agreed(waiting, ask(a, 1))) == {"a": 1, "b": 1}


def test_a_stranger_that_knows_the_key_and_sends_nonsense_is_closed(crew: Crew) -> None:
    a, b = crew.join("a"), crew.join("b")
    agreed(ask(a), ask(b))
    kv = crew.value(decider_key(crew.job.prefix))
    office = parse_office(kv.key, kv.value)
    host, _, port = office.address.rpartition(":")
    for about, kind, payload in [({}, "A", b""), ({"process": "p", "connection": 1}, "A", b"x"), ({}, "Z", b"")]:
        until = concurrency.now() + DEADLINE
        line = Line(host, int(port), bytes.fromhex(office.key), until, about)
        line.send(kind, payload, until)
        with pytest.raises(ConnectionError):
            line.receive(until)
        line.close()
    assert steps(agreed(ask(a, 1), ask(b, 1))) == {"a": 1, "b": 1}
