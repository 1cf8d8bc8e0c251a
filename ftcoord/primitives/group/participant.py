"""Somebody who takes part in a group: asks, and awaits what answers, across lost answers and lost leases."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, Generic, TypeVar

from ftcoord import concurrency
from ftcoord.core.death_records import Death, encode
from ftcoord.core.layout import death_key
from ftcoord.core.verdict import Next, Outlook, Standing
from ftcoord.errors import EtcdError, LeaseLost, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, SnapshotReader, Span, read_snapshot
from ftcoord.etcd.retry import UNANSWERED, TimeLimit, retry
from ftcoord.logs import ending
from ftcoord.primitives.group.membership import (
    BURIED_AS,
    TAKE_BACK_TIMEOUT,
    Incarnations,
    Membership,
    ParticipantOptions,
)
from ftcoord.primitives.group.pace import Look, Pace
from ftcoord.primitives.group.use import Use

log = logging.getLogger(__name__)

R = TypeVar("R")
A = TypeVar("A")

FIRST_UNANSWERED: Final = 2.0
"""Seconds without an answer after which a call logs that etcd does not answer: a new leader takes less."""
LINE_INTERVAL: Final = 30.0
"""Seconds between two such lines of a call."""
_REPEATED: Final = (*UNANSWERED, LeaseLost)


class Participant(Generic[R, A]):
    """One participant of a group, through all of its leases. Thread-safe.

    Joins with the first `say()` or `ask()`. Ends with `leave()`, which revokes the lease, or `orphan()`, which lets it
    expire; after either it may join again, unless `stop()` was called.

    Args:
        etcd: the etcd client.
        use: what the group is about.
        options: how it behaves.
        changed: notified whenever there may be news; a new condition, if None.
        lost: called when a lease of its is lost, on the keep-alive thread or a group's; must not block.
    """

    def __init__(
        self,
        etcd: Etcd,
        use: Use[R, A],
        options: ParticipantOptions,
        changed: concurrency.Condition | None = None,
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._etcd, self._use, self._options = etcd, use, options  # never change
        self._writing = concurrency.lock("Participant._writing")
        """Held while a member is made or written. May be held while `_changed` is taken, never the other way round."""
        self._said: A | None = None  # guarded by _writing
        """What this member's key says, or will say as soon as etcd takes it."""
        self._changed = changed or concurrency.condition("Participant._changed")
        """Never held over a request. It guards what follows."""
        self._incarnations = Incarnations(etcd, use, options, self._changed, lost)  # says which lock each call needs

    @property
    def member(self) -> Membership[R] | None:
        """The incarnation that lives now."""
        return self._incarnations.member

    @property
    def record(self) -> R | None:
        """The last decided record that is known here."""
        member = self.member
        return member.record if member else None

    @property
    def joined(self) -> bool:
        """Whether it is a member, as far as is known here."""
        member = self.member
        return member is not None and member.entered and not member.lost

    @property
    def lease(self) -> int:
        """The lease that it lives under now, 0 for none. Keys of its own may go under it too."""
        member = self.member
        return member.session.lease_id if member else 0

    # -- asking -------------------------------------------------------------------------------------------------

    def prepare(self, deadline: float = math.inf) -> None:
        """Take a lease, and begin the watch that joining needs, until the monotonic `deadline` at the latest. Raises
        EtcdError, Left, and TimeoutError when another call does not let go of the member in time.
        """
        with self._turn(min(deadline, concurrency.now() + self._options.request_timeout)):
            self._incarnations.live(self._within(deadline))

    def say(self, ask: A, deadline: float, gone: concurrency.Event) -> A:
        """Write what this member asks, joining where that is needed; returns it, stamped.

        Raises EtcdError when etcd does not answer before the monotonic `deadline`, or the caller is `gone`;
        TimeoutError when another call does not let go of the key in time, or the caller was `gone` before it did; Left.
        """
        with self._turn(deadline, gone):
            self._said = said = self._use.stamp(ask)
            self._insist(partial(self._write, self._within(deadline)), deadline, gone)
            return said

    def ask(self, ask: A, pace: Pace[R, A]) -> Look[R, A]:
        """Write what this member asks, and do what the outlook says until it tells to return.

        Raises as `say` does, what `pace.tick` raises, StateError when the decided record cannot be read, and
        ThreadFailed. What was asked then still stands: `withdraw` it, or `leave`.
        """
        with self._incarnations.counted():
            asked = self.say(ask, pace.deadline, pace.gone)
            while True:
                outlook, look = self._await(asked, pace)
                if look.standing is Standing.LOST and self._options.renews:
                    pace.tick(look)  # first: a lease that is lost again and again must not outlast the deadline
                    self._say_again(pace)
                elif outlook.next is Next.RETURN:
                    return look
                elif outlook.next is Next.READ:
                    self._read_part(look.record, pace)
                elif outlook.next is Next.WRITE:
                    asked = self._follow(outlook.ask or asked, pace.deadline, pace.gone)
                else:
                    pace.tick(look)

    def reaffirm(self, ask: A, pace: Pace[R, A]) -> None:
        """Write `ask`, which was said before, once more: for a `pace`'s tick. Not through another lease: whoever asks
        through a new one has not been given what the old one was. Raises as `say` does."""
        self._follow(ask, pace.deadline, pace.gone)

    def withdraw(self, ask: A, timeout: float = TAKE_BACK_TIMEOUT) -> None:
        """Write `ask`, which asks for nothing, unless another call still asks.

        A member that is not known to have joined is left instead: if its join was made and not answered, its key asks.

        Takes at most `timeout` seconds. Does not raise if etcd is away.
        """
        self._take_back(ask, TimeLimit.of(timeout), None)

    def farewell(self, ask: A, death: Death, within: TimeLimit) -> bool:
        """Write `ask`, which asks for nothing, and why this participant is about to leave (T7), for all members that it
        was. Whoever sees it gone reads that. Does not raise if etcd is away. Returns whether it is known to be
        written."""
        return self._take_back(ask, within, death)

    def _take_back(self, ask: A, within: TimeLimit, death: Death | None) -> bool:
        member = self.member
        if member is None or member.lost or not self._writing.acquire(timeout=within.left()):
            return False
        try:
            if self._incarnations.are_asking and death is None:
                return False
            if not member.entered:
                self.leave(within.left())
                return False
            if not member.may_ask and death is None:
                return True
            self._said = self._use.stamp(ask)
            lease, value = member.record_lease, encode(death) if death is not None else b""
            keys = [death_key(self._use.prefix, one) for one in self.ids[-BURIED_AS:]] if death and lease else []
            member.enter(self._use.encode(self._said), within, [Put(key, value, lease) for key in keys])
            member.may_ask = False
            return True
        except EtcdError as error:
            log.info("what member %s asked was not taken back: %s", member.id, error)
            return False
        finally:
            self._writing.release()

    def touch(self, first: A, deadline: float, *, again: bool) -> None:
        """Show that this member lives: by renewing its lease once, or by asking `again` what it asks. Joins where that
        is needed, with `first` if it never asked. Raises as `say` does.
        """

        within = self._within(deadline)

        def once() -> None:
            member = self._incarnations.live(within)
            if again or not member.entered:
                self._said = self._use.stamp(first if self._said is None else self._said)
                self._put(member, within)
                return
            try:
                member.session.renew(within.left())
            except LeaseLost:
                member.orphan()
                raise

        with self._turn(deadline):
            self._insist(once, deadline, concurrency.event())

    @property
    def reason(self) -> str:
        """Why nothing is decided, as the last look of this member has shown; empty if that is not known."""
        member = self.member
        return member.group.reason if member is not None else ""

    # -- ending -------------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Have those that wait look at once at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Have all calls, also later ones, end with Left. Idempotent."""
        with self._changed:
            self._incarnations.stopped = True
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition on what this knows holds, `timeout` seconds at most; whether it does. It is looked at
        whenever there may be news, with a lock held, so it must not block."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all of its incarnations, the present one last."""
        with self._changed:
            return tuple(self._incarnations.ids)

    def was(self, member: str) -> bool:
        """Whether one of its incarnations has this id."""
        with self._changed:
            return member in self._incarnations.ids

    def holds(self, member: str) -> bool:
        """Whether the incarnation with this id lives, as far as is known here."""
        now = self.member
        return now is not None and now.id == member and not now.lost

    def leave(self, timeout: float) -> None:
        """Revoke the lease, so that the others know at once. Idempotent; never raises for an etcd that is away."""
        member = self._incarnations.part()
        if member is not None:
            member.leave(timeout)

    def orphan(self) -> None:
        """Take part no longer, and let the lease expire by itself. Idempotent."""
        member = self._incarnations.part()
        if member is not None:
            member.orphan()

    # -- writing, with `_writing` held --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, deadline: float, gone: concurrency.Event | None = None) -> Iterator[None]:
        """One call writes at a time; the others wait no longer than they want to. One that is `gone` by then raises."""
        left = max(deadline - concurrency.now(), 0)
        if not self._writing.acquire(timeout=min(left, concurrency.LONGEST_WAIT)):
            raise TimeoutError("another call of this participant was not done in time")
        try:
            if gone is not None and gone.is_set():
                raise TimeoutError("the caller went away")
            yield
        finally:
            self._writing.release()

    def _say_again(self, pace: Pace[R, A]) -> None:
        """What was said last, since its answer, or its lease, was lost. Of several calls the last one's ask counts."""
        with self._turn(pace.deadline, pace.gone):
            self._insist(partial(self._write, self._within(pace.deadline)), pace.deadline, pace.gone)

    def _follow(self, ask: A, deadline: float, gone: concurrency.Event) -> A:
        """Write what the outlook tells to. That the lease is lost shows in the next outlook."""
        with self._turn(deadline, gone):
            self._said = said = self._use.stamp(ask)
            with contextlib.suppress(LeaseLost):
                retry(partial(self._write_as_it_is, self._within(deadline)), UNANSWERED, deadline, gone)
        return said

    def _within(self, deadline: float) -> TimeLimit:
        """What the requests of one call may take."""
        return TimeLimit(self._options.request_timeout, deadline)

    def _insist(self, attempt: Callable[[], None], deadline: float, gone: concurrency.Event) -> None:
        """Repeat it until etcd takes it. That etcd does not answer is logged, since the caller only sees a call that
        takes long."""
        line_at = concurrency.now() + FIRST_UNANSWERED

        def once() -> None:
            nonlocal line_at
            try:
                attempt()
            except UNANSWERED as error:
                if (now := concurrency.now()) >= line_at:
                    line_at = now + LINE_INTERVAL
                    log.warning("etcd does not answer, and is tried again: %s; %s", error, ending(deadline))
                raise

        retry(once, _REPEATED, deadline, gone)

    def _write(self, within: TimeLimit) -> None:
        self._put(self._incarnations.live(within), within)

    def _put(self, member: Membership[R], within: TimeLimit) -> None:
        """Ask what was said: one way at a time. Else a key that was written late might ask what was given up."""
        said, use = self._said, self._use
        assert said is not None
        if not use.is_by_key(said):
            if not member.entered or member.may_ask:
                member.enter(use.encode(use.resting(said)), within)
                member.may_ask = False
            member.group.watch_record(False)
            if use.call(said, member):
                return
        member.group.watch_record(True)
        member.may_ask = True
        member.enter(use.encode(said), within)

    def _write_as_it_is(self, within: TimeLimit) -> None:
        """Through no other lease."""
        member = self.member
        if member is None or member.lost or self._incarnations.stopped:
            raise LeaseLost("the lease of this member is lost")
        self._put(member, within)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _await(self, asked: A, pace: Pace[R, A]) -> tuple[Outlook[A], Look[R, A]]:
        """What there is to do: the outlook, and what it is about."""
        with self._changed:
            while True:
                member = self._incarnations.that_hears()
                outlook = self._outlook(member, asked)
                look = Look(outlook.standing, member.record, asked)
                if outlook.next is Next.READ:  # where it stands is not known yet
                    return outlook, look
                if (standing := pace.see(look)) is not look.standing:
                    look = replace(look, standing=standing)
                if outlook.next is not Next.WAIT:
                    return outlook, look
                left = pace.wake_at(look.standing) - concurrency.now()
                if left <= 0:
                    return outlook, look
                self._changed.wait(min(left, concurrency.LONGEST_WAIT))

    def _read_part(self, record: R | None, pace: Pace[R, A]) -> None:
        """Read what lies beside the record about this member. Only who reads late may find nothing."""
        with self._changed:
            member = self._incarnations.that_hears()
            key = None if record is None or member.record is not record else self._use.part_of(record, member.id)
            revision = member.record_revision
        if record is None or key is None:
            return  # there is another one by now
        part, named = self._get_part(Get(Span(key)), Span(member.record_key), revision, pace)
        if part is None and named:
            raise StateError(key, f"is gone, though {member.record_key} names it: delete that, so that all decide anew")
        member.complete(record, self._use.with_part(record, member.id, part))

    def _get_part(self, part: Get, record: Span, revision: int, pace: Pace[R, A]) -> tuple[KeyValue | None, bool]:
        """The part; and whether, where it is not there, the record of that revision still is, at the same moment."""

        def look(then: SnapshotReader) -> tuple[KeyValue | None, bool]:
            found = then.range(part).one
            if found is not None:
                return found, True
            head = then.range(Get(record, keys_only=True)).one
            return None, head is not None and head.mod_revision == revision

        # A node of a round is not out of time while the others count on it, and all of them read at this moment.
        deadline = max(pace.deadline, concurrency.now() + self._options.request_timeout)
        within = self._within(deadline)

        def once() -> tuple[KeyValue | None, bool]:
            self._incarnations.check_stopped()
            return read_snapshot(lambda get: self._etcd.range(get, timeout=within.left()), look)

        return retry(once, UNANSWERED, deadline, pace.gone)

    def _outlook(self, member: Membership[R], asked: A) -> Outlook[A]:
        outlook = self._use.outlook(member.record, self._incarnations.ids, asked)
        # Whoever joins again by itself may take an answer that came before its lease was lost.
        if member.lost and not (self._options.renews and outlook.next is Next.RETURN):
            return Outlook(Standing.LOST, Next.RETURN)
        return outlook
