"""Both ends of the ask port in virtual time: what silent, closed and wrong connections cost, and a lost answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import builders
import pytest
from virtual import DELIVERED, LOST_ANSWER, LOST_REQUEST, REFUSED, Call, Fate, Scheduler
from worlds import World, play

from ftcoord import concurrency
from ftcoord.coordination import ask_desk, ask_line
from ftcoord.coordination.address import Job
from ftcoord.coordination.ask_desk import AskDesk
from ftcoord.coordination.ask_line import AskLine
from ftcoord.coordination.policy import parse_quorum
from ftcoord.coordination.replica import Replica
from ftcoord.core import quorum_records
from ftcoord.core.asks import BY_KEY_AFTER, Ask, OpenAsk
from ftcoord.core.layout import decided_key
from ftcoord.core.office import OfficeRecord
from ftcoord.core.quorum_records import QuorumSeat
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import KeyValue, Put

JOB = Job("etcd", "", "trio", min_replicas=2, join_timeout_ms=60_000, heartbeat_timeout_ms=30_000)
KEY = "ab" * 16


class NoPort:
    """In place of a port to which nobody connects."""

    is_quiet = True

    def __init__(self, *_given: object, **_named: object) -> None:
        pass

    def submit(self, call: Callable[[], None]) -> None:
        concurrency.thread(call, "port").start()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_desk, "listen_for", lambda _job: (object(), "127.0.0.1:1"))
    monkeypatch.setattr(ask_desk, "stop_listening", lambda _listener: None)
    monkeypatch.setattr(ask_desk, "Port", NoPort)


class Caller:
    """A replica that asks."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        self.told.append("answered")

    def by_key(self) -> None:
        self.told.append("by key")

    def gone(self, member: str) -> None:
        self.told.append("gone")

    def waits(self, why: str) -> None:
        pass


def ask_of(member: str, **request: Any) -> Ask:
    return Ask(member, 5, 1, 0, 0, builders.request(member, **request))


def both_ends() -> tuple[AskLine, AskDesk]:
    """The line and the desk of a process that decides, and asks as `m1`."""
    line = AskLine(JOB, parse_quorum)
    desk = AskDesk(JOB, line, parse_quorum)
    address = desk.open(KEY)
    desk.serve(lambda: None)
    line.office_is(OfficeRecord("m1", address, KEY), 10, anew=True)
    assert line.ask(Caller(), ask_of("m1"))
    return line, desk


def in_virtual_time(scenario: Callable[[Scheduler], None]) -> None:
    scheduler = Scheduler()
    scheduler.run(lambda: scenario(scheduler))


def test_a_deciders_own_replicas_ask_for_as_long_as_they_wait() -> None:
    def scenario(world: Scheduler) -> None:
        line, desk = both_ends()
        for _ in range(2000):
            world.sleep(0.05)
            assert desk.asks({"m1"}, 10)
        desk.close()
        line.close()

    in_virtual_time(scenario)


def test_what_a_term_before_has_answered_is_answered_in_the_next_one_at_once() -> None:
    """The answer was lost with its connection, and nobody else decided meanwhile."""

    def scenario(world: Scheduler) -> None:
        line, caller = AskLine(JOB, parse_quorum), Caller()
        desk = AskDesk(JOB, line, parse_quorum)
        value = quorum_records.encode_quorum(builders.quorum(1, [QuorumSeat("m1", 1, builders.request("m1"))]))
        record = KeyValue(decided_key(JOB.prefix), value, 9, 9, 1, 7)
        for key in ("cd" * 16, KEY):
            desk.close()
            address = desk.open(key)
            desk.serve(lambda: None)
            desk.decided(record)
        line.office_is(OfficeRecord("m1", address, KEY), 10, anew=True)
        assert line.ask(caller, ask_of("m1"))
        world.sleep(1)
        assert caller.told == ["answered"]
        desk.close()
        line.close()

    in_virtual_time(scenario)


def test_an_ask_that_comes_while_the_decider_reads_them_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(world: World) -> None:
        a, b = (Replica(world.etcd.client(), JOB, name, keeps_lease=True) for name in "ab")
        until, read, reads = concurrency.now() + 100, AskDesk.asks, concurrency.event()

        def slowly(*given: Any) -> Mapping[str, OpenAsk]:
            found = read(*given)
            if found and not reads.is_set():
                reads.set()
                world.sleep(0.1)
            return found

        b.beat(until)
        monkeypatch.setattr(AskDesk, "asks", slowly)
        first = concurrency.thread(a.ask, "a", builders.request("a"), until)
        first.start()
        reads.wait()
        assert b.ask(builders.request("b"), concurrency.now() + 5).names == {"a", "b"}
        first.join(100)
        for one in (a, b):
            one.leave(5)

    play(scenario, 0)


@pytest.mark.parametrize("what", [{"step": -(2**63)}, {"world_size": 2**63}, {"commit_failures": -(2**63)}])
def test_a_request_that_nobody_could_read_is_refused_and_leaves_the_others(what: dict[str, int]) -> None:
    """Through the port it would close the connection of all replicas of its process."""

    def scenario(world: World) -> None:
        replica = Replica(world.etcd.client(), replace(JOB, min_replicas=1), "a", keeps_lease=True)
        with pytest.raises(RequestRefused, match="see its step"):
            replica.ask(builders.request("a", **what), concurrency.now() + 5)
        assert replica.ask(builders.request("a", step=1), concurrency.now() + 5).names == {"a"}
        replica.leave(1)

    play(scenario, 0)


@pytest.mark.parametrize("address", ["host:65536", f"host:{10**30}", "host:", "nowhere"])
def test_an_address_that_is_none_is_asked_by_key(address: str) -> None:
    """Whoever may write below the prefix may write such an office; the line goes on."""

    def scenario(world: Scheduler) -> None:
        line, caller = AskLine(JOB, parse_quorum), Caller()
        line.office_is(OfficeRecord("m1", address, KEY), 10, anew=True)
        assert line.ask(caller, ask_of("m1"))
        world.sleep(2 * BY_KEY_AFTER)
        assert caller.told == ["by key"]
        line.close()

    in_virtual_time(scenario)


def test_a_decider_that_closes_each_connection_is_asked_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It proves itself each time."""

    class Closing:
        def __init__(self, *_given: object) -> None:
            pass

        def send(self, *_given: object) -> None:
            pass

        def receive(self, _deadline: float) -> NoReturn:
            raise ConnectionError("the other end has closed the connection")

        def close(self) -> None:
            pass

    monkeypatch.setattr(ask_line, "Line", Closing)

    def scenario(world: Scheduler) -> None:
        line, caller = AskLine(JOB, parse_quorum), Caller()
        line.office_is(OfficeRecord("m1", "host:1", KEY), 10, anew=True)
        assert line.ask(caller, ask_of("m1"))
        world.sleep(2 * BY_KEY_AFTER)
        assert caller.told == ["by key"]
        line.close()

    in_virtual_time(scenario)


def test_a_decision_whose_answer_was_lost_is_told_when_etcd_is_back() -> None:
    """The decider asks by port, so no watch brings it what it has decided; and one that asked is gone by then."""

    def scenario(world: World) -> None:
        cut_until = [0.0, 0.0]  # the second is there once the answer is to be lost

        def fate(call: Call) -> Fate:
            if concurrency.now() < cut_until[0]:
                return LOST_REQUEST if call.writes else REFUSED
            puts = [one for one in getattr(call.asked, "success", ()) if isinstance(one, Put)]
            if cut_until[1] and any(put.key == decided_key(JOB.prefix) for put in puts):
                cut_until[:] = concurrency.now() + 6.5, 0.0
                return LOST_ANSWER
            return DELIVERED

        replicas = {
            name: Replica(world.etcd.client(fate if name == "a" else None), JOB, name, keeps_lease=True)
            for name in "abc"
        }
        took = dict[str, float]()

        def ask(name: str, step: int, seconds: float) -> None:
            began = concurrency.now()
            try:
                replicas[name].ask(builders.request(name, step=step), began + seconds)
            except TimeoutError:
                return
            took[name] = concurrency.now() - began

        def step(number: int, seconds_of_c: float) -> None:
            took.clear()
            seconds = {"a": 200.0, "b": 200.0, "c": seconds_of_c}
            threads = [concurrency.thread(ask, name, name, number, seconds[name]) for name in "abc"]
            for thread in threads:
                thread.start()
                world.sleep(0.2)
            for thread in threads:
                thread.join(300)

        for name in "abc":
            replicas[name].beat(concurrency.now() + 5)
        step(0, 200.0)
        step(1, 200.0)
        cut_until[1] = 1.0
        step(2, 3.0)
        assert took.keys() == {"a", "b"}
        assert max(took.values()) < 10
        for replica in replicas.values():
            replica.leave(1)

    play(scenario, 0)
