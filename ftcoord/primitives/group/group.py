"""The one mechanism of ftcoord: a group of members, and one record that the group has decided.

    <prefix>/members/<lease id>   under the member's lease: what this member asks for
    <prefix>/decided              under a lease that the decider keeps: what was decided last
    <prefix>/decider              under a lease of its own: who decides

The member that holds the office (`decider`) mirrors the members, asks its policy what to decide, and publishes that in
a transaction guarded by the revision of `decided` and the value of `decider`. All others watch these two keys, so a
change costs O(1) events per member.

One thread per group runs `_step` until there is nothing left to do. A step only compares what should be (mirrors in
sync, the office filled, a decision published) with what is, so it may fail and be repeated anywhere.

From top to bottom: the decider's view of the members; the decider; the member's own key; the member, with its thread.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from ftcoord import concurrency
from ftcoord.concurrency import STEP_RETRY_PAUSE
from ftcoord.core import layout
from ftcoord.core.asks import OpenAsk
from ftcoord.core.layout import Span
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, StateError
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, is_member
from ftcoord.etcd.retry import UNANSWERED, TimeLimit
from ftcoord.primitives.group.record import DecidedRecord, Listener, Office
from ftcoord.primitives.group.use import Desk, Policy, Use, View
from ftcoord.primitives.mirror import Apply, Mirror
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import WriteOutcome, write_once

log = logging.getLogger(__name__)

Task: TypeAlias = Callable[[], object]
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

    def __init__(self, etcd: Etcd, span: Span, post: Callable[[Task], None]) -> None:
        self._start = span.start  # never changes, nor does the next
        self._make_mirror = partial(Mirror, etcd, span, lambda apply: post(partial(self._take_in, apply)))
        self.mirror: Mirror | None = None
        self.changed_at = self.read_at = concurrency.now()
        """When a member last came, changed or went; and when all were last read: what that found may be old."""
        self.changes = 0
        """How often a member came, changed or went."""
        self._kvs: dict[str, KeyValue] = {}
        """The values that were seen last,"""
        self._seen_at: dict[str, float] = {}
        """and when each was seen first."""
        self._members: dict[str, KeyValue] = {}
        """Those of them that are members, by id. A change costs O(1): they come in the order in which they are kept."""
        self._is_in_order = True
        self._has_warned = False

    @property
    def revision(self) -> int:
        """The revision of etcd up to which it has seen everything."""
        return self.mirror.revision if self.mirror is not None else 0

    @property
    def ids(self) -> KeysView[str]:
        """The members' ids."""
        return self._members.keys()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    def forget(self) -> None:
        """Have the next `sync()` read all members."""
        if self.mirror is not None:
            self.mirror.forget()

    def sync(self) -> bool:
        """Watch, and make one step towards a true copy; whether it is one. Raises EtcdError, and may then be called
        again."""
        if self.mirror is None:
            self.mirror = self._make_mirror()
        if not self.mirror.synced:
            self.mirror.sync()
            if self.mirror.synced:
                self.read_at = concurrency.now()
                self._note(self.mirror, {*self.mirror.kvs, *self._kvs})
                self._warn_of_strangers(self.mirror)
        return self.mirror.synced

    def _warn_of_strangers(self, mirror: Mirror) -> None:
        count = len(mirror.kvs) - len(self._members)
        if count and not self._has_warned:
            self._has_warned = True
            text = "%d keys below %r are ignored: they are no members, which have the names of their leases; find out"
            log.warning(f"{text} who writes them", count, self._start)

    def _take_in(self, apply: Apply) -> None:
        changes, mirror = apply(), self.mirror
        if mirror is not None and mirror.synced:
            self._note(mirror, (change.key for change in changes))

    def in_order(self) -> tuple[KeyValue, ...]:
        """The members' keys, oldest first."""
        if not self._is_in_order:
            self._members = dict(sorted(self._members.items(), key=lambda item: item[1].create_revision))
            self._is_in_order = True
        return tuple(self._members.values())

    def seen(self) -> dict[str, float]:
        """For each key, when its present value was first seen."""
        return self._seen_at.copy()

    def _note(self, mirror: Mirror, keys: Iterable[str]) -> None:
        now = concurrency.now()
        for key in keys:
            kv = mirror.kvs.get(key)
            if kv == self._kvs.get(key):
                continue
            if kv is None:
                del self._kvs[key], self._seen_at[key]
            else:
                self._kvs[key], self._seen_at[key] = kv, now
            self._list(key.removeprefix(self._start), kv)
            self.changed_at = now
            self.changes += 1

    def _list(self, member: str, kv: KeyValue | None) -> None:
        """Note the new state of a key among the members."""
        before = self._members.get(member)
        if before is not None and (kv is None or kv.create_revision != before.create_revision):
            del self._members[member]
        if kv is None or not is_member(kv):
            self._members.pop(member, None)
            return
        if member not in self._members and self._members:
            newest = next(reversed(self._members.values()))
            self._is_in_order &= newest.create_revision < kv.create_revision
        self._members[member] = kv


class Decider:
    """Decides for the group, whenever this member is to. Only for the group's thread.

    Args:
        policy: says what to decide.
        me: this member's id.
        record: where decisions are published.
        office: the right to decide.
        members: what the policy sees of them.
        desk: where they ask beside their keys.
    """

    def __init__(
        self, policy: Policy, me: str, record: DecidedRecord, *, office: Office, members: MembersView, desk: Desk
    ) -> None:
        self._policy, self._me, self._record = policy, me, record  # these never change
        self._office, self._members, self._desk = office, members, desk
        self.calm_until = 0.0
        """Until then the group only takes in what happens."""
        self.reason = ""
        """Why nothing is decided, as far as this member knows; empty after a decision. Read anywhere."""
        self._rests: tuple[object, float | None] = None, None
        """What the last verdict to wait rested on, and until when; None: until that changes. Many events do not."""
        self._said = ""
        """The reason that was logged last."""

    def decide(self) -> float | None:
        """Decide, if something is due; when to look again, None: when something comes in.

        Raises EtcdError and StateError: then the next step decides.
        """
        members, desk = self._members, self._desk
        if self._record.unreadable is not None:
            raise self._record.unreadable
        desk.decided(self._record.known)
        basis, until = self._rests
        if basis == self._basis(desk.changes) and (until is None or until > concurrency.now()):
            return until
        if not desk.has_all():
            return None
        asked = desk.changes  # before its asks are read: more may come at any time
        basis = self._basis(asked)
        asks = desk.asks(members.ids, members.revision)
        if (until := desk.catches_up(members.revision)) > concurrency.now():
            return until
        if self._me not in members.ids:
            raise MemberLost(f"the key of member {self._me} is gone: it joins again")
        verdict = self._policy.decide(self._view(asks), self._me, concurrency.now())
        self.calm_until = concurrency.now() + rest(len(members.ids))
        if isinstance(verdict, Wait):
            self.reason = verdict.reason
            desk.waits(verdict.reason)
            self.say(_with_rule(verdict))
            self._rests = basis, verdict.until
            return verdict.until
        if not self._publish(verdict):
            return concurrency.now() + STEP_RETRY_PAUSE
        self.reason = ""
        desk.decided(self._record.known)
        if not (verdict.nothing_follows and self._record.mirror.synced):
            return concurrency.now()  # and look what follows
        self._rests = self._basis(asked), None
        return None

    def _basis(self, asked: int) -> tuple[object, ...]:
        """All that a verdict rests on, but for the time; `asked` is how often the desk's asks had changed."""
        return self._members.changes, self._members.read_at, asked, self._record.known, self._record.known_at

    def _view(self, asks: Mapping[str, OpenAsk]) -> View:
        return View(
            members=self._members.in_order(),
            seen=self._members.seen(),
            changed_at=self._members.changed_at,
            decided=self._record.known,
            decided_at=self._record.known_at,
            read_at=self._members.read_at,
            revision=self._members.revision,
            asks=asks,
            took_at=self._office.took_at,
        )

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

    def fails(self, problem: str, level: int) -> None:
        """Note and log what keeps this member from deciding."""
        self.reason = problem
        self.say(problem, level)

    def say(self, reason: str, level: int = logging.DEBUG) -> None:
        """Log the reason only when it changes."""
        if reason != self._said:
            self._said = reason
            log.log(level, "member %s of %s: %s", self._me, self._record.mirror.span.start, neutral(reason))


def rest(members: int) -> float:
    """Seconds for which a decider takes in what happens before it decides again. By the number of members, not by how
    long it took to decide: others use the processor."""
    return REST * members * max(1.0, members / RESTS_MORE_AT)


def _with_rule(verdict: Verdict[bytes]) -> str:
    return f"{verdict.reason} [{verdict.rule}]" if verdict.rule else verdict.reason


# -- a member -------------------------------------------------------------------------------------------------------


class MemberLost(LeaseLost):
    """This member's own key is gone, or is not what it wrote: that is a lost lease, whatever the lease says (G5)."""


class MemberKey:
    """A member's own key, attached to the lease that it is named after: what it asks for. Without it there is no member
    (G5). Thread-safe; one write at a time.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        session: the member's lease.
    """

    def __init__(self, etcd: Etcd, prefix: str, session: Session) -> None:
        self.id = layout.member_id(session.lease_id)
        self.key = layout.member_key(prefix, self.id)
        self._etcd, self._session = etcd, session
        self._writing = concurrency.lock("MemberKey._writing")
        """Held during a write, so that the next one knows what it replaces."""
        self.kv: KeyValue | None = None  # guarded by _writing; read anywhere
        """Its value, as far as is known; None before the member joined."""
        self._sent: tuple[bytes, ...] = ()  # the same
        """The values that were sent since then. etcd may have any of them: their answers were lost."""

    def put(
        self, value: bytes, within: TimeLimit, first_reads: Sequence[Get], also: Sequence[Put] = ()
    ) -> WriteOutcome:
        """Write a value unlike all earlier ones, and `also` in the same transaction.

        The first time the outcome has the `first_reads`; later there are none. Raises LeaseLost, and EtcdError.
        """
        put = Put(self.key, value, self._session.lease_id)
        late = EtcdUnavailable(f"etcd has not answered what was written to {self.key} before")
        with concurrency.held(self._writing, concurrency.now() + within.left(), late):
            self._sent = *self._sent, value
            reads = first_reads if self.kv is None else ()
            outcome = write_once(self._etcd, put, self.kv, also=also, reads=reads, timeout=within.left())
            if not outcome.done and outcome.kv is not None and outcome.kv.lease == put.lease:
                # Ours after all: an earlier call's, whose outcome was unknown.
                outcome = write_once(self._etcd, put, outcome.kv, also=also, reads=reads, timeout=within.left())
            if not outcome.done:
                raise LeaseLost(f"this member's key {self.key} is gone, or somebody else wrote it: join again")
            self.kv, self._sent = outcome.kv, ()
            return outcome

    def check(self) -> None:
        """Compare it with etcd's. Raises MemberLost, and EtcdError.

        By values: after a restore of etcd from a backup revisions say nothing.
        """
        before = self.kv, self._sent
        now = self._etcd.range(Get(Span(self.key))).one
        kv, sent = before
        if kv is None or (self.kv, self._sent) != before:  # written meanwhile: etcd has just compared it
            return
        if now is None or not is_member(now) or now.value not in (kv.value, *sent):
            raise MemberLost(f"this member's key {self.key} is gone, or somebody else wrote it: it joins again")


class Group:
    """The part of a member that its thread runs: it watches, takes the office, decides, and notices lost keys.

    Begins with `prepare()` and `enter()`, ends with `close()`.

    Args:
        etcd: the etcd client.
        session: the lease that this member lives under.
        use: what the group is about.
        record_ttl: seconds that the decided record outlives the last decider.
        listener: called with the decided record whenever it changed, on the group's thread, and by `enter()` before
            that runs; must not block. Raises StateError when it cannot be read: then nothing is decided until somebody
            replaces or deletes the key. A deletion is reported as None.
        failed: called with the error, on the group's thread, when that thread ends by one. This member is deaf then, so
            its session must end.
        rank: returns this member's place in the last record; None without one.
    """

    def __init__(
        self,
        etcd: Etcd,
        session: Session,
        use: Use[Any, Any],
        record_ttl: int,
        *,
        listener: Listener,
        failed: Callable[[BaseException], None],
        rank: Callable[[], int | None],
    ) -> None:
        self.own = MemberKey(etcd, use.prefix, session)
        """This member's key. It has a lock of its own."""
        self._session, self._failed, desk = session, failed, use.desk()  # never change
        self._inbox: concurrency.Queue[Task] = concurrency.inbox()
        # Only the thread, once it runs; before, the thread that enters:
        self._record = DecidedRecord(
            etcd,
            use.prefix,
            record_ttl,
            post=lambda apply: self._inbox.put(partial(self._take_in, apply)),
            listener=listener,
            writer=self.own.id,
        )
        self._members = MembersView(etcd, layout.members_span(use.prefix), self._inbox.put)
        self._office = Office(
            etcd,
            use.prefix,
            self.own.id,
            ttl=math.ceil(session.ttl),
            record=self._record.mirror,
            rank=rank,
            desk=desk,
            wake=self._wake,
        )
        self._decider = Decider(
            use.policy(), self.own.id, self._record, office=self._office, members=self._members, desk=desk
        )
        # Any thread:
        self._has_port = desk.has_port  # never changes
        self._watches_record = not desk.has_port
        """Whether this member is to watch the decided record, beside `decider`."""
        self._check_at = math.inf
        """When to compare the copies with etcd next, unless a decision comes before; never before this member joined.

        A watch may miss a change (in a process that forks with gRPC's own handlers), and the next change reveals that.
        But the missed one may be the last: a recall of this member, or the request of the member that a decider waits
        for."""
        self._closing = False  # only ever becomes true
        self._thread = concurrency.thread(self._run, "ftcoord-group")

    @property
    def record_key(self) -> str:
        """The decided record's."""
        return self._record.mirror.span.start

    @property
    def reason(self) -> str:
        """Why nothing is decided, as far as this member knows; empty after a decision."""
        return self._decider.reason

    def prepare(self, timeout: float) -> None:
        """Begin the watch that `enter()` needs, in `timeout` seconds. Raises EtcdError, and may then be repeated."""
        self._record.mirror.narrow(self._to_watch())
        self._record.mirror.begin(timeout)

    def enter(self, value: bytes, within: TimeLimit, also: Sequence[Put] = ()) -> None:
        """Join, or change what this member asks for, and write `also` with it. `value` must be unlike all that it asked
        before.

        Raises LeaseLost when the session is over, and EtcdError when etcd cannot be reached; it may then be repeated.
        Raises ThreadNotStarted: then this is no member, since nobody would do a member's work.
        """
        if self.own.kv is None:
            self.prepare(within.left())
        outcome = self.own.put(value, within, (Get(self._record.mirror.span),), also)
        if outcome.reads:
            self._record.mirror.adopt(outcome.reads[0])
            self._tell()
            self.put_off_check()
            self._thread.start()

    def watch_record(self, is_needed: bool) -> None:
        """Whether this member is to watch the decided record: not while it asks the decider itself."""
        if is_needed != self._watches_record and self._has_port:
            self._watches_record = is_needed
            self._wake()

    def wake(self) -> None:
        """Renew the lease again after a rest, and try to decide again: a member that rests does not."""
        rested = self._session.rests
        self._session.wake()
        if rested:  # no event of its watch follows from that
            self._wake()

    def put_off_check(self) -> None:
        """The copies were compared, or something has just come: the watch delivers, or the decider has answered."""
        self._check_at = concurrency.now() + self._session.ttl * random.uniform(*CHECK_AFTER)

    def await_end(self, timeout: float) -> None:
        """Wait until the thread has ended after `close()`, and has given the office up; at most `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        """Stop taking part, without waiting for a call under way. The member's key stays until the session ends."""
        self._closing = True
        self._wake()
        if self._thread.ident is None:  # else it closes all when it ends
            self._record.mirror.close()

    def _wake(self) -> None:
        """The thread looks at what there is to do after each task."""
        self._inbox.put(_nothing)

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
                    log.exception("member %s leaves %s: its thread failed", self.own.id, self.record_key)
                self._failed(failure)
            self._record.close()
            self._members.close()
            self._office.give_up()

    def _run_until_closed(self) -> None:
        until = concurrency.now()
        while not self._closing:
            try:
                self._take(until)
                until = self._step()
            except (ClientClosed, MemberLost):
                raise
            except (EtcdError, StateError) as error:
                if isinstance(error, LeaseLost):
                    self._record.drop_lease()
                # Of others than these nobody may ever decide, until somebody sees to that.
                passes = isinstance(error, (*UNANSWERED, LeaseLost))
                self._decider.fails(f"cannot go on: {error}", logging.DEBUG if passes else logging.WARNING)
                until = concurrency.now() + STEP_RETRY_PAUSE

    def _take(self, until: float) -> None:
        """Wait for something to happen, at most until then, and apply it, with all that comes while this member rests
        from its last decision: of many events that come one by one, many are decided on at once."""
        try:
            timeout = None if until == math.inf else max(until - concurrency.now(), 0)
            for _ in range(CHANGES_PER_STEP):
                self._inbox.get(timeout=timeout)()
                timeout = max(self._decider.calm_until - concurrency.now(), 0)
        except concurrency.Empty:
            pass

    def _take_in(self, apply: Apply) -> None:
        if apply():  # what this member decides itself is known before its watch tells
            self.put_off_check()
        self._tell()

    def _tell(self) -> None:
        """Have the listener know of the record, and the desk of the office, if they are new."""
        self._record.tell()
        self._office.tell()

    def _to_watch(self) -> Span:
        """All where the record cannot be read: else nobody who asks by port would know when somebody deletes it."""
        needs_all = self._watches_record or self._record.unreadable is not None
        return self._record.mirror.span if needs_all else Span(self._office.key)

    def _step(self) -> float:
        """Bring what is nearer to what should be; when to look again, unless something comes in."""
        mirror = self._record.mirror
        if self._check_at <= concurrency.now():  # first: what cannot be read may be what follows a missed change
            if not self._session.rests:  # who rests waits for nothing
                mirror.forget()
                self._members.forget()
            self.put_off_check()
        mirror.narrow(watched := self._to_watch())
        if not mirror.synced:
            self._sync(mirror)
        until = min(self._office.step(tries=mirror.synced and not self._session.rests), self._check_at)
        self._tell()  # what it read when it took the office
        if self._to_watch() != watched:
            return concurrency.now()  # begin that watch
        if not self._office.is_held:
            self._members.close()
            self._record.drop_lease()
            return until
        if self._members.mirror is None:
            self._decider.say("decides from now on")
        if not (self._members.sync() and mirror.synced):
            return until  # what is missing is on its way to the inbox
        self._record.keep_lease()
        due = self._decider.decide()
        return until if due is None else min(until, due)

    def _sync(self, mirror: Mirror) -> None:
        """G5. What etcd has counts, and without its own key this member is none. Raises MemberLost, and EtcdError."""
        mirror.sync()
        if not mirror.synced:  # the watch has to begin first
            return
        try:
            self.own.check()
        except EtcdError:
            mirror.forget()  # else the next step would take all for compared
            raise
        self._tell()


def _nothing() -> None:
    pass
