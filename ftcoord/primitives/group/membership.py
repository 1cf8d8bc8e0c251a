"""One incarnation of a member: a lease, a key in the group, and the latest decided record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from ftcoord import concurrency
from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.lease import TRUST_FOR, SessionState
from ftcoord.errors import (
    ClientClosed,
    EtcdError,
    ForkedProcessError,
    LeaseLost,
    StateError,
    ThreadFailed,
    ThreadNotStarted,
)
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.group import Group
from ftcoord.primitives.group.member_key import MemberLost
from ftcoord.primitives.group.policy import Policy
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

R = TypeVar("R")

SHORTEST_OUTAGE: Final = 1.0
"""Seconds without an answer, after a lease is no longer trusted, from which on the history tells of it."""


class Membership(Generic[R]):
    """Takes a lease and starts to watch at once; joins the group with the first `enter()`.

    Ends with `leave()`, which revokes the lease, or `orphan()`, which lets it expire.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        policy: decides while this member is the decider.
        parse: parses the decided record: `parse(key, value, roster)`, with None if there is no roster.
        changed: notified when `record`, `problem`, `failure` or `lost` may have changed. It guards them.
        ttl: the lease's TTL, in seconds.
        record_ttl: seconds that the decided record outlives the last decider.
        within: how long taking the lease and beginning the watch may take.
        has_roster, history_ttl: see `Group`.
        dies_with_process: see `ParticipantOptions`.
        was: the ids of the participant's earlier incarnations; see `Session`.
        lost: called when etcd says that the lease is lost, on the keep-alive thread; must not block. Not called for a
            lease that is lost before this object is made.
        name: what the history calls this member.

    Raises EtcdError when it gets no lease or no watch, and ThreadNotStarted when no thread can renew the lease.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        policy: Policy,
        parse: Callable[[str, bytes, bytes | None], R],
        changed: concurrency.Condition,
        *,
        ttl: int,
        record_ttl: int,
        within: TimeLimit,
        has_roster: bool = False,
        history_ttl: int = 0,
        dies_with_process: bool = True,
        was: Sequence[str] = (),
        lost: Callable[[], object] = lambda: None,
        name: str = "",
    ) -> None:
        self.record: R | None = None
        """The last decided record that could be read."""
        self._record_kv: KeyValue | None = None  # guarded by _changed, as the record is
        self.problem: StateError | None = None
        """Why the record cannot be read now."""
        self.failure: EtcdError | ThreadFailed | None = None
        """The error that ended the group's thread, and this membership with it."""
        self.lost = False
        self._etcd, self._parse, self._changed = etcd, parse, changed  # never change
        self._on_lost, self._name, self._ttl = lost, name, ttl  # never change
        self._suspended_at = math.inf  # only the keep-alive thread
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
            has_roster=has_roster,
            history_ttl=history_ttl,
        )
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

    def enter(self, value: bytes, within: TimeLimit) -> None:
        """Join, or ask for something else.

        Raises EtcdError; after LeaseLost, make a new membership. The same applies after ThreadNotStarted: its key is
        withdrawn, since nobody would do a member's work.
        """
        try:
            self.group.enter(value, within)
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
            self._suspended_at = concurrency.now()
            log.warning(
                "etcd has not renewed the lease of %s in time: training goes on, and the next round or quorum waits for"
                " etcd; if this lasts, see `ftcoord doctor`",
                self.group.key,
            )
        elif state is SessionState.CONNECTED:
            log.warning("etcd renews the lease of %s again", self.group.key)
            self._note_outage(concurrency.now() - self._suspended_at)
        if state is SessionState.LOST:
            self.orphan()
            self._on_lost()

    def _note_outage(self, seconds: float) -> None:
        """Have the history tell of it, unless this process was stopped: then etcd answers at once."""
        if seconds < SHORTEST_OUTAGE:
            return
        lasted = f"{seconds + self._ttl * TRUST_FOR:.0f} s"
        wall_ms = int(concurrency.wall() * 1000)
        reason = f"etcd did not answer {self._name} for {lasted}"
        self.group.note(HistoryEvent("outage", 0, self._name, reason=reason, by=self.id, wall_ms=wall_ms))

    def _on_decided(self, kv: KeyValue | None, roster: KeyValue | None) -> None:
        try:
            record = self._parse(kv.key, kv.value, roster.value if roster else None) if kv else self.record
        except StateError as error:
            log.warning("%s", error)
            with self._changed:
                self.problem = error
                self._changed.notify_all()
            raise
        with self._changed:
            self.record, self.problem = record, None
            if kv is not None:  # else it was deleted: the last one still counts, and its lease may live
                self._record_kv = kv
            self._changed.notify_all()
