"""The memberships of one participant, one after the other: each lives under a lease of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ftcoord import concurrency
from ftcoord.errors import EtcdError, FtcoordError, ThreadFailed
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.membership import Membership
from ftcoord.primitives.group.use import Use

R = TypeVar("R")
A = TypeVar("A")

TAKE_BACK_TIMEOUT: Final = 0.5
"""Seconds that taking back a request, or a lease that is of no use any more, may take. Nothing depends on either."""
MOURNED_AS: Final = 20
"""Incarnations under whose ids the cause of a death is written, the last ones: others may know it by the seat that it
took as one of them."""


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
        history_ttl: how long the history of decisions outlives the last decider; 0 for none.
        name: what the history calls this participant.
    """

    lease_ttl: int
    record_ttl: int
    request_timeout: float
    renews: bool = True
    keeps_lease: bool = True
    dies_with_process: bool = True
    history_ttl: int = 0
    name: str = ""


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
            member.session.wake()
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
            was = tuple(self.ids[-MOURNED_AS:])
        member = Membership(
            self._etcd,
            use.prefix,
            use.policy(),
            use.parse_with_roster,
            self._changed,
            ttl=options.lease_ttl,
            record_ttl=options.record_ttl,
            within=within,
            has_roster=use.has_roster,
            history_ttl=options.history_ttl,
            dies_with_process=options.dies_with_process,
            was=was,
            lost=self._lost,
            name=options.name,
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

    def _note_failure(self, member: Membership[R]) -> None:
        """A call under way hears of it, though another thread has this member replaced before that call looks."""
        with self._changed:
            if member.failure is not None and self._asking:
                self._failure = member.failure

    def _give_up(self, member: Membership[R], within: TimeLimit) -> None:
        """A member can be lost while its lease lives on: the others would wait for it, or for what it decides."""
        member.leave(within.left(TAKE_BACK_TIMEOUT))
