"""What an elected leader holds."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.election_records import Candidacy, Term
from ftcoord.etcd.api import Compare
from ftcoord.recipes.member import LEAVE_TIMEOUT, RecipeMember


@dataclass(frozen=True, slots=True)
class Leadership:
    """A term that this process leads. A context manager, which resigns when the block ends.

    Args:
        number: the term's number; later terms have higher numbers.
        fence: a guard for your own transactions. They have no effect once another leader was elected:
            `client.txn([leadership.fence], [Put(...)])`.
    """

    number: int
    fence: Compare
    _member: str
    _election: RecipeMember[Term, Candidacy]  # which so lives, and remains a member, for as long as this is held

    @property
    def lost(self) -> bool:
        """Whether this process knows that it no longer leads: it resigned, its lease was lost, or a later term began
        (for example because its key was deleted). Costs no request."""
        participant = self._election.participant
        now = participant.record
        return not participant.holds(self._member) or (now is not None and now.number > self.number)

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until the leadership is `lost`; returns whether it is. Waits `timeout` seconds; None waits forever."""
        return self._election.participant.wait_for(lambda: self.lost, timeout)

    def resign(self) -> None:
        """Let the next candidate lead at once. Idempotent; does nothing in a forked child.

        Takes up to 2 s if etcd is unreachable, and does not raise then: the lease expires.
        """
        if self._election.is_own_process and self._election.participant.holds(self._member):
            self._election.participant.leave(LEAVE_TIMEOUT)

    def __enter__(self) -> Leadership:
        return self

    def __exit__(self, *_error: object) -> None:
        self.resign()
