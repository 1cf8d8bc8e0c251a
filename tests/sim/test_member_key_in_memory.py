"""What a member's later ask goes on from when the answer to an earlier one was lost: only from what is its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from members import CALL_TIMEOUT
from virtual import DELIVERED, LOST_ANSWER, LOST_REQUEST, Call, Fate, MemoryClient
from virtual.keyspace import Transaction
from worlds import PREFIX, TTL, World, simulated

from ftcoord import concurrency
from ftcoord.errors import LeaseLost, OutcomeUnknown
from ftcoord.etcd.api import KeyValue, Put, Span
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.member_key import MemberKey, MemberLost
from ftcoord.primitives.session import Session

TIMEOUT = 3.0
"""Seconds for each ask: long enough for some attempts, all of whose answers are lost."""


class Asking:
    """A member that asks, and whose writes may stay without an answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fate = DELIVERED
        self._overtakes: Callable[[], object] | None = None
        self._client: MemoryClient = world.etcd.client(self._of)
        self._session = Session(self._client, TTL)
        self.key = MemberKey(self._client, PREFIX, self._session)

    def ask(self, value: bytes) -> None:
        self.key.put(value, TimeLimit(TIMEOUT), ())

    def ask_in_vain(self, value: bytes, fate: Fate = LOST_ANSWER) -> None:
        """It does not learn whether that was written."""
        self._fate = fate
        with pytest.raises(OutcomeUnknown):
            self.ask(value)
        self._fate = DELIVERED

    def overtaken_by(self, somebody: Callable[[], object]) -> None:
        """Somebody does this right before its next write reaches etcd."""
        self._overtakes = somebody

    def is_refused(self, value: bytes) -> None:
        with pytest.raises(LeaseLost, match="somebody else wrote it: join again"):
            self.ask(value)

    @property
    def lease(self) -> int:
        return self._session.lease_id

    def stored(self) -> KeyValue | None:
        """The member's key, as etcd has it."""
        return self._world.observer.get(self.key.key).one

    def leave(self) -> None:
        self._session.close()

    def _of(self, call: Call) -> Fate:
        puts = call.asked.success if isinstance(call.asked, Transaction) else ()
        if not any(isinstance(op, Put) and op.key == self.key.key for op in puts):
            return DELIVERED
        overtakes, self._overtakes = self._overtakes, None
        if overtakes is not None:
            overtakes()
        return self._fate


def joined(world: World) -> Asking:
    member = Asking(world)
    member.ask(b"first")
    return member


def holds(member: Asking, value: bytes, version: int) -> None:
    """etcd has this value, the `version`-th, under the member's lease, and the member knows which revision that is."""
    stored = member.stored()
    assert stored is not None
    assert (stored.value, stored.lease, stored.version) == (value, member.lease, version)
    assert member.key.kv is not None
    assert member.key.kv.mod_revision == stored.mod_revision


@simulated
def test_a_later_ask_goes_on_from_an_earlier_one_whose_answer_was_lost(world: World) -> None:
    member = joined(world)
    member.ask_in_vain(b"second")
    stored = member.stored()
    assert stored is not None
    assert stored.value == b"second", "it did happen"
    member.ask(b"third")
    holds(member, b"third", 3)
    member.ask(b"fourth")
    holds(member, b"fourth", 4)
    member.leave()


@simulated
def test_who_joined_without_hearing_of_it_asks_again(world: World) -> None:
    member = Asking(world)
    member.ask_in_vain(b"first")
    assert member.key.kv is None
    member.ask(b"second")
    holds(member, b"second", 2)
    member.leave()


@simulated
def test_what_never_reached_etcd_is_not_gone_on_from(world: World) -> None:
    member = joined(world)
    member.ask_in_vain(b"second", LOST_REQUEST)
    member.ask(b"third")
    holds(member, b"third", 2)
    member.leave()


@simulated
def test_many_asks_in_a_row_are_not_answered(world: World) -> None:
    """Each finds what the one before it wrote, of which nobody was told."""
    member = joined(world)
    for number in range(3):
        member.ask_in_vain(b"in vain %d" % number)
    member.ask(b"last")
    stored = member.stored()
    assert stored is not None
    holds(member, b"last", stored.version)
    member.leave()


@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize("is_lost", [True, False])
def test_what_somebody_else_wrote_is_not_gone_on_from(is_joined: bool, is_lost: bool) -> None:
    """Under no lease or another one, before a member joined and later, also after an own ask was lost."""

    @simulated
    def scenario(world: World) -> None:
        for lease in (0, world.observer.grant(600).id):
            member = joined(world) if is_joined else Asking(world)
            if is_lost:
                member.ask_in_vain(b"lost")
            written = world.observer.put(member.key.key, b"a stranger's", lease).revision
            before = member.key.kv
            member.is_refused(b"next")
            stored = member.stored()
            assert stored is not None
            assert (stored.value, stored.mod_revision) == (b"a stranger's", written)
            assert member.key.kv == before
            member.leave()

    scenario()


@simulated
def test_who_finds_its_key_gone_after_a_lost_answer_is_told_to_join_again(world: World) -> None:
    member = joined(world)
    member.ask_in_vain(b"second")
    world.observer.delete(Span(member.key.key))
    member.is_refused(b"third")
    assert member.stored() is None
    member.leave()


@simulated
def test_a_member_of_a_group_stays_the_same_when_answers_to_its_ask_are_lost(world: World) -> None:
    """For longer than one ask takes: the next one is what the others hear of."""
    lost_until = 0.0

    def fate(call: Call) -> Fate:
        return LOST_ANSWER if call.writes and concurrency.now() < lost_until else DELIVERED

    member, other = world.host(fate), world.host()
    world.agree(member, other)
    lease = member.lease
    lost_until = concurrency.now() + 1.4 * CALL_TIMEOUT
    member.node.ask("again")
    assert member.lease == lease
    world.until(
        lambda: other.node.rolls[-1]["members"].get(member.node.id) == "again/2", "the others hear of the second ask"
    )
    world.agree(member, other)


def test_a_key_that_went_with_its_lease_alarms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A member that leaves finds its key gone too; only one that etcd lost is worth a warning."""

    @simulated
    def scenario(world: World) -> None:
        member = joined(world)
        world.observer.revoke(member.lease)
        with pytest.raises(MemberLost):
            member.key.restore()
        assert caplog.messages == []
        member.leave()

    scenario()


def test_a_key_that_etcd_lost_is_put_back_and_said(caplog: pytest.LogCaptureFixture) -> None:
    @simulated
    def scenario(world: World) -> None:
        caplog.clear()
        member = joined(world)
        world.observer.delete(Span(member.key.key))
        member.key.restore()
        holds(member, b"first", 1)
        assert [message.partition(":")[0] for message in caplog.messages] == [
            f"etcd had lost what member {member.key.id} asked for"
        ]
        member.leave()

    scenario()


@simulated
def test_a_backups_earlier_ask_is_not_taken_for_a_later_one(world: World) -> None:
    """Its revision is the higher one: it was written before a first restore, and what followed that is few writes."""
    member = joined(world)
    backup = world.etcd.snapshot()
    for _ in range(20):
        world.observer.put("/elsewhere", b"")
    member.ask(b"second")
    later_backup = world.etcd.snapshot()
    world.etcd.rewind(backup)
    member.ask(b"third")
    world.etcd.rewind(later_backup)
    stored = member.stored()
    assert stored is not None
    assert member.key.kv is not None
    assert (stored.value, stored.mod_revision > member.key.kv.mod_revision) == (b"second", True)
    member.key.restore()
    holds(member, b"third", 3)
    member.leave()


@simulated
def test_a_backup_of_what_a_member_asks_now_is_not_written_again(world: World) -> None:
    """Its revision is another one all the same, and the next ask goes on from that."""
    member = joined(world)
    backup = world.etcd.snapshot()
    member.ask(b"second")
    later_backup = world.etcd.snapshot()
    world.etcd.rewind(backup)
    world.observer.put("/elsewhere", b"")
    member.key.restore()
    holds(member, b"second", 2)
    world.etcd.rewind(later_backup)
    member.key.restore()
    assert world.etcd.revision == later_backup.keys.revision
    holds(member, b"second", 2)
    member.ask(b"third")
    holds(member, b"third", 3)
    member.leave()


@simulated
def test_an_ask_whose_answer_was_lost_is_not_taken_back(world: World) -> None:
    """Whoever looks at the key finds the later ask there, and leaves it."""
    member = joined(world)
    member.ask_in_vain(b"second")
    member.key.restore()
    holds(member, b"second", 2)
    member.leave()


@simulated
def test_what_somebody_writes_while_a_key_is_put_back_is_not_taken_for_its_own(world: World) -> None:
    member = joined(world)
    world.observer.delete(Span(member.key.key))
    member.overtaken_by(lambda: world.observer.put(member.key.key, b"a stranger's"))
    member.key.restore()
    assert member.key.kv is not None
    assert member.key.kv.value == b"first"
    member.key.restore()
    holds(member, b"first", 2)
    member.leave()
