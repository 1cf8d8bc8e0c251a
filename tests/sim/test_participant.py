"""The Participant under accidents, with a small use: what is asked is answered, or the caller hears why it is not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from members import Door
from rolls import Called, Caller, RollRecord
from virtual import DELIVERED, LOST_ANSWER, LOST_REQUEST, Call, Fate, MemoryClient, flaky
from worlds import PREFIX, TTL, World, simulated

from ftcoord import concurrency
from ftcoord.core.verdict import Standing
from ftcoord.errors import ClientClosed, EtcdError, ThreadFailed, ThreadNotStarted
from ftcoord.etcd.api import Span, TxnResult
from ftcoord.primitives.group.group import Group
from ftcoord.primitives.group.membership import Left
from ftcoord.primitives.group.pace import Look, UntilDeadline
from ftcoord.primitives.group.participant import KEY_CHECK_INTERVAL, KEY_CHECKS_PER_SECOND
from ftcoord.primitives.session import Session

PROMPT = 2.0
"""Virtual seconds within which a call that was ended has ended."""


def pace(timeout: float | None = 60.0) -> UntilDeadline[RollRecord, Called]:
    return UntilDeadline(timeout, "the roll")


class InACrowd(UntilDeadline[RollRecord, Called]):
    crowd = 1500


class Asking:
    """A call of a participant on a thread of its own."""

    def __init__(
        self,
        caller: Caller,
        timeout: float | None = 60.0,
        begin_in: float = 0.0,
        after: concurrency.Event | None = None,
    ) -> None:
        self.look: Look[RollRecord, Called] | None = None
        self.error: Exception | None = None
        self.ended_at = 0.0
        self._caller, self._timeout, self._begin_in, self._after = caller, timeout, begin_in, after
        self._thread = concurrency.thread(self._ask, "asking")
        self._thread.start()

    def _ask(self) -> None:
        self._after.wait() if self._after else concurrency.event().wait(self._begin_in)
        try:
            self.look = self._caller.participant.ask(Called("here"), pace(self._timeout))
        except Exception as error:
            self.error = error
        self.ended_at = concurrency.now()

    def end(self, timeout: float = 120.0) -> Asking:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call still waits"
        return self


def caller(world: World, name: str, client: MemoryClient | None = None, **how: Any) -> Caller:
    with world.scheduler.process(name):
        return Caller(client or world.etcd.client(), PREFIX, TTL, **how)


def members(world: World) -> dict[str, bytes]:
    return world.keys(f"{PREFIX}/members/")


def check_answered(caller: Caller, look: Look[RollRecord, Called]) -> None:
    assert look.standing is Standing.ANSWERED
    assert look.record is not None
    said = [text for member, text in look.record.members.items() if caller.participant.was(member)]
    assert any(int(text.rpartition("/")[2]) >= look.ask.number for text in said)


# -- answers and leases that are lost ---------------------------------------------------------------------------------


@simulated
def test_answers_that_are_lost_while_it_asks(world: World) -> None:
    def client(number: int) -> MemoryClient:
        chances = {"refused": 0.05, "lost_requests": 0.1, "lost_answers": 0.15, "late": 0.05, "delay": 0.02}
        return world.etcd.client(flaky(10 * world.seed + number, **chances))

    group = [caller(world, f"p{number}", client(number)) for number in range(3)]
    for one in group * 3:
        check_answered(one, one.participant.ask(Called("here"), pace()))
    world.check_one_history()


def loses_its_lease(world: World, renews: bool) -> None:
    """At some moment: before it joins, while it waits, when it is answered, or after."""
    mine, other = caller(world, "mine", enough=2, renews=renews), caller(world, "other", enough=2)
    mine.participant.prepare()
    asking = Asking(mine)
    world.sleep(random.choice((0, random.uniform(0, 0.005), 0.5)))
    second = Asking(other)
    world.sleep(random.choice((0, random.uniform(0, 0.005), 0.5)))
    lost = mine.participant.lease
    world.etcd.expire(lost)
    asking.end()
    assert asking.error is None
    assert asking.look is not None
    if renews or asking.look.standing is not Standing.LOST:
        check_answered(mine, asking.look)
    check_answered(mine, mine.participant.ask(Called("again"), pace())) if renews else ask_until_answered(mine)
    assert second.end().error is None
    world.check_one_history()


def ask_until_answered(caller: Caller) -> None:
    while (look := caller.participant.ask(Called("again"), pace())).standing is Standing.LOST:
        pass
    check_answered(caller, look)


@simulated
def test_a_lease_that_is_lost_at_any_moment_is_replaced(world: World) -> None:
    loses_its_lease(world, renews=True)


@simulated
def test_a_lease_that_is_lost_at_any_moment_is_told(world: World) -> None:
    loses_its_lease(world, renews=False)


class Losing(Door):
    """Whoever writes through it has lost its membership by then."""

    lose: Callable[[], object] = staticmethod(lambda: None)

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        result = self.real.txn(*args, **kwargs)
        self.lose()
        return result


@simulated
def test_a_lease_that_is_lost_again_and_again_does_not_outlast_the_deadline(world: World) -> None:
    door = Losing(world.etcd.client())
    one = Caller(door, PREFIX, TTL, enough=2)
    asking = Asking(one, timeout=0.2)

    lost = set[str]()

    def lose() -> None:
        if one.participant.member is not None:
            lost.add(one.participant.member.id)
            one.participant.member.orphan()

    door.lose = lose  # type: ignore[method-assign]
    assert isinstance(asking.end(30).error, TimeoutError)
    assert len(lost) > 10
    assert asking.ended_at < 0.2 + PROMPT


@simulated
def test_a_key_that_is_deleted_while_it_waits_is_put_back(world: World) -> None:
    """Also that of a member that is not the decider, and so sees nothing of its own key."""
    first, second = caller(world, "first", enough=3), caller(world, "second", enough=3)
    waiting = [Asking(first)]
    world.until(lambda: len(members(world)) == 1, "the first one waits")
    waiting.append(Asking(second))
    world.until(lambda: len(members(world)) == 2, "both wait")
    member = second.participant.member
    assert member is not None
    world.observer.delete(Span(member.group.key))
    world.until(lambda: member.group.key in members(world), "it is back", KEY_CHECK_INTERVAL + PROMPT)
    waiting.append(Asking(caller(world, "third", enough=3)))
    for asking in waiting:
        assert asking.end().error is None


@simulated
def test_of_many_that_wait_each_looks_at_its_key_more_seldom(world: World) -> None:
    """Ten thousand that look every ten seconds would keep etcd busy with nothing else."""
    waits = caller(world, "waits", enough=3)
    asking = concurrency.thread(
        lambda: waits.participant.ask(Called("here"), InACrowd(None, "the roll")), "asking in a crowd"
    )
    other = Asking(caller(world, "other", enough=3))
    world.until(lambda: len(members(world)) == 1, "somebody decides")
    asking.start()
    world.until(lambda: len(members(world)) == 2, "it waits")
    member = waits.participant.member
    assert member is not None
    world.observer.delete(Span(member.group.key))
    seldom = InACrowd.crowd / KEY_CHECKS_PER_SECOND
    world.sleep(seldom - PROMPT)
    assert member.group.key not in members(world)
    world.until(lambda: member.group.key in members(world), "it is back", 2 * PROMPT)
    assert Asking(caller(world, "third", enough=3)).end().error is None
    assert other.end().error is None
    asking.join()


@simulated
def test_who_gives_up_does_not_ask_though_its_join_was_not_answered(world: World) -> None:
    client = world.etcd.client(lambda call: LOST_ANSWER if call.writes else DELIVERED)
    one = caller(world, "one", client)
    with pytest.raises(EtcdError):
        one.participant.ask(Called("here"), pace(1.0))
    assert members(world), "it was made"
    client.fate = lambda call: DELIVERED
    assert not one.participant.withdraw(Called("nothing"))
    assert not members(world)
    assert Asking(one).end().error is None


@simulated
def test_a_member_without_a_thread_is_none(world: World) -> None:
    one = caller(world, "one")
    one.participant.prepare()
    member = one.participant.member
    assert member is not None
    with (
        mock.patch.object(
            member.group._thread, "start", side_effect=ThreadNotStarted("it", RuntimeError("no threads"))
        ),
        pytest.raises(ThreadNotStarted),
    ):
        one.participant.ask(Called("here"), pace())
    assert not members(world)
    assert Asking(one).end().error is None


# -- several calls ----------------------------------------------------------------------------------------------------


@simulated
def test_of_two_calls_one_gives_up(world: World) -> None:
    """The other one's request stays, until the last one gives up."""
    one = caller(world, "one", enough=2)

    def gives_up() -> None:
        with contextlib.suppress(TimeoutError):
            one.participant.ask(Called("briefly"), pace(random.uniform(0, 0.1)))
        one.participant.withdraw(Called("nothing"))

    threads = [concurrency.thread(gives_up, "gives up") for _ in range(2)]
    patient = Asking(one, begin_in=random.uniform(0, 0.1))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.sleep(1)
    assert [text.partition(b"/")[0] for text in members(world).values()] != [b"nothing"]
    two = Asking(caller(world, "two", enough=2))
    assert patient.end().look is not None, patient.error
    check_answered(one, patient.look)  # type: ignore[arg-type]
    assert two.end().error is None


@simulated
def test_calls_whose_callers_went_away_before_their_turn_write_nothing(world: World) -> None:
    """Else one broken caller of a gateway has it write for each of its calls, and all other replicas wait for that."""
    etcd = world.etcd.client()
    one = caller(world, "one", etcd, enough=2)
    one.participant.touch(Called("beats"), concurrency.now() + 60, by_writing=False)
    etcd.fate = lambda call: Fate(arrives=1.0) if call.writes else DELIVERED
    patient = Asking(one)
    world.sleep(0.1)  # it has the turn, until its write has arrived
    late = [pace() for _ in range(20)]
    errors = list[str]()

    def ask(its_pace: UntilDeadline[RollRecord, Called]) -> None:
        with pytest.raises(TimeoutError) as info:
            one.participant.ask(Called("late"), its_pace)
        errors.append(str(info.value))

    threads = [concurrency.thread(ask, "late", its_pace) for its_pace in late]
    for thread in threads:
        thread.start()
    world.sleep(0.5)
    for its_pace in late:
        its_pace.gone.set()
    for thread in threads:
        thread.join(5)
    assert errors == ["the caller went away"] * len(late)
    assert [*members(world).values()] == [b"here/2"]
    assert Asking(caller(world, "two", enough=2)).end().error is None
    assert patient.end().error is None


@simulated
def test_a_request_that_comes_while_another_is_being_withdrawn_stays(world: World) -> None:
    """Both wait for a third call to let go of the key, whichever of them gets it first."""
    client = world.etcd.client(lambda call: Fate(answers=1.0) if call.method == "renew" else DELIVERED)
    one = caller(world, "one", client, enough=2)
    assert isinstance(Asking(one, timeout=0.1).end().error, TimeoutError)
    withdrawn: list[bool] = []
    until = concurrency.now() + TTL
    touches = concurrency.thread(lambda: one.participant.touch(Called("none"), until, by_writing=False), "touches")
    withdraws = concurrency.thread(lambda: withdrawn.append(one.participant.withdraw(Called("none"), 5.0)), "withdraws")
    touches.start()
    world.sleep(0.2)
    withdraws.start()
    world.sleep(0.2)
    patient = Asking(one)
    for thread in (touches, withdraws):
        thread.join()
    assert withdrawn == [False]
    assert Asking(caller(world, "two", enough=2)).end().error is None
    assert patient.end().error is None


def test_a_lease_is_renewed_for_as_long_as_any_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the call before it ends at the moment at which this one begins, and lets the lease rest."""
    rest = Session.rest

    def rest_late(session: Session) -> None:
        concurrency.event().wait(0.01)  # its thread is not run for a moment
        rest(session)

    monkeypatch.setattr(Session, "rest", rest_late)

    @simulated
    def play(world: World) -> None:
        one = caller(world, "one", enough=2, keeps_lease=False)
        first = Asking(one, timeout=0.5)
        second = Asking(one, timeout=3 * TTL, after=one.use.nobody_asked)
        first.end()
        there = members(world).keys()
        assert len(there) == 1
        for _ in range(2 * TTL):
            world.sleep(1)
            assert members(world).keys() == there
        assert isinstance(second.end().error, TimeoutError)

    play()


@simulated
def test_a_lease_that_nobody_needs_expires(world: World) -> None:
    one = caller(world, "one", enough=2, keeps_lease=False)
    Asking(one, timeout=0.5).end()
    assert members(world)
    world.sleep(2 * TTL)
    assert not members(world)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leave", "orphan"])
def test_stopped_while_another_thread_asks(how: str) -> None:
    @simulated
    def play(world: World) -> None:
        one = caller(world, "one", enough=2)
        asking = Asking(one, timeout=None, begin_in=random.choice((0, random.uniform(0, 0.03))))
        world.sleep(random.choice((0, random.uniform(0, 0.06))))
        stopped_at = concurrency.now()
        one.participant.stop()
        one.participant.leave(1) if how == "leave" else one.participant.orphan()
        asking.end()
        assert isinstance(asking.error, Left)
        assert asking.ended_at < stopped_at + PROMPT
        if how == "orphan":
            world.sleep(2 * TTL)
        assert not members(world)
        with pytest.raises(Left):
            one.participant.ask(Called("again"), pace())

    play()


@simulated
def test_left_while_another_thread_asks(world: World) -> None:
    """Without `stop()` a call that had not joined yet may join again; it is never left waiting for nobody."""
    one = caller(world, "one", enough=2)
    asking = Asking(one, timeout=20, begin_in=random.choice((0, random.uniform(0, 0.01))))
    world.sleep(random.choice((0, random.uniform(0, 0.02))))
    one.participant.leave(1)
    world.sleep(1)
    assert one.participant.joined or isinstance(asking.error, Left)
    two = Asking(caller(world, "two", enough=2), timeout=20)
    if asking.end().error is None:
        check_answered(one, asking.look)  # type: ignore[arg-type]
    else:
        assert isinstance(asking.error, Left)
        again = Asking(one)
        assert again.end().error is None
    assert two.end().error is None


@simulated
def test_stopped_while_etcd_is_away(world: World) -> None:
    """Whatever it was doing then: it does not go on until its deadline."""
    one = caller(world, "one", enough=2)
    if world.seed % 2:
        one.participant.prepare()
    with world.etcd.outage():
        asking = Asking(one, timeout=None)
        world.sleep(random.uniform(0, 20))
        stopped_at = concurrency.now()
        one.participant.stop()
        asking.end(60)
        assert isinstance(asking.error, Left)
        assert asking.ended_at < stopped_at + 2 * 5 + PROMPT, "no longer than the request under way"


@simulated
def test_a_client_that_is_closed_while_it_waits(world: World) -> None:
    """Nothing can answer any more: whoever waits hears of it, though no member of the group may ever change again."""
    client = world.etcd.client()
    first = Asking(caller(world, "first", enough=3))
    world.until(lambda: len(members(world)) == 1, "somebody decides")
    asking = Asking(caller(world, "one", client, enough=3), timeout=None)
    world.sleep(random.choice((0, random.uniform(0, 0.01), 5)))
    client.close()
    closed_at = concurrency.now()
    asking.end()
    assert isinstance(asking.error, (ClientClosed, EtcdError))
    assert asking.ended_at < closed_at + KEY_CHECK_INTERVAL + PROMPT
    assert isinstance(first.end().error, TimeoutError)


@pytest.fixture
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that fails as the test wants it ends; the scheduler would end the whole run with it."""
    run = Group._run

    def run_quietly(group: Group) -> None:
        with contextlib.suppress(MemoryError):
            run(group)

    monkeypatch.setattr(Group, "_run", run_quietly)


@pytest.mark.parametrize("renews", [True, False], ids=["renews", "does not renew"])
@pytest.mark.usefixtures("quiet_threads")
def test_a_thread_that_fails_is_told_to_whoever_asks(renews: bool) -> None:
    """And the next call works, under a new lease; the old one does not live on for nobody."""

    @simulated
    def play(world: World) -> None:
        one = caller(world, "one", renews=renews)
        if world.seed % 2:
            one.participant.ask(Called("before"), pace())
            world.sleep(0.5)  # until nothing is left to decide: what fails between two calls concerns nobody
        one.use.broken.append(MemoryError("made by the test"))
        with pytest.raises(ThreadFailed, match="made by the test"):
            one.participant.ask(Called("here"), pace())
        failed = members(world)
        check_answered(one, one.participant.ask(Called("again"), pace()))
        assert len(members(world)) == 1
        assert not failed.keys() & members(world).keys()

    play()


@pytest.mark.usefixtures("quiet_threads")
def test_a_participant_whose_thread_failed_leaves_at_once() -> None:
    @simulated
    def play(world: World) -> None:
        one = caller(world, "one")
        one.use.broken.append(MemoryError("made by the test"))
        with pytest.raises(ThreadFailed):
            one.participant.ask(Called("here"), pace())
        one.participant.leave(1)
        assert not members(world)

    play()


@pytest.mark.usefixtures("quiet_threads")
def test_a_member_that_fails_at_a_record_is_lost_whichever_thread_read_it() -> None:
    """Mostly the watch's, which serves others too and goes on."""

    @simulated
    def play(world: World) -> None:
        first = Asking(caller(world, "one", enough=2))
        world.until(lambda: members(world), "the first one is there")
        two = caller(world, "two", enough=2)
        with mock.patch.object(two.use, "parse", side_effect=MemoryError("made by the test")):
            assert isinstance(Asking(two).end().error, ThreadFailed)
        assert first.end().error is None

    play()


@simulated
def test_no_lease_is_left_of_a_member_that_was_made_while_its_participant_was_stopped(world: World) -> None:
    """etcd takes two seconds for the grant, and whoever stops does not wait for it."""

    def fate(call: Call) -> Fate:
        return Fate(arrives=1.0, answers=1.0) if call.method == "grant" else DELIVERED

    one = caller(world, "one", world.etcd.client(fate))
    asking = Asking(one)
    world.sleep(random.uniform(0, 1.9))
    one.participant.stop()
    one.participant.leave(1.0)
    assert isinstance(asking.end().error, Left)
    world.sleep(3 * TTL)
    assert not world.etcd.leases


# -- writes that fail, and deciders that are stuck ---------------------------------------------------------------------


@simulated
def test_a_write_that_fails_is_made_again(world: World) -> None:
    fates: list[Callable[[], Fate]] = []

    def fate(call: Call) -> Fate:
        return fates.pop()() if call.writes and call.method == "txn" and fates else Fate()

    one = caller(world, "one", world.etcd.client(fate))
    check_answered(one, one.participant.ask(Called("joins"), pace()))
    for _ in range(3):
        kind = random.choice((LOST_REQUEST, LOST_ANSWER, Fate(arrives=3.0, breaks=0)))
        fates.extend([lambda kind=kind: kind] * random.randint(1, 3))
        began = world.scheduler.time
        check_answered(one, one.participant.ask(Called("writes"), pace()))
        assert world.scheduler.time - began < 20
    world.check_one_history()


@simulated
def test_whoever_takes_over_from_a_decider_that_is_stuck(world: World) -> None:
    with world.scheduler.process("stuck"):  # all its threads are of that process then
        stuck = Caller(world.etcd.client(), PREFIX, 600)
        stuck.participant.ask(Called("here"), pace())
    with world.scheduler.process("other"):
        other = Caller(world.etcd.client(), PREFIX, 600)
    world.scheduler.pause("stuck")
    asking = Asking(other, timeout=300)
    world.sleep(20)
    assert asking.look is None
    judged: list[float | None] = []
    other.participant.take_over(judged.append)
    world.until(lambda: asking.look is not None, "it decides itself", 5)
    world.until(lambda: judged == [None], "nothing is to be decided any more", 1)
    world.scheduler.resume("stuck")
    check_answered(stuck, stuck.participant.ask(Called("again"), pace()))
    check_answered(other, other.participant.ask(Called("again"), pace()))
    world.check_one_history()
