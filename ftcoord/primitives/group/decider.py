"""What a member does while it decides: it asks its policy what to decide, and publishes that."""

from __future__ import annotations

import logging
from typing import Final

from ftcoord import concurrency
from ftcoord.concurrency import STEP_RETRY_PAUSE
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.escaping import neutral
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.decided_record import DecidedRecord
from ftcoord.primitives.group.member_key import MemberKey
from ftcoord.primitives.group.members_view import MembersView
from ftcoord.primitives.group.office import Office
from ftcoord.primitives.group.policy import Policy, View

log = logging.getLogger(__name__)

REST: Final = 5e-6
"""Seconds, for each member, for which a decider takes in what happens before it decides again: several times as long as
deciding takes. So events that come one by one are decided on together. With 64 members it waits for 0.3 ms at most."""
RESTS_MORE_AT: Final = 1000
"""Members from which on each of them adds more than that: so many come one by one for seconds, on the processor that
also decides. Then the part of the time that deciding takes becomes smaller, the more they are."""


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
        prefix: the group's, for the log.
        policy: says what to decide.
        member_key: this member's key.
        record: where decisions are published.
        office: the right to decide.
        members: what the policy sees of them.
    """

    def __init__(
        self,
        prefix: str,
        policy: Policy,
        member_key: MemberKey,
        record: DecidedRecord,
        office: Office,
        members: MembersView,
    ) -> None:
        self._prefix, self._policy = prefix, policy  # these never change
        self._member_key, self._record, self._office, self._members = member_key, record, office, members
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
        basis = self._basis()
        if self._last.holds(basis):
            return self._last.until
        in_order = self._members.in_order()
        if self._members.get(self._member_key.key) is None:
            self._member_key.doubted = True  # the next step puts it back, if it is gone
            return concurrency.now() + STEP_RETRY_PAUSE
        verdict = self._policy.decide(self._view(in_order), self._member_key.id, concurrency.now())
        self.calm_until = concurrency.now() + rest(len(in_order))
        if isinstance(verdict, Wait):
            self.reason = verdict.reason
            self.say(_with_rule(verdict))
            if verdict.events:
                self._record.note(verdict.events, (self._office.guard,))
            self._last.rest(basis, verdict.until)
            return verdict.until
        stood = self._record.mirror.one
        if not self._publish(verdict):
            if self._record.mirror.one != stood:  # it may be that of a restored etcd, whose members are others
                self._members.doubt()
            return concurrency.now() + STEP_RETRY_PAUSE
        self.reason = ""
        if not (verdict.nothing_follows and self._record.mirror.synced):
            return concurrency.now()  # and look what follows
        self._last.rest(self._basis(), None)
        return None

    def _basis(self) -> tuple[object, ...]:
        """All that a verdict rests on, but for the time."""
        record = self._record
        state = record.known, record.known_at, record.vanished, record.known_roster
        return (self._members.changes, self._members.read_at, *state)

    def _view(self, in_order: tuple[KeyValue, ...]) -> View:
        record, members = self._record, self._members
        state = record.known, record.known_at, record.vanished
        return View(
            in_order,
            members.seen(),
            members.changed_at,
            *state,
            members.read_at,
            record.known_roster,
            members.departed,
            members.revision,
            record.missing_at,
            record.has_era,
        )

    def _publish(self, decision: Publish[bytes]) -> bool:
        """T3. Who lost the office decides nothing, so what a decider read when it took the office is the last word of
        all deciders before it."""
        done = self._record.publish(decision, (self._office.guard,))
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
            log.log(level, "member %s of %s: %s", self._member_key.id, self._prefix, neutral(reason))


def rest(members: int) -> float:
    """Seconds for which a decider takes in what happens before it decides again. By the number of members, not by how
    long it took to decide: others use the processor."""
    return REST * members * max(1.0, members / RESTS_MORE_AT)


def _with_rule(verdict: Verdict[bytes]) -> str:
    return f"{verdict.reason} [{verdict.rule}]" if verdict.rule else verdict.reason
