"""What a decision about rounds rests on: the live members, the last round, and what the decider's user asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, TypeAlias

from ftcoord.core.history import HistoryEvent
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest, Round, Seat
from ftcoord.core.seating import FRESH, SEATING

RETURN_FACTOR: Final = 1.5
"""How much longer than the last call participants of the last round have to come back. With the defaults, 30 s and
torch's `shutdown_timeout` of 30 s, a node whose workers had to be killed would else be too late by a moment."""
MOMENT: Final = 0.5
"""Seconds within which leases that end together are gone: etcd ends those that are over twice a second."""

Restart: TypeAlias = Literal["failed", "always", "never"]
"""Which closed runs may be gone on from."""


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What the decider's user asked for, but for the limits, which are in what its members ask. Times in seconds.

    Args:
        seat_timeout: how long taking seats may last, where the last call, or `seating_time` for the round's size, is
            not longer.
        fresh: how long it counts that a member said that it takes its seat.
        return_to_seat: how long nodes have to come back to their seats when many lost their leases.
    """

    last_call_timeout: float = 30.0
    settle_timeout: float = 1.0
    recall_on_loss: bool = True
    restart: Restart = "failed"
    seat_timeout: float = SEATING
    fresh: float = FRESH
    return_to_seat: float = 0.0

    @property
    def return_timeout(self) -> float:
        """How long participants of a recalled round have to come back."""
        return self.last_call_timeout * RETURN_FACTOR


@dataclass(frozen=True, slots=True)
class RoundCandidate:
    """A live member: its id, what it asks, when the decider saw it ask that, and etcd's revision of it."""

    id: str
    ask: JoinRequest
    seen: float
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RoundSituation:
    """All that a decision rests on: the live members, oldest first, and the last decided round.

    Args:
        changed_at: when any member last came, changed or went.
        previous_at: when `previous` was first seen in its state: formed, ready, recalled or closed.
        vanished: `previous` is known, but its key is gone from etcd.
        highest: the highest number that the decider ever saw, also in records that etcd has lost since.
        read_at: when the decider read the members as a whole. What they asked then, they may have said long before.
        deaths: the causes of those that have died, by their member ids, as far as anybody has said so.
        gone_since: when the decider saw that the first of those went that have a seat in the last round and are gone.
        ends: how parts in the last round have ended, as far as anybody has said so.
        decided_revision: etcd's, at which `previous` was written in that state.
        unreadable: the ids of the live members that say what cannot be read; they are not among `members`.
        mine: the last round that the decider itself has started; etcd may have lost its record.
    """

    members: Sequence[RoundCandidate]
    changed_at: float
    previous: Round | None
    previous_at: float
    vanished: bool = False
    highest: int = 0
    read_at: float = -inf
    deaths: Mapping[str, str] = field(default_factory=dict, hash=False)
    gone_since: float = -inf
    ends: Sequence[HistoryEvent] = ()
    decided_revision: int = 0
    unreadable: Set[str] = frozenset()
    mine: AnyRound | None = None

    @property
    def unheard(self) -> Sequence[Seat]:
        """The seats of the last round whose members live and cannot be read."""
        if not self.unreadable or self.previous is None:
            return ()
        return [seat for seat in self.previous.seats if seat.member in self.unreadable]

    def was_said_since(self, member: RoundCandidate, time: float) -> bool:
        """Whether what a member asks of the last round was certainly said after that time."""
        return member.seen > time and (member.seen > self.read_at or self.previous_at > time)


def limits_of(situation: RoundSituation) -> tuple[int, int]:
    """The fewest and the most nodes of a round (R6). Zeros without members."""
    members, stated = situation.members, situation.previous.limits if situation.previous else None
    if stated is not None and any(member.ask.limits == stated for member in members):
        return stated
    return members[0].ask.limits if members else (0, 0)


def contradicts(wanted: tuple[int, int], limits: tuple[int, int]) -> str:
    """Why a node that wants other limits than the run's takes no part, to follow its host."""
    return f"was refused: its --nnodes is {spelled(wanted)}, this run's is {spelled(limits)}"


def spelled(limits: tuple[int, int]) -> str:
    """Limits as torchrun's --nnodes takes them."""
    return ":".join(map(str, dict.fromkeys(limits)))
