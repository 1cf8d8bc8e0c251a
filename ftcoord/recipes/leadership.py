"""What the one that is elected holds."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.election_records import Candidacy, Term
from ftcoord.etcd.api import Compare
from ftcoord.recipes.member import LEAVE_TIMEOUT, RecipeMember


@dataclass(frozen=True, slots=True)
class Leadership:
    """One term of this process. A context manager, which resigns at its end.

    Args:
        number: of the term; it only grows.
        fence: a guard for transactions of your own, which then have no effect once another leader was elected:
            `client.txn([leadership.fence], [Put(...)])`.
    """

    number: int
    fence: Compare
    _member: str
    _election: RecipeMember[Term, Candidacy]  # which so lives, and remains a member, for as long as this is held

    @property
    def lost(self) -> bool:
        """Whether this process knows that it leads no longer: it resigned, its lease was lost, or a later term began,
        as where its key was deleted. From memory."""
        participant = self._election.participant
        now = participant.record
        return not participant.holds(self._member) or (now is not None and now.number > self.number)

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until it is `lost`, `timeout` seconds at most; whether it is."""
        return self._election.participant.wait_for(lambda: self.lost, timeout)

    def resign(self) -> None:
        """Let the next candidate lead at once. Idempotent; never raises for an etcd that is out of reach. Does nothing
        in a forked child."""
        if self._election.is_own_process and self._election.participant.holds(self._member):
            self._election.participant.leave(LEAVE_TIMEOUT)

    def __enter__(self) -> Leadership:
        return self

    def __exit__(self, *_error: object) -> None:
        self.resign()
