"""The one mechanism of ftcoord: a group of members, and one record that the group has decided.

    <prefix>/members/<lease id>   under the member's lease: what this member asks for
    <prefix>/decided              under a lease that the decider keeps: what was decided last

The oldest live member (lowest create revision) is the decider: it mirrors the members, asks its policy what to
decide, and publishes that in a transaction guarded by `decided`'s revision and by its own membership. All others
watch `decided` and their predecessor, so a change costs O(1) events a member. Two deciders at once are harmless.

One thread a group runs `_step` until it has nothing left to do. A step only compares what should be (mirrors in
sync, a predecessor watched or the role taken, a decision published) with what is, so it may fail and be repeated
anywhere.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from ftcoord.core.layout import decided_key, member_id, member_key, members_span
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown, StateError
from ftcoord.etcd.api import Batch, Began, Delete, Etcd, Get, KeyValue, Lease, Put, RangeResult, Span, exists
from ftcoord.primitives.group.member_key import MemberKey, is_member
from ftcoord.primitives.group.policy import Policy, View
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.session import Clock, KeptLease, Session
from ftcoord.primitives.write_once import WriteOutcome, write_once

log = logging.getLogger(__name__)

RETRY: Final = 0.5
"""Seconds until a step that failed is tried again."""
AT_ONCE: Final = 1000
"""Changes that a step takes in; with many beats they may come faster than they can be applied."""

Listener: TypeAlias = Callable[[KeyValue | None], None]


class Group:
    """This process's membership in one group. Starts with `enter()`, ends with `close()`.

    Args:
        etcd: the door to etcd.
        session: the lease that this member lives under.
        prefix: the group's keys are `<prefix>/members/...` and `<prefix>/decided`.
        policy: what to decide when this member is the decider.
        record_ttl: seconds that the decided record outlives the last decider.
        listener: called with the decided record whenever it changed, on the client's thread or the group's; must not
            block. Raises StateError when it cannot be read: nothing is decided then until it is replaced or deleted, of
            which the latter is told with None.
        failed: called on the group's thread when that ends by an error of ours: this member hears nothing any more.
        restless: members change all the time what they ask for. Who waits for one of them to go is then told of that
            alone, and has to `hurry()` when nothing is decided: a stranger may have taken a dead member's key.
    """

    def __init__(
        self,
        etcd: Etcd,
        session: Session,
        prefix: str,
        policy: Policy,
        record_ttl: int,
        listener: Listener,
        clock: Clock = time.monotonic,
        *,
        failed: Callable[[], None] = lambda: None,
        restless: bool = False,
    ) -> None:
        self.id = member_id(session.lease_id)
        self._member_key = MemberKey(etcd, member_key(prefix, self.id), session)
        self._etcd, self._session, self._policy = etcd, session, policy
        self._record_ttl, self._listener, self._clock = record_ttl, listener, clock
        self._members_span = members_span(prefix)
        self._inbox: queue.SimpleQueue[tuple[Mirror, Posted] | None] = queue.SimpleQueue()
        self._decided = Mirror(etcd, Span(decided_key(prefix)), self._post)
        self._ahead: Mirror | None = None
        self._members: Mirror | None = None
        self._known: KeyValue | None = None
        self._unreadable: StateError | None = None
        self._known_at = self._changed_at = clock()
        self._noted: KeyValue | None = None
        self._seen: dict[str, tuple[KeyValue, float]] = {}
        self._record_lease: KeptLease | None = None
        self._said = ""
        self._hurried = False
        self._turn = threading.Lock()
        self._begun = 0
        self._checked = 1
        self._restless, self._failed = restless, failed
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ftcoord-group", daemon=True)

    @property
    def decided(self) -> KeyValue | None:
        """The last decided record that is known here."""
        return self._known

    @property
    def key(self) -> str:
        """This member's own."""
        return self._member_key.key

    @property
    def entered(self) -> bool:
        """Whether this member has its key."""
        return self._member_key.kv is not None

    def hurry(self, on: bool) -> None:
        """Decide too, though an older member lives, until told otherwise: that one may be stuck. Harmless."""
        if self._hurried != on:
            self._hurried = on
            self._inbox.put(None)

    def prepare(self, timeout: float) -> None:
        """Begin the watch that `enter()` needs, in `timeout` seconds. Raises EtcdError, and may then be repeated."""
        self._decided.begin(timeout)

    def enter(self, value: bytes, timeout: float) -> None:
        """Join, or change what this member asks for. `value` must be unlike all that it asked before.

        Takes `timeout` seconds for each request.

        Raises LeaseLost when the session is over, and EtcdError when etcd cannot be reached; it may then be repeated.
        """
        if not self.entered:
            self.prepare(timeout)
        newest = Get(self._members_span, keys_only=True, order="newest", limit=2)
        outcome = self._member_key.put(value, timeout, (Get(self._decided.span), newest))
        if outcome.reads:
            try:
                self._begin(outcome)
            finally:
                if self._thread.ident is None:  # may this process start no more? Without a thread this is no member
                    self._member_key.kv = None

    def enter_soon(self, value: bytes, timeout: float, done: Callable[[bool], None]) -> None:
        """As `enter()` for one that has joined: `done` is told whether it worked, see `MemberKey.put_soon`."""
        self._member_key.put_soon(value, timeout, done)

    def check(self) -> None:
        """Have this member's key put back if it is gone, though its lease is not."""
        self._begun += 1
        self._inbox.put(None)

    def close(self) -> None:
        """Stop taking part, without waiting for a call under way. The member's key stays until the session ends."""
        self._closing = True
        self._inbox.put(None)
        if self._thread.ident is None:  # else it closes all when it ends
            self._decided.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _post(self, mirror: Mirror, posted: Posted) -> None:
        if not self._apply_here(mirror, posted):
            self._inbox.put((mirror, posted))

    def _apply_here(self, mirror: Mirror, posted: Posted) -> bool:
        """What is decided concerns most members in no other way than that they hear of it: their threads sleep on.

        It may overtake what the thread has in hand: of a single key only the newest value counts.
        """
        if mirror is not self._decided or not isinstance(posted.item, Batch) or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._members is not None or self._thread.ident is None:
                return False
            self._apply(mirror, posted)
            if not mirror.synced:  # a change was missed, and only the thread reads
                self._inbox.put(None)
            return True
        finally:
            self._turn.release()

    def _begin(self, outcome: WriteOutcome) -> None:
        decided, newest = outcome.reads
        self._decided.adopt(decided)
        self._note_decided()
        assert outcome.kv is not None
        others = [kv for kv in newest.kvs if kv.key != self.key]
        if not others:
            self._members = Mirror(self._etcd, self._members_span, self._post)
        elif others[0].create_revision > outcome.kv.create_revision:
            pass  # it came before this member's write was settled: `_look_ahead` finds who was there already
        elif is_member(others[0]):
            self._follow(others[0], newest.revision)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:
            if not self._closing:  # an error of ours: better no member than one that does nothing
                log.exception("member %s leaves %s: its thread failed", self.id, self._decided.span.start)
                self._session.orphan()
                self._failed()
            for mirror in (self._decided, self._ahead, self._members):
                if mirror is not None:
                    mirror.close()
            self._drop_record_lease()

    def _run_until_closed(self) -> None:
        until: float | None = self._clock()
        while not self._closing:
            try:
                self._take(until)
                with self._turn:
                    until = self._step()
            except LeaseLost as error:
                self._say(f"a lease is gone: {error}")
                self._drop_record_lease()
                until = self._clock() + RETRY
            except (EtcdUnavailable, OutcomeUnknown) as error:
                self._say(f"cannot go on for now: {error}")
                until = self._clock() + RETRY
            except (EtcdError, StateError) as error:  # nobody may ever decide, until somebody sees to that
                self._say(f"cannot go on: {error}", logging.WARNING)
                until = self._clock() + RETRY

    def _take(self, until: float | None) -> None:
        """Wait for something to happen, at most until then, and apply it."""
        try:
            timeout = None if until is None else max(until - self._clock(), 0)
            for _ in range(AT_ONCE):
                if (item := self._inbox.get(timeout=timeout)) is None:
                    return
                with self._turn:
                    self._apply(*item)
                timeout = 0
        except queue.Empty:
            pass

    def _apply(self, mirror: Mirror, posted: Posted) -> None:
        changes = mirror.apply(posted)
        if mirror is self._decided:
            self._note_decided()
            self._begun += isinstance(posted.item, Began)
        elif mirror is self._members and mirror.synced:
            self._note_members(mirror, [change.key for change in changes])

    def _step(self) -> float | None:
        if not self._decided.synced:
            self._decided.sync()
            self._note_decided()
        if self._checked < self._begun:
            begun = self._begun
            self._member_key.restore()
            self._checked = begun
        self._see_to_hurry()
        if self._members is None:
            self._look_ahead()
        if self._members is not None and not self._members.synced:
            self._members.sync()
            if self._members.synced:
                self._note_members(self._members, {*self._members.kvs, *self._seen})
        if self._members is None or not (self._members.synced and self._decided.synced):
            return None  # what is missing is on its way to the inbox
        self._keep_record()
        return self._decide(self._members)

    def _see_to_hurry(self) -> None:
        if self._hurried and self._members is None:
            self._members = Mirror(self._etcd, self._members_span, self._post)
        elif not self._hurried and self._members is not None and self._ahead is not None:
            self._members.close()
            self._members = None
            self._drop_record_lease()

    def _look_ahead(self) -> None:
        """Make sure that the predecessor is watched; without one, become the decider."""
        if self._ahead is not None:
            if not self._ahead.synced:
                self._ahead.sync()
            if not self._ahead.synced or self._is_ahead(self._ahead.one):
                return
            self._ahead.close()
        assert self._member_key.kv is not None
        before = self._member_key.kv.create_revision
        while True:
            older = Get(self._members_span, 1, keys_only=True, order="newest", created_before=before)
            found = self._etcd.range(older)
            if found.one is None or is_member(found.one):
                break
            before = found.one.create_revision
        if found.one is not None:
            self._follow(found.one, found.revision)
        else:
            log.debug("member %s is the decider now", self.id)
            self._ahead = None
            self._members = Mirror(self._etcd, self._members_span, self._post)

    def _is_ahead(self, kv: KeyValue | None) -> bool:
        """Whether it is older. One that was deleted and put back is no more, and may follow this member."""
        assert self._member_key.kv is not None
        return kv is not None and is_member(kv) and kv.create_revision < self._member_key.kv.create_revision

    def _follow(self, predecessor: KeyValue, revision: int) -> None:
        self._ahead = Mirror(self._etcd, Span(predecessor.key), self._post, deletes_only=self._restless)
        self._ahead.adopt(RangeResult((predecessor,), 1, revision))

    def _note_decided(self) -> None:
        kv = self._decided.one
        if (kv is None and self._unreadable is None) or (kv is not None and kv == self._noted):
            return  # compared as a whole: a rewound etcd gives another record the same revision
        self._noted = kv
        try:
            self._listener(kv)
        except StateError as error:
            self._unreadable = error
            return
        self._unreadable = None
        if kv is not None:
            self._known, self._known_at = kv, self._clock()

    def _note_members(self, members: Mirror, keys: Iterable[str]) -> None:
        """Note when these came to say what they say now."""
        now = self._clock()
        for key in keys:
            kv = members.kvs.get(key)
            if kv is None:
                self._seen.pop(key, None)
            elif self._seen.get(key, (None, 0.0))[0] != kv:
                self._seen[key] = (kv, now)
            else:
                continue
            self._changed_at = now

    def _keep_record(self) -> None:
        """The decider keeps the lease of the decided record alive."""
        kv = self._decided.one
        lease_id = kv.lease if kv else 0
        if self._record_lease is not None and self._record_lease.kept and lease_id in (0, self._record_lease.id):
            return
        self._drop_record_lease()
        if lease_id:
            now = self._clock()
            self._record_lease = KeptLease(self._etcd, Lease(lease_id, self._etcd.renew(lease_id)), now)

    def _decide(self, members: Mirror) -> float | None:
        if self._unreadable is not None:
            raise self._unreadable
        in_order = tuple(sorted(filter(is_member, members.kvs.values()), key=lambda kv: kv.create_revision))
        if all(kv.key != self.key for kv in in_order):
            self._begun += 1  # the next step puts it back, if it is gone
            return self._clock() + RETRY
        seen = {key: at for key, (_, at) in self._seen.items()}
        vanished = self._known is not None and self._decided.one is None
        view = View(in_order, seen, self._changed_at, self._known, self._known_at, vanished)
        verdict = self._policy.decide(view, self.id, self._clock())
        if isinstance(verdict, Wait):
            self._say(verdict.reason)
            return verdict.until
        return self._clock() + (0 if self._publish(verdict) else RETRY)

    def _publish(self, decision: Publish[bytes]) -> bool:
        lease = self._lease_of_record()
        current = self._decided.one
        outcome = write_once(
            self._etcd,
            Put(self._decided.span.start, decision.record, lease),
            current.mod_revision if current else 0,
            guards=(exists(self.key),),
            also=[
                *(Put(key, value, lease) for key, value in decision.puts),
                *(Delete(span) for span in decision.deletes),
            ],
        )
        self._say(f"{'decided' if outcome.done else 'somebody else decided before'}: {decision.reason}")
        if outcome.kv is not None:
            self._decided.learn(outcome.kv)
            self._note_decided()
        if self._decided.one != outcome.kv:  # etcd has lost what the mirror has
            self._decided.doubt()
        return outcome.done

    def _drop_record_lease(self) -> None:
        if self._record_lease is not None:
            self._record_lease.stop()
            self._record_lease = None

    def _lease_of_record(self) -> int:
        if self._record_lease is None or not self._record_lease.kept:
            now = self._clock()
            self._record_lease = KeptLease(self._etcd, self._etcd.grant(self._record_ttl), now)
        return self._record_lease.id

    def _say(self, reason: str, level: int = logging.DEBUG) -> None:
        """Log the reason only when it changes."""
        if reason != self._said:
            self._said = reason
            log.log(level, "member %s of %s: %s", self.id, self._decided.span.start.rpartition("/")[0], reason)
