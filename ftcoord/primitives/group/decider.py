"""What a member does while it decides: it asks its policy what to decide, and publishes that."""

from __future__ import annotations

import logging
from typing import Final

from ftcoord import concurrency
from ftcoord.concurrency import STEP_RETRY_PAUSE
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.escaping import neutral
from ftcoord.etcd.api import KeyValue, exists, unchanged
from ftcoord.primitives.group.decided_record import DecidedRecord
from ftcoord.primitives.group.member_key import MemberKey
from ftcoord.primitives.group.members_view import MembersView
from ftcoord.primitives.group.policy import Policy, View
from ftcoord.primitives.group.succession import Succession

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
        succession: is told of each decision, and when there is none to make.
        members: what the policy sees of them.
    """

    def __init__(
        self,
        prefix: str,
        policy: Policy,
        member_key: MemberKey,
        record: DecidedRecord,
        succession: Succession,
        members: MembersView,
    ) -> None:
        self._prefix, self._policy = prefix, policy  # these never change
        self._member_key, self._record, self._succession, self._members = member_key, record, succession, members
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
            return self._succession.rest(self._last.until)
        in_order = self._members.in_order()
        mine = self._members.get(self._member_key.key)
        if mine is None:
            self._member_key.doubted = True  # the next step puts it back, if it is gone
            return concurrency.now() + STEP_RETRY_PAUSE
        verdict = self._policy.decide(self._view(in_order), self._member_key.id, concurrency.now())
        self.calm_until = concurrency.now() + rest(len(in_order))
        if isinstance(verdict, Wait):
            self.reason = verdict.reason
            self.say(_with_rule(verdict))
            if verdict.events:
                self._record.note(verdict.events, (exists(self._member_key.key),))
            self._last.rest(basis, verdict.until)
            return self._succession.rest(verdict.until)
        before, stood = self._record.known, self._record.mirror.one
        if not self._publish(verdict, mine):
            if self._record.known != before:
                self._succession.was_overtaken()
            if self._record.mirror.one != stood:  # it may be that of a restored etcd, whose members are others
                self._members.doubt()
            return concurrency.now() + STEP_RETRY_PAUSE
        self.reason = ""
        self._succession.has_decided()
        if not (verdict.nothing_follows and self._record.mirror.synced):
            return concurrency.now()  # and look what follows
        self._last.rest(self._basis(), None)
        return self._succession.rest(None)

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

    def _publish(self, decision: Publish[bytes], mine: KeyValue) -> bool:
        """`mine` is this member's key as the decision knows it, and must still be so.

        Who lost its membership decides nothing. And after others have decided, the record may be as it was: somebody
        deletes it, or restores etcd from a backup. A decision that was sent before must not count then.
        """
        done = self._record.publish(decision, (unchanged(mine.key, mine.mod_revision),))
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
