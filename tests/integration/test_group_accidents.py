"""Groups whose members fail in ways that nobody foresaw, and whose etcd loses what it had decided."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accidents import Rewinding, cut_off
from helpers import DEADLINE, eventually
from members import CALL_TIMEOUT, Door, Node, Roll

from ftcoord.core.lease import SessionState
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import Batch, Began, Span, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group import group as group_module
from ftcoord.primitives.group.group import Group
from ftcoord.primitives.group.membership import Membership
from ftcoord.primitives.group.policy import View
from ftcoord.primitives.session import Session

LIMIT = TimeLimit(CALL_TIMEOUT)


@pytest.fixture
def node(client: EtcdClient, prefix: str) -> Iterator[Callable[..., Node]]:
    """`node(etcd=client)`: a new member, which leaves in the end."""
    with contextlib.ExitStack() as stack:

        def make(etcd: Any = client, **more: Any) -> Node:
            made = Node(etcd, prefix, **more)
            stack.callback(made.leave)
            return made

        yield make


@pytest.fixture
def rewinding(tmp_path: Path) -> Iterator[Rewinding]:
    rewinding = Rewinding(tmp_path / "data")
    with rewinding.server:
        yield rewinding


# -- members that fail ------------------------------------------------------------------------------------------------


class Broken(Roll):
    """Fails at its first decision."""

    def decide(self, view: View, me: str, now: float) -> Publish | Wait:
        raise MemoryError("of the test")


def parse(key: str, value: bytes, roster: bytes | None) -> bytes:
    if value == b"junk":
        raise StateError(key, "is junk")
    return value


@contextlib.contextmanager
def membership(
    client: EtcdClient, prefix: str, policy: Roll, ttl: int = 60
) -> Iterator[tuple[Membership[bytes], threading.Condition]]:
    changed = threading.Condition()
    member = Membership(client, prefix, policy, parse, changed, ttl=ttl, record_ttl=60, within=LIMIT)
    yield member, changed
    member.leave(CALL_TIMEOUT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_whose_thread_fails_is_told(
    client: EtcdClient, prefix: str, node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    """And is no member any more, so that others go on without it."""
    with membership(client, prefix, Broken(prefix), ttl=2) as (member, changed):
        member.enter(b"1", LIMIT)
        with changed:
            assert changed.wait_for(lambda: member.lost, DEADLINE)
        assert "its thread failed" in caplog.text
        assert "MemoryError: of the test" in caplog.text
        other = node()
        assert other.sees(other)["by"] == other.id
        assert member.session.state is not SessionState.CONNECTED


def test_a_member_whose_lease_is_gone_hears_of_it_at_once(client: EtcdClient, prefix: str) -> None:
    """Where it finds that out by itself: its lease is due for renewal only after minutes."""
    with membership(client, prefix, Roll(prefix), ttl=1200) as (member, changed):
        member.enter(b"1", LIMIT)
        client.revoke(member.session.lease_id)
        member.group.check()
        with changed:
            assert changed.wait_for(lambda: member.lost, DEADLINE)
            assert member.failure is None


def test_a_member_without_a_thread_is_none(
    client: EtcdClient, prefix: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process may start no more of them. It can be tried again."""
    with Session(client, 60) as session:
        heard = threading.Event()
        group = Group(client, session, prefix, Roll(prefix), 60, lambda kv, roster: heard.set())

        def refuse() -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(group._thread, "start", refuse)
            with pytest.raises(RuntimeError):
                group.enter(b"1", LIMIT)
        assert not group.entered
        group.enter(b"2", LIMIT)
        assert group.entered
        assert heard.wait(DEADLINE)
        other = node()
        other.hears(lambda roll: roll["members"].get(group.id) == "2")
        group.close()


def test_a_decider_decides_however_much_it_hears(client: EtcdClient, prefix: str) -> None:
    with Session(client, 60) as session:
        group = Group(client, session, prefix, Roll(prefix), 60, lambda kv, roster: None)

        class Endless(queue.SimpleQueue[Any]):
            taken = 0

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                self.taken += 1
                assert self.taken <= group_module.CHANGES_PER_STEP, "it takes and takes"
                return lambda: None

        group._inbox = endless = Endless()
        group._take(None)
        assert endless.taken == group_module.CHANGES_PER_STEP


def test_an_unreadable_record_does_not_hide_what_was_decided_before(client: EtcdClient, prefix: str) -> None:
    key = f"{prefix}/decided"
    with membership(client, prefix, Roll(prefix)) as (member, changed):
        member.enter(b"1", LIMIT)
        with changed:
            assert changed.wait_for(lambda: member.record is not None, DEADLINE)
        record, lease = member.record, member.record_lease
        assert lease
        client.put(key, b"junk", lease)
        with changed:
            assert changed.wait_for(lambda: member.problem is not None, DEADLINE)
        assert (member.record, member.record_lease) == (record, lease)


class Late(Door):
    """Tells of what happens to a key only when it is told to, as a busy thread does."""

    def __init__(self, real: EtcdClient) -> None:
        super().__init__(real)
        self.key = ""
        self.heard: queue.Queue[Callable[[], None]] = queue.Queue()
        """What is to be told."""

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        def late(item: WatchItem) -> None:
            if span.start == self.key and isinstance(item, Batch):
                self.heard.put(lambda: deliver(item))
            else:
                deliver(item)

        return self.real.watch(span, start_revision, late, **how)


def test_members_do_not_follow_each_other_in_a_circle(client: EtcdClient, node: Callable[..., Node]) -> None:
    """The second's key is deleted and put back, so that it is the newest when the third hears of the deletion."""
    door = Late(client)
    first, second = node(), node()
    door.key = second.group.key
    third = node(door)
    third.sees(first, second, third)
    client.delete(Span(second.group.key))
    second.group.check()
    eventually(lambda: client.get(second.group.key).one, "its key is back")
    door.heard.get(timeout=DEADLINE)()
    first.leave()
    assert third.sees(second, third)["by"] in (second.id, third.id)


# -- an etcd that loses what was decided ------------------------------------------------------------------------------


class NeverAgain(Door):
    """Does not tell when a watch stands again, as to one who came to share it while it was down."""

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        told = threading.Event()

        def once(item: WatchItem) -> None:
            if not (isinstance(item, Began) and told.is_set()):
                deliver(item)
            if isinstance(item, Began):
                told.set()

        return self.real.watch(span, start_revision, once, **how)


def decide(client: EtcdClient, node: Node, number: int) -> int:
    """What is decided next, by somebody: the roll of before under this number. The revision."""
    record = {**node.rolls[-1], "number": number}
    lease = client.get("/g/decided").one
    assert lease is not None
    return client.put("/g/decided", json.dumps(record).encode(), lease.lease).revision


@pytest.mark.parametrize("door", [Door, NeverAgain], ids=["told of the interruption", "not told"])
def test_a_decider_finds_out_that_a_decision_was_lost(rewinding: Rewinding, door: Callable[[Any], Any]) -> None:
    """Somebody wrote before it was back, so that etcd's revision does not tell it; and its watch may not either."""
    with contextlib.ExitStack() as stack:
        client, other = (stack.enter_context(rewinding.server.get_client()) for _ in range(2))
        first = Node(door(client), "/g", ttl=60, record_ttl=60)
        stack.callback(first.leave)
        first.sees(first)
        rewinding.remember()
        lost = decide(other, first, 50)
        first.hears(lambda roll: roll["number"] == 50)
        with cut_off(client):
            rewinding.lose()
            rewinding.server.restart()
            while other.put("/elsewhere", b"").revision < lost:
                pass
        second = Node(other, "/g", ttl=60, record_ttl=60)
        stack.callback(second.leave)
        for node in (first, second):
            node.sees(first, second)


def test_another_decision_with_the_revision_of_a_lost_one_is_heard(rewinding: Rewinding) -> None:
    with contextlib.ExitStack() as stack:
        client, other = (stack.enter_context(rewinding.server.get_client()) for _ in range(2))
        nodes = [Node(client, "/g", ttl=60, record_ttl=60) for _ in range(2)]
        for node in nodes:
            stack.callback(node.leave)
            node.sees(*nodes)
        rewinding.remember()
        lost = decide(other, nodes[0], 50)
        for node in nodes:
            node.hears(lambda roll: roll["number"] == 50)
        with cut_off(client):
            rewinding.lose()
            rewinding.server.restart()
            assert decide(other, nodes[0], 60) == lost
        for node in nodes:
            node.hears(lambda roll: roll["number"] == 60)
