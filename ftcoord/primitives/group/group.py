"""The one mechanism of ftcoord: a group of members, and one record that the group has decided.

    <prefix>/members/<lease id>   under the member's lease: what this member asks for
    <prefix>/decided              under a lease that the decider keeps: what was decided last

    <prefix>/decider              under a lease of its own: who decides

The member that holds the office (`decider`) mirrors the members, asks its policy what to decide, and publishes that in
a transaction guarded by the revisions of `decided` and of `decider`. All others watch these two keys, so a change costs
O(1) events per member.

One thread per group runs `_step` until there is nothing left to do. A step only compares what should be (mirrors in
sync, the office filled, a decision published) with what is, so it may fail and be repeated anywhere.

From top to bottom: the decider's view of the members; the decider; the member, with its thread.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.concurrency import STEP_RETRY_PAUSE
from ftcoord.core.asks import OpenAsk
from ftcoord.core.layout import Span, decider_key, member_of, members_span
from ftcoord.core.office import parse_office
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown, StateError
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, is_member
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.decided_record import DecidedRecord, Listener
from ftcoord.primitives.group.member_key import MemberKey, MemberLost
from ftcoord.primitives.group.office import Office
from ftcoord.primitives.group.policy import Desk, Policy, View
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
REST: Final = 5e-6
"""Seconds, for each member, for which a decider takes in what happens before it decides again: several times as long as
deciding takes. So events that come one by one are decided on together. With 64 members it waits for 0.3 ms at most."""
RESTS_MORE_AT: Final = 1000
"""Members from which on each of them adds more than that: so many come one by one for seconds, on the processor that
also decides. Then the part of the time that deciding takes becomes smaller, the more they are."""


# -- deciding -------------------------------------------------------------------------------------------------------


class MembersView:
    """A mirror of `members/` while this member decides, and when it first saw each member's present value.

    These times are remembered while the mirror is closed, so that no timeout starts again. Only for the group's thread.
    """

    def __init__(self, etcd: Etcd, span: Span, post: Callable[[Mirror, Posted], None]) -> None:
        self._etcd, self._span, self._post = etcd, span, post
        self.mirror: Mirror | None = None
        self.changed_at = concurrency.now()
        """When a member last came, changed or went."""
        self.changes = 0
        """How often that happened."""
        self.read_at = concurrency.now()
        """When all members were last read. Values found by that read may be old."""
        self._kvs: dict[str, KeyValue] = {}
        """The values that were seen last,"""
        self._seen_at: dict[str, float] = {}
        """and when each was seen first."""
        self._members: dict[str, KeyValue] = {}
        """Those of them that are members. A change costs O(1): they come in the order in which they are kept."""
        self._is_in_order = True
        self._has_warned = False

    @property
    def synced(self) -> bool:
        return self.mirror is not None and self.mirror.synced

    @property
    def revision(self) -> int:
        """The revision of etcd up to which it has seen everything."""
        return self.mirror.revision if self.mirror is not None else 0

    def open(self) -> None:
        """Start to watch. Idempotent."""
        if self.mirror is None:
            self.mirror = Mirror(self._etcd, self._span, self._post)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    def forget(self) -> None:
        """Have the next `sync()` read all members."""
        if self.mirror is not None:
            self.mirror.forget()

    def sync(self) -> None:
        """Make one step towards a true copy. Raises EtcdError, and may then be called again."""
        assert self.mirror is not None
        if not self.mirror.synced:
            self.mirror.sync()
            if self.mirror.synced:
                self.read_at = concurrency.now()
                self._note({*self.mirror.kvs, *self._kvs}, self.read_at)
                self._warn_of_strangers(len(self.mirror.kvs) - len(self._members))

    def _warn_of_strangers(self, count: int) -> None:
        if count and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d keys below %r are ignored: they are no members, which have the names of their leases; find out who"
                " writes them",
                count,
                self._span.start,
            )

    def apply(self, posted: Posted) -> None:
        """Bring the copy up to date."""
        assert self.mirror is not None
        changes = self.mirror.apply(posted)
        if self.mirror.synced:
            self._note((change.key for change in changes), concurrency.now())

    def in_order(self) -> tuple[KeyValue, ...]:
        """The members' keys, oldest first."""
        if not self._is_in_order:
            self._members = dict(sorted(self._members.items(), key=lambda item: item[1].create_revision))
            self._is_in_order = True
        return tuple(self._members.values())

    def get(self, key: str) -> KeyValue | None:
        """The member with this key, if there is one."""
        return self._members.get(key)

    def seen(self) -> dict[str, float]:
        """For each key, when its present value was first seen."""
        return self._seen_at.copy()

    def _note(self, keys: Iterable[str], now: float) -> None:
        assert self.mirror is not None
        for key in keys:
            kv, before = self.mirror.kvs.get(key), self._kvs.get(key)
            if kv is None:
                self._kvs.pop(key, None)
                self._seen_at.pop(key, None)
            elif before != kv:
                self._kvs[key], self._seen_at[key] = kv, now
            else:
                continue
            self._list(key, kv)
            self.changed_at = now
            self.changes += 1

    def _list(self, key: str, kv: KeyValue | None) -> None:
        """Note the new state of a key among the members."""
        before = self._members.get(key)
        if before is not None and (kv is None or kv.create_revision != before.create_revision):
            del self._members[key]
        if kv is None or not is_member(kv):
            self._members.pop(key, None)
            return
        if key not in self._members and self._members:
            newest = next(reversed(self._members.values()))
            self._is_in_order &= newest.create_revision < kv.create_revision
        self._members[key] = kv


class _LastVerdict:
    """The last verdict to wait, and what it rested on: while that is so, there is nothing to decide."""

    def __init__(self) -> None:
        self.until: float | None = None
        """When the verdict has to be looked at again; None if only an event can change it."""
        self._basis: tuple[object, ...] | None = None
        """What it rested on: many events change nothing of that. None before the first one."""

    def rest(self, basis: tuple[object, ...], until: float | None) -> None:
        """There is nothing to decide, as long as this is so, and not before then."""
        self._basis, self.until = basis, until

    def holds(self, basis: tuple[object, ...]) -> bool:
        """Whether there is still nothing to decide."""
        return self._basis == basis and not (self.until is not None and self.until <= concurrency.now())


class Decider:
    """Decides for the group, whenever this member is to. Only for the group's thread.

    Args:
        policy: says what to decide.
        member_key: this member's key.
        record: where decisions are published.
        office: the right to decide.
        members: what the policy sees of them.
        desk: where they ask beside their keys.
    """

    def __init__(
        self,
        policy: Policy,
        member_key: MemberKey,
        record: DecidedRecord,
        office: Office,
        members: MembersView,
        desk: Desk,
    ) -> None:
        self._policy, self._member_key = policy, member_key  # these never change
        self._record, self._office, self._members, self._desk = record, office, members, desk
        self._ids = -1, frozenset[str]()  # of the members, after so many changes
        self.calm_until = 0.0
        """Until then the group only takes in what happens."""
        self.reason = ""
        """Why nothing is decided, as far as this member knows; empty after a decision. Read anywhere."""
        self._last = _LastVerdict()
        self._said = ""
        """The reason that was logged last."""

    def decide(self) -> float | None:
        """Decide, if something is due; when to look again, None: when something comes in.

        Raises EtcdError and StateError: then the next step decides.
        """
        self._record.check_readable()
        self._desk.decided(self._record.known)
        if self._last.holds(self._basis(self._desk.changes)):
            return self._last.until
        if not self._desk.has_all():
            return None
        asked = self._desk.changes  # before its asks are read: more may come at any time
        basis = self._basis(asked)
        asks = self._desk.asks(self._alive(), self._members.revision)
        if (until := self._desk.catches_up(self._members.revision)) > concurrency.now():
            return until
        in_order = self._members.in_order()
        if self._members.get(self._member_key.key) is None:
            raise MemberLost(f"this member's key {self._member_key.key} is gone: it joins again")
        verdict = self._policy.decide(self._view(in_order, asks), self._member_key.id, concurrency.now())
        self.calm_until = concurrency.now() + rest(len(in_order))
        if isinstance(verdict, Wait):
            self.reason = verdict.reason
            self._desk.waits(verdict.reason)
            self.say(_with_rule(verdict))
            self._last.rest(basis, verdict.until)
            return verdict.until
        if not self._publish(verdict):
            return concurrency.now() + STEP_RETRY_PAUSE
        self.reason = ""
        self._desk.decided(self._record.known)
        if not (verdict.nothing_follows and self._record.mirror.synced):
            return concurrency.now()  # and look what follows
        self._last.rest(self._basis(asked), None)
        return None

    def _basis(self, asked: int) -> tuple[object, ...]:
        """All that a verdict rests on, but for the time; `asked` is how often the desk's asks had changed."""
        members, record = self._members, self._record
        return members.changes, members.read_at, asked, record.known, record.known_at

    def _view(self, in_order: tuple[KeyValue, ...], asks: Mapping[str, OpenAsk]) -> View:
        record, members = self._record, self._members
        return View(
            members=in_order,
            seen=members.seen(),
            changed_at=members.changed_at,
            decided=record.known,
            decided_at=record.known_at,
            read_at=members.read_at,
            revision=members.revision,
            asks=asks,
            took_at=self._office.took_at,
        )

    def _alive(self) -> frozenset[str]:
        """The ids of all members."""
        if self._ids[0] != self._members.changes:
            self._ids = self._members.changes, frozenset(member_of(kv.key) for kv in self._members.in_order())
        return self._ids[1]

    def _publish(self, decision: Publish[bytes]) -> bool:
        """T3. Who lost the office decides nothing, so what a decider read when it took the office is the last word of
        all deciders before it."""
        try:
            done = self._record.publish(decision, (self._office.guard,))
        except EtcdError:
            self._record.mirror.forget()  # it may be done, and no watch brings it to who asks by port: read it
            raise
        self.say(f"{'decided' if done else 'somebody else decided before'}: {_with_rule(decision)}")
        return done

    def fails(self, problem: str, level: int = logging.DEBUG) -> None:
        """Note and log what keeps this member from deciding."""
        self.reason = problem
        self.say(problem, level)

    def say(self, reason: str, level: int = logging.DEBUG) -> None:
        """Log the reason only when it changes."""
        if reason != self._said:
            self._said = reason
            log.log(level, "%s: %s", self._member_key.key, neutral(reason))


def rest(members: int) -> float:
    """Seconds for which a decider takes in what happens before it decides again. By the number of members, not by how
    long it took to decide: others use the processor."""
    return REST * members * max(1.0, members / RESTS_MORE_AT)


def _with_rule(verdict: Verdict[bytes]) -> str:
    return f"{verdict.reason} [{verdict.rule}]" if verdict.rule else verdict.reason


# -- a member -------------------------------------------------------------------------------------------------------


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
        desk: where members ask, beside their keys.
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
        desk: Desk | None = None,
    ) -> None:
        members = members_span(prefix)
        self._desk = desk or Desk()
        self._failed = failed  # never changes
        self._member_key = MemberKey(etcd, prefix, session)  # has a lock of its own
        self._inbox: concurrency.Queue[Task] = concurrency.inbox()
        # Only the thread, once it runs; before, the thread that enters:
        self._record = DecidedRecord(etcd, prefix, record_ttl, self._post, listener, writer=self._member_key.id)
        self._members = MembersView(etcd, members, self._post)
        self._office = Office(
            etcd,
            prefix,
            self._member_key.id,
            ttl=math.ceil(session.ttl),
            record=self._record.mirror,
            rank=rank,
            desk=self._desk,
            wake=lambda: self._inbox.put(_wake),
        )
        self._decider = Decider(policy, self._member_key, self._record, self._office, self._members, self._desk)
        self._watched = self._record.mirror.span
        """What this member is to watch; any thread."""
        self._office_key = decider_key(prefix)
        self._known_office: KeyValue | None = None
        """The key `decider`, as the desk knows it,"""
        self._office_at: float = math.inf
        """and etcd's revision at which it had that; infinite before this member has read it."""
        self._has_decider = False
        """Whether somebody else or this member decides, as far as is known; read anywhere."""
        self.heard_at = -math.inf
        """When the decider has answered this member itself; any thread."""
        self.watch_record(not self._desk.has_port)
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
        self._record.mirror.narrow(self._watched)
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

    def watch_record(self, is_needed: bool) -> None:
        """Whether this member is to watch the decided record: not while it asks the decider itself."""
        span = self._record.mirror.span
        watched = span if is_needed or not self._desk.has_port else Span(self._office_key)
        if watched != self._watched:
            self._watched = watched
            self._inbox.put(_wake)

    def wake(self) -> None:
        """Renew the lease again after a rest, and try to decide again: a member that rests does not."""
        rested = self._session.rests
        self._session.wake()
        if rested and not self._has_decider:  # no event of its watch follows from that
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
        self._tell()
        self._put_off_check()
        self._thread.start()

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
            self._tell()

    def _tell(self) -> None:
        """Have the listener know of the record, and the desk of the office, if they are new."""
        self._record.tell()
        kv, at = self._record.mirror.kvs.get(self._office_key), self._record.mirror.revision
        if kv == self._known_office and self._office_at != math.inf:
            return
        revision = kv.mod_revision if kv is not None else at
        anew, self._office_at = revision < self._office_at, revision
        self._known_office, self._has_decider = kv, False
        with suppress(StateError):  # it is replaced, see `Office`
            office = parse_office(kv.key, kv.value) if kv is not None else None
            self._has_decider = kv is not None and kv.lease != 0
            self._desk.office_is(office, revision, anew=anew)

    def _step(self) -> float:
        """Bring what is nearer to what should be; when to look again, unless something comes in."""
        if self._check_at <= concurrency.now() and not self._was_heard():
            self._look_for_missed()  # first: a record that cannot be read may be one of which a change was missed
        return min(self._check_at, self._go_on())

    def _was_heard(self) -> bool:
        """Whether the decider has answered this member itself since the last check: then that waits for the next."""
        was, self.heard_at = self.heard_at, -math.inf
        if was != -math.inf:
            self._put_off_check()
        return was != -math.inf

    def _look_for_missed(self) -> None:
        """Have all be read again: a watch may have missed a change."""
        if not self._session.rests:  # who rests waits for nothing
            self._record.mirror.forget()
            self._members.forget()
        self._put_off_check()

    def _put_off_check(self) -> None:
        """The record's watch works: it has just delivered something; or the copies were compared."""
        self._check_at = concurrency.now() + self._session.ttl * random.uniform(*CHECK_AFTER)

    def _sync(self) -> None:
        """G5. What etcd has counts, and without its own key this member is none. Raises MemberLost, and EtcdError."""
        self._record.mirror.sync()
        if not self._record.mirror.synced:  # the watch has to begin first
            return
        try:
            self._member_key.check()
        except EtcdError:
            self._record.mirror.forget()  # else the next step would take all for compared
            raise
        self._tell()

    def _to_watch(self) -> Span:
        """All where the record cannot be read: else nobody who asks by port would know when somebody deletes it."""
        return self._watched if self._record.is_readable else self._record.mirror.span

    def _go_on(self) -> float:
        watched = self._to_watch()
        self._record.mirror.narrow(watched)
        if not self._record.mirror.synced:
            self._sync()
        until = self._office.step(tries=self._record.mirror.synced and not self._session.rests)
        self._tell()  # what it read when it took the office
        if self._to_watch() != watched:
            return concurrency.now()  # begin that watch
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
