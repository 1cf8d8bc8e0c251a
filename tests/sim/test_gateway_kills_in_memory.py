"""Orders that a gateway hands on to managers which take their time, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from replicas_in_memory import PREFIX, join
from virtual import Fate, MemoryClient
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination import gateway_kills
from ftcoord.coordination.address import Job
from ftcoord.coordination.gateway_kills import HAND_ON_TIMEOUT, GatewayKills
from ftcoord.coordination.gateway_sessions import GatewaySessions
from ftcoord.coordination.kills import order_kill
from ftcoord.coordination.pending_call import PendingCall
from ftcoord.core.layout import member_id
from ftcoord.core.quorum_records import QuorumRequest

LONG = 60.0
"""Seconds, virtual: nobody waits so long in vain."""
WAIT = 3.0
JOB = Job("etcd", "", "job", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=30_000)
REFUSED = "it listens to nobody"


class Behind:
    """A gateway's replicas, and the orders that it hands on to their managers, which obey."""

    def __init__(self, world: World) -> None:
        client = world.etcd.client()
        self.handed_on: list[str] = []
        self._kills = GatewayKills(client, JOB.prefix, lambda member: self.sessions.manager_of(member))
        self.sessions = GatewaySessions(client, JOB, lambda _peers: (), self._kills.look_again)

    def __enter__(self) -> Behind:
        self._patch = mock.patch.object(gateway_kills, "_kill", self._kill)
        self._patch.start()
        self._kills.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self._kills.close()
        self.sessions.close()
        self._patch.stop()

    def beat(self, name: str) -> None:
        self.sessions.beat(name, "peer", concurrency.now() + LONG)

    def ask(self, name: str) -> None:
        request = QuorumRequest(name, f"http://{name}:1", "", 1, 1, False, "", 0, ())
        self.sessions.ask(request, "ipv4:10.0.0.1:1", concurrency.now() + LONG, PendingCall())

    def _kill(self, address: str, _message: str, _deadline: float) -> str:
        self.handed_on.append(address)
        return ""


@simulated
def test_a_replica_that_only_beats_is_found_by_the_last_quorum(world: World) -> None:
    """It hangs in its step, and its gateway was started again since it asked."""
    with Behind(world) as before:
        before.ask("a")
    with Behind(world) as gateway:
        gateway.beat("b")
        gateway.beat("a")
        assert order_kill(world.observer, JOB.prefix, "a", "why", concurrency.now() + WAIT)
        assert gateway.handed_on == ["http://a:1"]
        with pytest.raises(TimeoutError, match="not taken"):
            order_kill(world.observer, JOB.prefix, "b", "why", concurrency.now() + WAIT)


@simulated
def test_an_order_is_handed_on_as_soon_as_its_manager_is_known(world: World) -> None:
    """A new replica is ordered to end before it has asked for the first time."""
    told: list[bool] = []
    with Behind(world) as gateway:
        gateway.beat("a")

        def give() -> None:
            told.append(order_kill(world.observer, JOB.prefix, "a", "why", concurrency.now() + LONG))

        concurrency.thread(give, "giver").start()
        world.until(lambda: world.keys(f"{JOB.prefix}/kill/"), "it is ordered")
        world.sleep(1)
        assert not gateway.handed_on
        gateway.ask("a")
        world.until(lambda: told, "the giver is told", WAIT)
    assert told == [True]
    assert gateway.handed_on == ["http://a:1"]


class Managers:
    """Those of replicas a, b, c, ..., all behind one gateway, which hands on `threads` orders at a time.

    Args:
        answer: what becomes of an order, by the replica's name: why it is not obeyed, or empty.
    """

    def __init__(self, world: World, names: str, answer: Callable[[str, float], str]) -> None:
        self._world, self._answer = world, answer
        self.names = {member_id(join(world.observer, name)): name for name in names}
        self.handed_on: list[str] = []
        self.told: dict[str, bool | str] = {}

    @contextmanager
    def behind(self, client: MemoryClient, threads: int) -> Iterator[GatewayKills]:
        with (
            mock.patch.object(gateway_kills, "_kill", self._kill),
            mock.patch.object(gateway_kills, "THREADS", threads),
            GatewayKills(client, PREFIX, self.names.get) as kills,
        ):
            kills.begin()
            yield kills

    def order(self, name: str, wait: float = LONG) -> None:
        """Somebody orders that one ends; `told` says what they hear."""
        client = self._world.etcd.client()

        def give() -> None:
            try:
                self.told[name] = order_kill(client, PREFIX, name, "why", concurrency.now() + wait)
            except TimeoutError as error:
                self.told[name] = str(error)

        concurrency.thread(give, f"giver of {name}").start()

    def _kill(self, name: str, _message: str, deadline: float) -> str:
        self.handed_on.append(name)
        return self._answer(name, deadline)


@simulated
def test_what_a_giver_is_told_is_what_became_of_the_order(world: World) -> None:
    """Managers take their time or refuse, orders queue behind each other, and givers give up at any moment."""
    chance, ended = random.Random(world.seed), list[str]()

    def answer(name: str, deadline: float) -> str:
        world.sleep(min(chance.uniform(0, 3), deadline - concurrency.now()))
        if chance.random() < 0.3:
            return REFUSED
        ended.append(name)
        return ""

    managers = Managers(world, "abcdef", answer)
    client = world.etcd.client(lambda _call: Fate(chance.uniform(0, 0.1), chance.uniform(0, 0.1)))
    with managers.behind(client, threads=2):
        for name in "abcdef":
            managers.order(name, chance.uniform(0, 6))
        world.until(lambda: len(managers.told) == 6, "all givers are told")
        world.sleep(LONG)
    for name, told in managers.told.items():
        if told is True:
            assert name in ended
        else:
            assert ("handed the order on" in str(told)) == (name in managers.handed_on), told
    assert len(managers.handed_on) == len(set(managers.handed_on))


@simulated
def test_an_order_that_waited_too_long_is_not_handed_on(world: World) -> None:
    """Its time runs from when it came, not from when a thread is free for it."""
    deadlines: list[float] = []

    def answer(_name: str, deadline: float) -> str:
        deadlines.append(deadline)
        world.sleep(deadline + 1 - concurrency.now())
        return REFUSED

    managers = Managers(world, "ab", answer)
    with managers.behind(world.etcd.client(), threads=1):
        before = concurrency.now()
        managers.order("a")
        managers.order("b")
        world.until(lambda: len(managers.told) == 2, "both givers are told")
    assert before <= deadlines[0] - HAND_ON_TIMEOUT <= before + 0.1
    (first,) = managers.handed_on
    assert "handed the order on" in str(managers.told.pop(first))
    assert "not taken" in str([*managers.told.values()])


@simulated
def test_a_replica_that_is_gone_while_its_order_is_handed_on_counts_as_killed_when_that_is_known(world: World) -> None:
    """Its connection ends with its process, which the gateway may notice first."""
    lease = join(world.observer, "a")

    def answer(_name: str, _deadline: float) -> str:
        world.observer.revoke(lease)
        world.sleep(1)
        return ""

    managers = Managers(world, "", answer)
    managers.names[member_id(lease)] = "a"
    with managers.behind(world.etcd.client(), threads=1):
        managers.order("a")
        world.until(lambda: managers.told, "the giver is told")
    assert managers.told == {"a": True}


@simulated
def test_closing_a_gateway_hands_on_nothing_that_is_queued(world: World) -> None:
    def answer(_name: str, deadline: float) -> str:
        world.sleep(deadline - concurrency.now())
        return REFUSED

    managers = Managers(world, "abcdefgh", answer)
    with managers.behind(world.etcd.client(), threads=1) as kills:
        for name in "abcdefgh":
            managers.order(name, 20)
        world.until(lambda: len(kills._seen) == 8, "all of them came")
        before = concurrency.now()
        kills.close()
        assert concurrency.now() - before <= HAND_ON_TIMEOUT
        assert len(managers.handed_on) <= 1
    world.until(lambda: len(managers.told) == 8, "all givers are told")
    assert sum("not taken" in str(told) for told in managers.told.values()) >= 7


@simulated
def test_a_gateway_forgets_orders_that_are_gone(world: World) -> None:
    managers = Managers(world, "abc", lambda _name, _deadline: "")
    with managers.behind(world.etcd.client(), threads=1) as kills:
        for name in "abc":
            managers.order(name)
        world.until(lambda: managers.told == dict.fromkeys("abc", True), "all are obeyed")
        world.until(lambda: not kills._seen, "nothing of them is kept")
