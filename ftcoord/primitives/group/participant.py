"""Somebody who takes part in a group: asks, and awaits what answers, across lost answers and lost leases.

A `Membership` is one incarnation, under one lease. A `Participant` asks through all of them, and makes the next one
when the last is lost. What it asks, and what that means, is its `Use`; how long a call waits is its `Pace`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from ftcoord import concurrency, errors
from ftcoord.core import layout
from ftcoord.core.death_records import Death, encode
from ftcoord.core.lease import SessionState
from ftcoord.core.verdict import Next, Outlook, Standing
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, SnapshotReader, Span, read_snapshot
from ftcoord.etcd.retry import UNANSWERED, TimeLimit, retry
from ftcoord.logs import ending
from ftcoord.primitives.group.group import Group, MemberLost
from ftcoord.primitives.group.use import Look, Pace, Use
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

R = TypeVar("R")
A = TypeVar("A")

TAKE_BACK_TIMEOUT: Final = 0.5
"""Seconds that taking back a request, or a lease that is of no use any more, may take. Nothing depends on either."""
BURIED_AS: Final = 20
"""Incarnations under whose ids the cause of a death is written, the last ones: others may know it by the seat that it
took as one of them."""
FIRST_UNANSWERED: Final = 2.0
"""Seconds without an answer after which a call logs that etcd does not answer: a new leader takes less."""
LINE_INTERVAL: Final = 30.0
"""Seconds between two such lines of a call."""


class Left(errors.FtcoordError):
    """This participant has left the group, or was stopped, while a call of it waited."""


@dataclass(frozen=True, slots=True)
class ParticipantOptions:
    """How a participant behaves. Times in seconds.

    Args:
        lease_ttl: how long a member's lease lives after its last renewal.
        record_ttl: how long the decided record outlives the last decider.
        request_timeout: how long a request to etcd may take.
        renews: whether a member whose lease is lost joins again by itself and asks the same. If not, its asks end with
            LOST.
        keeps_lease: whether the lease is renewed also while nobody asks. If not, each call shows that the member lives.
        dies_with_process: whether the sentinel gives the lease up, and says why, when this process dies. If not, the
            lease ends by time: for who takes part for others, that live on.
    """

    lease_ttl: int
    record_ttl: int
    request_timeout: float
    renews: bool = True
    keeps_lease: bool = True
    dies_with_process: bool = True


# -- one incarnation --------------------------------------------------------------------------------------------------


class Membership(Generic[R]):
    """Takes a lease and starts to watch at once; joins the group with the first `enter()`.

    Ends with `leave()`, which revokes the lease, or `orphan()`, which lets it expire.

    Args:
        of: the participant, whose `lost` is not called for a lease that is lost before this object is made.
        within: how long taking the lease and beginning the watch may take.

    Raises EtcdError when it gets no lease or no watch, and ThreadNotStarted when no thread can renew the lease.
    """

    def __init__(self, of: Participant[R, Any], within: TimeLimit) -> None:
        self._of, self._changed = of, of._changed  # never change
        # Guarded by _changed; read anywhere:
        self.record: R | None = None
        """The last decided record that could be read,"""
        self.record_kv: KeyValue | None = None
        """and its key; None where etcd has none."""
        self.has_read = False
        """Whether it has read that since it joined."""
        self.problem: errors.StateError | None = None
        """Why the record cannot be read now."""
        self.failure: errors.EtcdError | errors.ThreadFailed | None = None
        """The error that ended the group's thread, and this membership with it."""
        self.lost = False
        self.id = ""
        """Empty until changes of the session's state can be acted on."""
        self.may_ask = False  # guarded by Participant._writing
        """Whether its key asks, as far as is known: a write of it may be on its way."""
        etcd, use, options, was = of._etcd, of._use, of._options, of.ids[-BURIED_AS:]
        deaths = use.prefix if options.dies_with_process else None
        self.session = Session(etcd, options.lease_ttl, self._on_state, deaths=deaths, was=was, timeout=within.left())
        self.group = Group(
            etcd,
            self.session,
            use,
            options.record_ttl,
            listener=self._on_decided,
            failed=self._fail,
            rank=lambda: None if self.record is None else use.rank(self.record, of.ids),
        )
        with self._changed:
            self.id = self.group.own.id
        if self.session.state is SessionState.LOST:  # while this process was suspended: its creator sees that itself
            self.orphan()
        try:
            self.group.prepare(within.left())
        except errors.EtcdError:
            self.leave(within.left())
            raise

    @property
    def entered(self) -> bool:
        """Whether it has a key in the group."""
        return self.group.own.kv is not None

    @property
    def since(self) -> int:
        """etcd's revision at which its key was last written, as far as is known; 0 before it has one."""
        kv = self.group.own.kv
        return kv.mod_revision if kv is not None else 0

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        """The decider has answered this member itself, with this record."""
        self.group.put_off_check()
        with contextlib.suppress(errors.StateError):  # whoever waits learns of it
            self._on_decided(KeyValue(self.group.record_key, value, revision, revision, 1, lease))

    def gone(self) -> None:
        """The decider does not find this member's key."""
        self._fail(MemberLost(f"this member's key {self.group.own.key} is gone: it joins again"))

    def enter(self, value: bytes, within: TimeLimit, also: Sequence[Put] = ()) -> None:
        """Join, or ask for something else, and write `also` in the same transaction.

        Raises EtcdError; after LeaseLost, make a new membership. The same applies after ThreadNotStarted: its key is
        withdrawn, since nobody would do a member's work.
        """
        try:
            self.group.enter(value, within, also)
        except errors.LeaseLost:
            self.orphan()
            raise
        except errors.ThreadNotStarted:
            self.orphan()
            self.leave(within.left())
            raise

    def complete(self, record: R, completed: R) -> None:
        """Add what was read beside a record, unless there is another record by now."""
        with self._changed:
            if self.record is record:
                self.record = completed

    def leave(self, timeout: float) -> None:
        """Revoke the lease, so that the others know at once; also if the member is lost while its lease is alive.

        Does not raise if etcd is unreachable.
        """
        self.group.close()
        try:
            if self.lost and self.session.state is not SessionState.LOST:  # the session is an orphan, it closes nothing
                self._of._etcd.revoke(self.session.lease_id, timeout=timeout)
            self.session.close(timeout)
            self.group.await_end(timeout)
        except (errors.EtcdError, errors.ForkedProcessError) as error:
            log.debug("the lease was not revoked, it expires by itself: %s", error)

    def orphan(self, failure: errors.EtcdError | errors.ThreadFailed | None = None) -> None:
        """Stop taking part, and let the lease expire; because of a `failure`, if one is given."""
        self.group.close()
        self.session.orphan()
        with self._changed:  # both at once: who learns of the failure must not find this member alive
            self.failure, self.lost = failure or self.failure, True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, MemberLost):  # that is no failure: the member joins again
            self.orphan()
            self._of._lost()
        else:
            self.orphan(
                error if isinstance(error, errors.ClientClosed) else errors.ThreadFailed("takes part in a group", error)
            )

    def _on_state(self, state: SessionState) -> None:
        with self._changed:
            if not self.id:
                return
        key = self.group.own.key
        if state is SessionState.LOST:
            self.orphan()
            self._of._lost()
        elif state is SessionState.CONNECTED:
            log.warning("etcd renews the lease of %s again", key)
        else:
            log.warning(
                "etcd has not renewed the lease of %s in time: training goes on, and the next round or quorum waits for"
                " etcd; if this lasts, see `ftcoord doctor`",
                key,
            )

    def _on_decided(self, kv: KeyValue | None) -> None:
        try:
            record = self._of._use.parse(kv.key, kv.value) if kv else None
        except errors.StateError as error:
            log.warning("%s", error)
            with self._changed:
                self.problem = error
                self._changed.notify_all()
            raise
        with self._changed:
            self.record, self.record_kv, self.problem, self.has_read = record, kv, None, True
            self._changed.notify_all()


# -- all of them ------------------------------------------------------------------------------------------------------


class Participant(Generic[R, A]):
    """One participant of a group, through all of its leases. Thread-safe.

    Joins with the first `say()` or `ask()`. Ends with `leave()`, which revokes the lease, or `orphan()`, which lets it
    expire; after either it may join again, unless `stop()` was called.

    Args:
        etcd: the etcd client.
        use: what the group is about.
        options: how it behaves.
        lost: called when a lease of its is lost, on the keep-alive thread or a group's; must not block.
    """

    def __init__(
        self, etcd: Etcd, use: Use[R, A], options: ParticipantOptions, lost: Callable[[], object] = lambda: None
    ) -> None:
        self._etcd, self._use, self._options, self._lost = etcd, use, options, lost  # never change
        self._writing = concurrency.lock("Participant._writing")
        """Held while a member is made or written. May be held while `_changed` is taken, never the other way round."""
        self._said: A | None = None  # guarded by _writing
        """What this member's key has, or will have as soon as etcd takes it."""
        self._changed = concurrency.condition("Participant._changed")
        """Notified whenever there may be news. Never held over a request. It guards what follows."""
        self.member: Membership[R] | None = None  # read anywhere; a new one only with _writing held too
        """The incarnation that lives now."""
        self._ids: list[str] = []
        self._asking = 0
        """How many calls ask now: while one does, the lease is renewed."""
        self._stopped = False  # any thread; becomes True once
        """Whether no call may go on."""

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

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all of its incarnations, the present one last."""
        with self._changed:
            return tuple(self._ids)

    @property
    def reason(self) -> str:
        """Why nothing is decided, as the last look of this member has shown; empty if that is not known."""
        member = self.member
        return member.group.reason if member is not None else ""

    def was(self, member: str) -> bool:
        """Whether one of its incarnations has this id."""
        return member in self.ids

    def holds(self, member: str) -> bool:
        """Whether the incarnation with this id lives, as far as is known here."""
        now = self.member
        return now is not None and now.id == member and not now.lost

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition on what this knows holds, `timeout` seconds at most; whether it does. It is looked at
        whenever there may be news, with a lock held, so it must not block."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    # -- asking -------------------------------------------------------------------------------------------------

    def prepare(self, deadline: float = math.inf) -> None:
        """Take a lease, and begin the watch that joining needs, until the monotonic `deadline` at the latest. Raises
        EtcdError, Left, and TimeoutError when another call does not let go of the member in time.
        """
        with self._turn(min(deadline, concurrency.now() + self._options.request_timeout)):
            self._live(self._within(deadline))

    def say(self, ask: A, deadline: float, gone: concurrency.Event) -> A:
        """Write what this member asks, joining where that is needed; returns it, stamped.

        Raises EtcdError when etcd does not answer before the monotonic `deadline`, or the caller is `gone`;
        TimeoutError when another call does not let go of the key in time, or the caller was `gone` before it did; Left.
        """
        return self._write(ask, deadline, gone)

    def ask(self, ask: A, pace: Pace[R, A]) -> Look[R, A]:
        """Write what this member asks, and do what the outlook says until it tells to return.

        Raises as `say` does, what `pace.tick` raises, StateError when the decided record cannot be read, and
        ThreadFailed. What was asked then still stands: `withdraw` it, or `leave`.
        """
        with self._counted():
            asked = self.say(ask, pace.deadline, pace.gone)
            member = self.member
            while True:
                member, outlook, look = self._await(member, asked, pace)
                if look.standing is Standing.LOST and self._options.renews:
                    pace.tick(look)  # first: a lease that is lost again and again must not outlast the deadline
                    self._write(None, pace.deadline, pace.gone)  # of several calls the last one's ask counts
                elif outlook.next is Next.RETURN:
                    return look
                elif outlook.next is Next.READ:
                    self._read_part(member, look.record, pace)
                elif outlook.next is Next.WRITE:
                    asked = self._write(outlook.ask or asked, pace.deadline, pace.gone, anew=False)
                else:
                    pace.tick(look)

    def reaffirm(self, ask: A, pace: Pace[R, A]) -> None:
        """Write `ask`, which was said before, once more: for a `pace`'s tick. Not through another lease: whoever asks
        through a new one has not been given what the old one was. Raises as `say` does."""
        self._write(ask, pace.deadline, pace.gone, anew=False)

    def withdraw(self, ask: A) -> None:
        """Write `ask`, which asks for nothing, unless another call still asks.

        A member that is not known to have joined is left instead: if its join was made and not answered, its key asks.

        Takes at most `TAKE_BACK_TIMEOUT`. Does not raise if etcd is away.
        """
        self.farewell(ask, None, TimeLimit.of(TAKE_BACK_TIMEOUT))

    def farewell(self, ask: A, death: Death | None, within: TimeLimit) -> None:
        """Write `ask`, which asks for nothing, and why this participant is about to leave (T7), for all members that it
        was. Whoever sees it gone reads that. Does not raise if etcd is away. Without a `death` as `withdraw`."""
        member = self.member
        if member is None or member.lost:
            return
        try:
            with self._turn(concurrency.now() + within.left()):
                if self._asking and death is None:
                    return
                if not member.entered:
                    self.leave(within.left())
                elif member.may_ask or death is not None:
                    self._said, graves = self._use.stamp(ask), list[Put]()
                    if death is not None and member.record_kv is not None and (lease := member.record_kv.lease):
                        keys = (layout.death_key(self._use.prefix, one) for one in self.ids[-BURIED_AS:])
                        graves = [Put(key, encode(death), lease) for key in keys]
                    member.enter(self._use.encode(self._said), within, graves)
                    member.may_ask = False
        except (errors.EtcdError, TimeoutError) as error:
            log.info("what member %s asked was not taken back: %s", member.id, error)

    def touch(self, first: A, deadline: float, *, again: bool) -> None:
        """Show that this member lives: by renewing its lease once, or by asking `again` what it asks. Joins where that
        is needed, with `first` if it never asked. Raises as `say` does.
        """

        def once(within: TimeLimit) -> None:
            member = self._live(within)
            if again or not member.entered:
                self._said = self._use.stamp(first if self._said is None else self._said)
                self._put(member, within)
                return
            try:
                member.session.renew(within.left())
            except errors.LeaseLost:
                member.orphan()
                raise

        with self._turn(deadline):
            self._insist(once, deadline, concurrency.event())

    # -- ending -------------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Have those that wait look at once at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Have all calls, also later ones, end with Left. Idempotent."""
        self._stopped = True
        self.nudge()

    def leave(self, timeout: float) -> None:
        """Revoke the lease, so that the others know at once. Idempotent; never raises for an etcd that is away."""
        if (member := self._part()) is not None:
            member.leave(timeout)

    def orphan(self) -> None:
        """Take part no longer, and let the lease expire by itself. Idempotent."""
        if (member := self._part()) is not None:
            member.orphan()

    def _part(self) -> Membership[R] | None:
        with self._changed:
            member, self.member = self.member, None
            self._changed.notify_all()
        return member

    # -- the incarnation that lives, with `_writing` held -------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, deadline: float, gone: concurrency.Event | None = None) -> Iterator[None]:
        """One call writes at a time; the others wait no longer than they want to. One that is `gone` by then raises."""
        late = TimeoutError("another call of this participant was not done in time")
        with concurrency.held(self._writing, deadline, late):
            if gone is not None and gone.is_set():
                raise TimeoutError("the caller went away")
            yield

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """While somebody asks, the lease is renewed."""
        with self._changed:
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                if not self._asking:  # before the next call stamps what it asks: that one counts itself first
                    self._use.nobody_asks()
                if self.member is not None and not (self._asking or self._options.keeps_lease):
                    self.member.session.rest()  # under the lock: the next call counts itself, then wakes it

    def _live(self, within: TimeLimit) -> Membership[R]:
        """The incarnation that lives, with its lease kept if somebody asks: a new one if the last is lost. Raises
        EtcdError, ThreadNotStarted, Left."""
        self._check_stopped()  # here, since whoever repeats a write that etcd does not answer calls this each time
        member, is_kept = self.member, self._options.keeps_lease or self._asking > 0
        if member is None or member.lost:
            if member is not None:  # it can be lost while its lease lives: the others would wait for what it decides
                member.leave(within.left(TAKE_BACK_TIMEOUT))
            member = self._new(within)
            if not is_kept:
                member.session.rest()
        elif is_kept:
            member.group.wake()
        return member

    def _new(self, within: TimeLimit) -> Membership[R]:
        if not self._ids:
            _name_older(self._etcd, self._use.prefix, within)
        member = Membership(self, within)
        with self._changed:
            if not self._stopped:
                self.member = member
                self._ids.append(member.id)
                return member
        member.leave(within.left(TAKE_BACK_TIMEOUT))  # nobody else would end it
        raise _stopped()

    def _check_stopped(self) -> None:
        if self._stopped:
            raise _stopped()

    def _within(self, deadline: float) -> TimeLimit:
        """What the requests of one call may take."""
        return TimeLimit(self._options.request_timeout, deadline)

    def _insist(self, attempt: Callable[[TimeLimit], None], deadline: float, gone: concurrency.Event) -> None:
        """Repeat it until etcd takes it. That etcd does not answer is logged, since the caller only sees a call that
        takes long."""
        line_at, within = concurrency.now() + FIRST_UNANSWERED, self._within(deadline)

        def once() -> None:
            nonlocal line_at
            try:
                attempt(within)
            except UNANSWERED as error:
                if (now := concurrency.now()) >= line_at:
                    line_at = now + LINE_INTERVAL
                    log.warning("etcd does not answer, and is tried again: %s; %s", error, ending(deadline))
                raise

        retry(once, (*UNANSWERED, errors.LeaseLost), deadline, gone)

    def _write(self, ask: A | None, deadline: float, gone: concurrency.Event, *, anew: bool = True) -> A:
        """Write `ask`, stamped, or what was said last; returns it. Not `anew`: through no other lease; that this one is
        lost shows in the next outlook."""

        def attempt(within: TimeLimit) -> None:
            member = self._live(within) if anew else self.member
            if member is not None and (anew or not (member.lost or self._stopped)):
                self._put(member, within)

        with self._turn(deadline, gone):
            if ask is not None:
                self._said = self._use.stamp(ask)
            said = self._said
            assert said is not None
            self._insist(attempt, deadline, gone)
            return said

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

    # -- waiting ------------------------------------------------------------------------------------------------

    def _await(
        self, member: Membership[R] | None, asked: A, pace: Pace[R, A]
    ) -> tuple[Membership[R], Outlook[A], Look[R, A]]:
        """What there is to do: the outlook, and what it is about. `member`: the incarnation that this call has seen
        last: its failure counts, though another call may have replaced it."""
        with self._changed:
            while True:
                member = self._that_receives(member)
                outlook = self._use.outlook(member.record, self._ids, asked)
                # Whoever joins again by itself may take an answer that came before its lease was lost.
                if member.lost and not (self._options.renews and outlook.next is Next.RETURN):
                    outlook = Outlook(Standing.LOST, Next.RETURN)
                look = Look(outlook.standing, member.record, asked)
                if outlook.next is Next.READ:  # where it stands is not known yet
                    return member, outlook, look
                if (standing := pace.see(look)) is not look.standing:
                    look = replace(look, standing=standing)
                left = pace.wake_at(look.standing) - concurrency.now() if outlook.next is Next.WAIT else 0.0
                if left <= 0:
                    return member, outlook, look
                self._changed.wait(min(left, concurrency.LONGEST_WAIT))

    def _that_receives(self, last: Membership[R] | None) -> Membership[R]:
        """The incarnation that lives. With `_changed` held. Raises why it receives nothing any more: Left, StateError,
        EtcdError, ThreadFailed; also why the `last` did not."""
        self._check_stopped()
        if last is not None and last.failure is not None:
            raise last.failure
        member = self.member
        if member is None:
            raise Left("this participant has left")
        if (problem := member.failure or member.problem) is not None:
            raise problem
        return member

    def _read_part(self, member: Membership[R], record: R | None, pace: Pace[R, A]) -> None:
        """Read what lies beside the record about this member. Only who reads late may find nothing."""
        with self._changed:
            is_last, head = member.record is record, member.record_kv
        key = self._use.part_of(record, member.id) if record is not None and is_last else None
        if record is None or key is None:
            return  # there is another one by now

        def look(then: SnapshotReader) -> tuple[KeyValue | None, bool]:
            """The part; and whether, where it is not there, its record is, at the same moment."""
            if (found := then.range(Get(Span(key))).one) is not None:
                return found, False
            now = then.range(Get(Span(member.group.record_key), keys_only=True)).one
            return None, now is not None and head is not None and now.mod_revision == head.mod_revision

        # A node of a round is not out of time while the others count on it, and all of them read at this moment.
        deadline = max(pace.deadline, concurrency.now() + self._options.request_timeout)
        within = self._within(deadline)

        def once() -> tuple[KeyValue | None, bool]:
            self._check_stopped()
            return read_snapshot(lambda get: self._etcd.range(get, timeout=within.left()), look)

        part, is_named = retry(once, UNANSWERED, deadline, pace.gone)
        if is_named:
            raise errors.StateError(
                key, f"is gone, though {member.group.record_key} names it: delete that, so that all decide anew"
            )
        member.complete(record, self._use.with_part(record, member.id, part))


def _stopped() -> Left:
    return Left("this participant was stopped")


def _name_older(etcd: Etcd, prefix: str, within: TimeLimit) -> None:
    """Log if members of an older release take part under this name: neither these nor those would know of the others.
    Under a `key_prefix` of the user's they have the same keys, whose records name their layout."""
    if not prefix.startswith(f"{layout.KEY_PREFIX}/"):
        return
    older = layout.members_span(prefix.replace(layout.KEY_PREFIX, layout.OLDER_KEY_PREFIX, 1))
    try:
        found = etcd.range(Get(older, limit=1, keys_only=True), timeout=within.left()).kvs
    except errors.EtcdError as error:  # such as a user who may not read there
        log.debug("cannot look for members of an older release: %s", error)
        return
    if found:
        member, advice = neutral(found[0].key), "use one release in all of a job"
        log.warning(
            "%s is a member of an older release of ftcoord, which takes no part in %s: %s", member, prefix, advice
        )
