"""A participant's memberships, one after the other: each has a lease, a key in the group, and the latest record."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ftcoord import concurrency
from ftcoord.core.layout import KEY_PREFIX, OLDER_KEY_PREFIX, members_span
from ftcoord.core.lease import SessionState
from ftcoord.errors import (
    ClientClosed,
    EtcdError,
    ForkedProcessError,
    FtcoordError,
    LeaseLost,
    StateError,
    ThreadFailed,
    ThreadNotStarted,
)
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.group import Group
from ftcoord.primitives.group.member_key import MemberLost
from ftcoord.primitives.group.policy import Desk, Policy
from ftcoord.primitives.group.use import Use
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

R = TypeVar("R")
A = TypeVar("A")

TAKE_BACK_TIMEOUT: Final = 0.5
"""Seconds that taking back a request, or a lease that is of no use any more, may take. Nothing depends on either."""
BURIED_AS: Final = 20
"""Incarnations under whose ids the cause of a death is written, the last ones: others may know it by the seat that it
took as one of them."""


class Membership(Generic[R]):
    """Takes a lease and starts to watch at once; joins the group with the first `enter()`.

    Ends with `leave()`, which revokes the lease, or `orphan()`, which lets it expire.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        policy: decides while this member is the decider.
        parse: parses the decided record: `parse(key, value)`.
        changed: notified when `record`, `problem`, `failure` or `lost` may have changed. It guards them.
        ttl: the lease's TTL, in seconds.
        record_ttl: seconds that the decided record outlives the last decider.
        within: how long taking the lease and beginning the watch may take.
        rank: returns this member's place in a record; None without one.
        desk: where members ask, beside their keys.
        dies_with_process: see `ParticipantOptions`.
        was: the ids of the participant's earlier incarnations; see `Session`.
        lost: called when the lease is lost, on the keep-alive thread or the group's; must not block. Not called for a
            lease that is lost before this object is made.

    Raises EtcdError when it gets no lease or no watch, and ThreadNotStarted when no thread can renew the lease.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        policy: Policy,
        parse: Callable[[str, bytes], R],
        changed: concurrency.Condition,
        *,
        ttl: int,
        record_ttl: int,
        within: TimeLimit,
        rank: Callable[[R | None], int | None] = lambda record: None,
        desk: Desk | None = None,
        dies_with_process: bool = True,
        was: Sequence[str] = (),
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.record: R | None = None
        """The last decided record that could be read; None where etcd has none."""
        self._record_kv: KeyValue | None = None  # guarded by _changed, as the record is
        self.has_read = False
        """Whether it has read that since it joined."""
        self.problem: StateError | None = None
        """Why the record cannot be read now."""
        self.failure: EtcdError | ThreadFailed | None = None
        """The error that ended the group's thread, and this membership with it."""
        self.lost = False
        self._etcd, self._parse, self._changed = etcd, parse, changed  # never change
        self._on_lost = lost  # never changes
        self._has_group = False  # guarded by _changed
        """Whether changes of the session's state can be acted on."""
        deaths = prefix if dies_with_process else None
        self.session = Session(etcd, ttl, self._on_state, deaths=deaths, was=was, timeout=within.left())
        self.group = Group(
            etcd,
            self.session,
            prefix,
            policy,
            record_ttl,
            self._on_decided,
            failed=self._on_failure,
            rank=lambda: rank(self.record),
            desk=desk,
        )
        self.may_ask = False  # guarded by Participant._writing
        """Whether its key asks, as far as is known: a write of it may be on its way."""
        self.id = self.group.id
        self._heed_session()
        try:
            self.group.prepare(within.left())
        except EtcdError:
            self.leave(within.left())
            raise

    @property
    def record_key(self) -> str:
        """The key of the decided record."""
        return self.group.record_key

    @property
    def record_lease(self) -> int:
        """The lease that the last record is attached to; 0 for none."""
        return self._record_kv.lease if self._record_kv else 0

    @property
    def record_revision(self) -> int:
        """etcd's revision at which the last record was written; 0 before there is one."""
        return self._record_kv.mod_revision if self._record_kv else 0

    @property
    def entered(self) -> bool:
        """Whether it has a key in the group."""
        return self.group.entered

    @property
    def since(self) -> int:
        """etcd's revision at which its key was last written, as far as is known; 0 before it has one."""
        return self.group.said.mod_revision if self.group.said else 0

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        """The decider has answered this member itself, with this record."""
        self.group.heard_at = concurrency.now()
        with contextlib.suppress(StateError):  # whoever waits learns of it
            self._on_decided(KeyValue(self.record_key, value, revision, revision, 1, lease))

    def gone(self) -> None:
        """The decider does not find this member's key."""
        self._on_failure(MemberLost(f"this member's key {self.group.key} is gone: it joins again"))

    def enter(self, value: bytes, within: TimeLimit, also: Sequence[Put] = ()) -> None:
        """Join, or ask for something else, and write `also` in the same transaction.

        Raises EtcdError; after LeaseLost, make a new membership. The same applies after ThreadNotStarted: its key is
        withdrawn, since nobody would do a member's work.
        """
        try:
            self.group.enter(value, within, also)
        except LeaseLost:
            self.orphan()
            raise
        except ThreadNotStarted:
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
                self._etcd.revoke(self.session.lease_id, timeout=timeout)
            self.session.close(timeout)
            self.group.await_end(timeout)
        except (EtcdError, ForkedProcessError) as error:
            log.debug("the lease was not revoked, it expires by itself: %s", error)

    def orphan(self) -> None:
        """Stop taking part, and let the lease expire."""
        self.group.close()
        self.session.orphan()
        with self._changed:
            self.lost = True
            self._changed.notify_all()

    def _on_failure(self, error: BaseException) -> None:
        self.group.close()
        self.session.orphan()
        with self._changed:  # both at once: who is told of the failure must not find this member alive
            if isinstance(error, ClientClosed):
                self.failure = error
            elif not isinstance(error, MemberLost):  # that is no failure: the member joins again
                self.failure = ThreadFailed("takes part in a group", error)
            self.lost = True
            self._changed.notify_all()
        if isinstance(error, MemberLost):
            self._on_lost()

    def _heed_session(self) -> None:
        """Act on the session's state from now on. A lease that is already lost was lost while this process was
        suspended: the creator of this object sees that itself, so `lost` is not called."""
        with self._changed:
            self._has_group = True
        if self.session.state is SessionState.LOST:
            self.orphan()

    def _on_state(self, state: SessionState) -> None:
        with self._changed:
            if not self._has_group:
                return
        if state is SessionState.SUSPENDED:
            log.warning(
                "etcd has not renewed the lease of %s in time: training goes on, and the next round or quorum waits for"
                " etcd; if this lasts, see `ftcoord doctor`",
                self.group.key,
            )
        elif state is SessionState.CONNECTED:
            log.warning("etcd renews the lease of %s again", self.group.key)
        if state is SessionState.LOST:
            self.orphan()
            self._on_lost()

    def _on_decided(self, kv: KeyValue | None) -> None:
        try:
            record = self._parse(kv.key, kv.value) if kv else None
        except StateError as error:
            log.warning("%s", error)
            with self._changed:
                self.problem = error
                self._changed.notify_all()
            raise
        with self._changed:
            self.record, self._record_kv, self.problem, self.has_read = record, kv, None, True
            self._changed.notify_all()


class Left(FtcoordError):
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


class Incarnations(Generic[R, A]):
    """Makes the next membership when the last one is lost, and keeps its lease while somebody asks.

    Args:
        etcd, use, options, lost: see `Participant`.
        changed: the participant's. It guards all below; never held over a request.
    """

    def __init__(
        self,
        etcd: Etcd,
        use: Use[R, A],
        options: ParticipantOptions,
        changed: concurrency.Condition,
        lost: Callable[[], object],
    ) -> None:
        self._etcd, self._use, self._options, self._lost = etcd, use, options, lost  # never change
        self._changed = changed
        self.member: Membership[R] | None = None  # read anywhere; a new one only with Participant._writing held too
        """The incarnation that lives now."""
        self.ids: list[str] = []
        """Those of all of them, the present one last."""
        self._asking = 0
        self._failure: EtcdError | ThreadFailed | None = None
        """What ended a member that was replaced while a call waited."""
        self.stopped = False  # any thread; becomes True once
        """Whether no call may go on."""

    @property
    def are_asking(self) -> bool:
        """Whether a call asks now."""
        return self._asking > 0

    def check_stopped(self) -> None:
        """Raises Left once this is stopped."""
        if self.stopped:
            raise Left("this participant was stopped")

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """While somebody asks, the lease is renewed."""
        with self._changed:
            self._asking += 1
            if self._asking == 1:
                self._failure = None
            if self.member is not None and self.member.lost:
                self.member.failure = None  # it was logged, and is over: this call joins again
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                if not self._asking:  # before the next call stamps what it asks: that one counts itself first
                    self._use.nobody_asks()
                if self.member is not None and not (self._asking or self._options.keeps_lease):
                    self.member.session.rest()  # under the lock: the next call counts itself, then wakes it

    def live(self, within: TimeLimit) -> Membership[R]:
        """The incarnation that lives, with its lease kept if somebody asks: a new one if the last is lost.

        With `Participant._writing` held. Raises EtcdError, ThreadNotStarted, Left.
        """
        self.check_stopped()  # here, since whoever repeats a write that etcd does not answer calls this each time
        member = self.member
        if member is None or member.lost:
            if member is not None:
                self._note_failure(member)
                self._give_up(member, within)
            member = self._new(within)
            if not (self._options.keeps_lease or self._asking):
                member.session.rest()
        elif self._options.keeps_lease or self._asking:
            member.group.wake()
        return member

    def that_hears(self) -> Membership[R]:
        """The incarnation that lives. With `Participant._changed` held. Raises why it hears nothing any more: Left,
        StateError, EtcdError, ThreadFailed."""
        self.check_stopped()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        member = self.member
        if member is None:
            raise Left("this participant has left")
        if member.failure is not None:
            raise member.failure
        if member.problem is not None:
            raise member.problem
        return member

    def part(self) -> Membership[R] | None:
        """Have none live any more; returns the last one, for whoever ends it."""
        with self._changed:
            member, self.member = self.member, None
            self._changed.notify_all()
        return member

    def _new(self, within: TimeLimit) -> Membership[R]:
        use, options = self._use, self._options
        with self._changed:
            was = tuple(self.ids[-BURIED_AS:])
        if not was:
            _look_for_older(self._etcd, use.prefix, within)
        member = Membership(
            self._etcd,
            use.prefix,
            use.policy(),
            use.parse,
            self._changed,
            ttl=options.lease_ttl,
            record_ttl=options.record_ttl,
            within=within,
            rank=self._rank,
            desk=use.desk(),
            dies_with_process=options.dies_with_process,
            was=was,
            lost=self._lost,
        )
        with self._changed:
            stopped = self.stopped
            if not stopped:
                self.member = member
                self.ids.append(member.id)
        if stopped:  # nobody would end this membership
            self._give_up(member, within)
            self.check_stopped()
        return member

    def _rank(self, record: R | None) -> int | None:
        """The place of the present member, or of an earlier one, in a record."""
        return None if record is None else self._use.rank(record, self.ids)

    def _note_failure(self, member: Membership[R]) -> None:
        """A call under way hears of it, though another thread has this member replaced before that call looks."""
        with self._changed:
            if member.failure is not None and self._asking:
                self._failure = member.failure

    def _give_up(self, member: Membership[R], within: TimeLimit) -> None:
        """A member can be lost while its lease lives on: the others would wait for it, or for what it decides."""
        member.leave(within.left(TAKE_BACK_TIMEOUT))


def _look_for_older(etcd: Etcd, prefix: str, within: TimeLimit) -> None:
    """Log if members of an older release take part under this name: neither these nor those would know of the others.
    Under a `key_prefix` of the user's they have the same keys, which say so themselves."""
    if not prefix.startswith(f"{KEY_PREFIX}/"):
        return
    older = members_span(prefix.replace(KEY_PREFIX, OLDER_KEY_PREFIX, 1))
    try:
        found = etcd.range(Get(older, limit=1, keys_only=True), timeout=within.left()).kvs
    except EtcdError as error:  # such as a user who may not read there
        log.debug("cannot look for members of an older release: %s", error)
        return
    if found:
        log.warning(
            "%s is a member of an older release of ftcoord, which takes no part in %s: use one release in all of a job",
            neutral(found[0].key),
            prefix,
        )
