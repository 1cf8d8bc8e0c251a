"""The one mechanism of ftcoord: a group of members, and one record that the group has decided.

    <prefix>/members/<lease id>   under the member's lease: what this member asks for
    <prefix>/decided              under a lease that the decider keeps: what was decided last
    <prefix>/decided/roster       under the same lease, in some uses: the part of it that seldom changes

    <prefix>/decider              under a lease of its own: who decides

The member that holds the office (`decider`) mirrors the members, asks its policy what to decide, and publishes that in
a transaction guarded by the revisions of `decided` and of `decider`. All others watch these two keys, so a change costs
O(1) events per member.

One thread per group runs `_step` until there is nothing left to do. A step only compares what should be (mirrors in
sync, the office filled, a decision published) with what is, so it may fail and be repeated
anywhere.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.concurrency import STEP_RETRY_PAUSE
from ftcoord.core.layout import members_span
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown, StateError
from ftcoord.etcd.api import Began, Etcd, Get, KeyValue, Put
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.decided_record import DecidedRecord, Listener
from ftcoord.primitives.group.decider import Decider
from ftcoord.primitives.group.member_key import MemberKey, MemberLost
from ftcoord.primitives.group.members_view import MembersView
from ftcoord.primitives.group.office import Office
from ftcoord.primitives.group.policy import Policy
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import WriteOutcome

log = logging.getLogger(__name__)

Task: TypeAlias = Callable[[], None]
"""Something that a watch delivered, or that another thread wants done."""
CHECK_AFTER: Final = 3.0, 4.5
"""Multiples of its lease TTL, lowest and highest, after which a member that sees no decision asks etcd whether it
missed one (a decider: or a change of a member). So it costs a tenth of renewing the lease, and not all members ask at
once."""
CHANGES_PER_STEP: Final = 1000
"""Changes that one step takes in at most: many heartbeats may come faster than they can be applied."""


class Group:
    """This process's membership in one group. Starts with `enter()`, ends with `close()`.

    Args:
        etcd: the etcd client.
        session: the lease that this member lives under.
        prefix: the group's keys are `<prefix>/members/...` and `<prefix>/decided`.
        policy: what to decide when this member is the decider.
        record_ttl: seconds that the decided record outlives the last decider.
        listener: called with the decided record whenever it changed, on the group's thread, and by `enter()` before
            that runs; must not block. Raises StateError when it cannot be read: then nothing is decided until somebody
            replaces or deletes the key. A deletion is reported as None.
        failed: called with the error, on the group's thread, when that thread ends by one. This member is deaf then, so
            its session must end.
        rank: returns this member's place in the last record; None without one.
        has_roster: whether the decided record has a second key, see `Use.has_roster`. The listener gets that too.
    """

    def __init__(
        self,
        etcd: Etcd,
        session: Session,
        prefix: str,
        policy: Policy,
        record_ttl: int,
        listener: Listener,
        *,
        failed: Callable[[BaseException], None] = lambda error: None,
        rank: Callable[[], int | None] = lambda: None,
        has_roster: bool = False,
    ) -> None:
        members = members_span(prefix)
        self._failed = failed  # never changes
        self._member_key = MemberKey(etcd, prefix, session)  # has a lock of its own
        self._inbox: concurrency.Queue[Task] = concurrency.inbox()
        # Only the thread, once it runs; before, the thread that enters:
        self._record = DecidedRecord(
            etcd, prefix, record_ttl, self._post, listener, writer=self._member_key.id, has_roster=has_roster
        )
        self._members = MembersView(etcd, members, self._post)
        self._office = Office(
            etcd, prefix, self._member_key.id, ttl=math.ceil(session.ttl), record=self._record.mirror, rank=rank
        )
        self._decider = Decider(prefix, policy, self._member_key, self._record, self._office, self._members)
        self._session = session
        self._check_at = math.inf
        """When to compare the copies with etcd next, unless a decision comes before; never before this member joined.

        A watch may miss a change (in a process that forks with gRPC's own handlers), and the next change reveals that.
        But the missed one may be the last: a recall of this member, or the request of the member that a decider waits
        for."""
        self._closing = False  # only ever becomes true; read anywhere
        self._thread = concurrency.thread(self._run, "ftcoord-group")

    @property
    def id(self) -> str:
        """This member's, which is its lease's."""
        return self._member_key.id

    @property
    def decided(self) -> KeyValue | None:
        """The last decided record that is known here."""
        return self._record.known

    @property
    def record_key(self) -> str:
        """The decided record's."""
        return self._record.mirror.span.start

    @property
    def key(self) -> str:
        """This member's own."""
        return self._member_key.key

    @property
    def said(self) -> KeyValue | None:
        """What it holds, as far as is known; None before this member joined."""
        return self._member_key.kv

    @property
    def entered(self) -> bool:
        """Whether this member has its key."""
        return self._member_key.kv is not None

    @property
    def reason(self) -> str:
        """Why nothing is decided, as far as this member knows; empty after a decision."""
        return self._decider.reason

    def prepare(self, timeout: float) -> None:
        """Begin the watch that `enter()` needs, in `timeout` seconds. Raises EtcdError, and may then be repeated."""
        self._record.mirror.begin(timeout)

    def enter(self, value: bytes, within: TimeLimit, also: Sequence[Put] = ()) -> None:
        """Join, or change what this member asks for, and write `also` with it. `value` must be unlike all that it asked
        before.

        Raises LeaseLost when the session is over, and EtcdError when etcd cannot be reached; it may then be repeated.
        """
        if not self.entered:
            self.prepare(within.left())
        outcome = self._member_key.put(value, within, (Get(self._record.mirror.span),), also)
        if outcome.reads:
            try:
                self._begin(outcome)
            finally:
                if self._thread.ident is None:  # may this process start no more? Without a thread this is no member
                    self._member_key.kv = None

    def check(self) -> None:
        """Have this member's key put back if it is gone, though its lease is not."""
        self._inbox.put(self._doubt_key)

    def wake(self) -> None:
        """Renew the lease again after a rest, and try to decide again: a member that rests does not."""
        rested = self._session.rests
        self._session.wake()
        if rested:  # no event of its watch follows from that
            self._inbox.put(_wake)

    def introduce(self) -> None:
        """Have the sentinel know of this member, and of the office if it holds it, now."""
        self._session.introduce()
        self._inbox.put(self._office.introduce)

    def await_end(self, timeout: float) -> None:
        """Wait until the thread has ended after `close()`, and has given the office up; at most `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        """Stop taking part, without waiting for a call under way. The member's key stays until the session ends."""
        self._closing = True
        self._inbox.put(_wake)
        if self._thread.ident is None:  # else it closes all when it ends
            self._record.mirror.close()

    # -- what comes in ------------------------------------------------------------------------------------------

    def _post(self, mirror: Mirror, posted: Posted) -> None:
        self._inbox.put(lambda: self._apply(mirror, posted))

    def _begin(self, outcome: WriteOutcome) -> None:
        self._record.mirror.adopt(outcome.reads[0])
        self._record.tell()
        self._put_off_check()
        self._thread.start()

    def _doubt_key(self) -> None:
        self._member_key.doubted = True

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended: EtcdError | None = None
        try:
            self._run_until_closed()
        except (ClientClosed, MemberLost) as error:  # nothing will be answered any more, or concern this member
            ended = error
        finally:
            failure = ended or sys.exc_info()[1]
            if failure is not None and not self._closing:  # better no member than one that does nothing
                if failure is not ended:
                    log.exception("member %s leaves %s: its thread failed", self.id, self._record.mirror.span.start)
                self._failed(failure)
            self._record.close()
            self._members.close()
            self._office.give_up()

    def _run_until_closed(self) -> None:
        until: float | None = concurrency.now()
        while not self._closing:
            try:
                self._take(until)
                until = self._step()
            except (ClientClosed, MemberLost):
                raise
            except LeaseLost as error:
                self._decider.fails(f"a lease is gone: {error}")
                self._record.drop_lease()
                until = concurrency.now() + STEP_RETRY_PAUSE
            except (EtcdUnavailable, OutcomeUnknown) as error:
                self._decider.fails(f"cannot go on for now: {error}")
                until = concurrency.now() + STEP_RETRY_PAUSE
            except (EtcdError, StateError) as error:  # nobody may ever decide, until somebody sees to that
                self._decider.fails(f"cannot go on: {error}", logging.WARNING)
                until = concurrency.now() + STEP_RETRY_PAUSE

    def _take(self, until: float | None) -> None:
        """Wait for something to happen, at most until then, and apply it, with all that comes while this member rests
        from its last decision: of many events that come one by one, many are decided on at once."""
        try:
            timeout = None if until is None else max(until - concurrency.now(), 0)
            for _ in range(CHANGES_PER_STEP):
                task = self._inbox.get(timeout=timeout)
                task()
                timeout = max(self._decider.calm_until - concurrency.now(), 0)
        except concurrency.Empty:
            pass

    def _apply(self, mirror: Mirror, posted: Posted) -> None:
        if mirror is self._members.mirror:
            self._members.apply(posted)
            return
        changes = mirror.apply(posted)
        if mirror is self._record.mirror:
            if changes:  # what this member decides itself is known before its watch tells
                self._put_off_check()
            self._record.tell()
            if (
                isinstance(posted.item, Began) and not mirror.synced
            ):  # interrupted: etcd may have lost this member's key
                self._member_key.doubted = True

    def _step(self) -> float:
        """Bring what is nearer to what should be; when to look again, unless something comes in."""
        if self._check_at <= concurrency.now():
            self._look_for_missed()  # first: a record that cannot be read may be one of which a change was missed
        return min(self._check_at, self._go_on())

    def _look_for_missed(self) -> None:
        """Have all be read again of which a watch has missed a change. Raises EtcdError: then the next step asks."""
        for copy in (self._record.mirror, self._members.mirror):
            if copy is not None and copy.synced and not self._session.rests:  # who rests waits for nothing
                copy.compare()
        self._put_off_check()

    def _put_off_check(self) -> None:
        """The record's watch works: it has just delivered something; or the copies were compared."""
        self._check_at = concurrency.now() + self._session.ttl * random.uniform(*CHECK_AFTER)

    def _go_on(self) -> float:
        if not self._record.mirror.synced:
            before = self._record.mirror.kvs
            self._record.mirror.sync()
            if self._record.mirror.kvs != before:  # the members as they were before that go with another record
                self._members.forget()
            self._record.tell()
        if self._member_key.doubted:
            self._member_key.restore()
            self._member_key.doubted = False
        until = self._office.step(tries=self._record.mirror.synced and not self._session.rests)
        self._record.tell()  # what it read when it took the office
        if not self._office.is_held:
            if self._members.mirror is not None:
                self._members.close()
                self._record.drop_lease()
            return until
        if self._members.mirror is None:
            self._decider.say("decides from now on")
        self._members.open()
        self._members.sync()
        if not (self._members.synced and self._record.mirror.synced):
            return until  # what is missing is on its way to the inbox
        self._record.keep_lease()
        due = self._decider.decide()
        return until if due is None else min(until, due)


def _wake() -> None:
    """A task that does nothing: the thread looks at what there is to do after each."""
