"""Both ends of the ask port in virtual time: what silent, closed and wrong connections cost, and a lost answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import builders
import pytest
from virtual import DELIVERED, LOST_ANSWER, LOST_REQUEST, REFUSED, Call, Fate, Scheduler
from worlds import World, play

from ftcoord import concurrency
from ftcoord.coordination import asks
from ftcoord.coordination.address import Job
from ftcoord.coordination.asks import AskDesk, AskLine
from ftcoord.coordination.policy import parse_quorum
from ftcoord.coordination.replica import Replica
from ftcoord.core.asks import BY_KEY_AFTER, Ask
from ftcoord.core.layout import decided_key
from ftcoord.core.office import OfficeRecord
from ftcoord.etcd.api import Put

JOB = Job("etcd", "", "trio", min_replicas=2, join_timeout_ms=60_000, heartbeat_timeout_ms=30_000)
KEY = "ab" * 16


class NoPort:
    """In place of a port to which nobody connects."""

    is_quiet = True

    def __init__(self, *_given: object, **_named: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "listen_for", lambda _job: (object(), "127.0.0.1:1"))
    monkeypatch.setattr(asks, "stop_listening", lambda _listener: None)
    monkeypatch.setattr(asks, "Port", NoPort)


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


@pytest.mark.parametrize("what", [{"step": -(2**63)}, {"world_size": 2**63}])
def test_an_ask_that_nobody_could_read_goes_by_key_and_leaves_the_others(what: dict[str, int]) -> None:
    def scenario(world: Scheduler) -> None:
        line, desk = both_ends()
        assert not line.ask(Caller(), ask_of("m2", **what))
        world.sleep(1)
        assert desk.asks({"m1", "m2"}, 10).keys() == {"m1"}
        desk.close()
        line.close()

    in_virtual_time(scenario)


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

    monkeypatch.setattr(asks, "Line", Closing)

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
