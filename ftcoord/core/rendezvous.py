"""Who takes part in the next round, and when: the decisions of a rendezvous, pure.

Rules
  1. A run starts without a round; each decided round replaces the one before and has the next number.
  2. A running round is recalled when a participant is gone or comes back for another round, or when somebody
     waits while there is room. Recalling only tells the participants to come back; it changes no membership.
  3. The next round forms among the members that ask for it. It is complete
       - at once, when every seat is taken and no participant of the last round is still to come back;
       - when the settle time-out has passed without change and all live participants of the last round are back;
       - when the last call, which starts as soon as there are `min_nodes`, is over.
     Seats of participants that are still to come back are kept free until then. Who is not back by the end of the last
     call is away: it has no seat, and asks for none before it comes back.
  4. Participants of the last round go before newcomers. They keep their ranks where the new size allows, and
     rank 0 is one of them: newcomers fill the gaps.
  5. A closed run stays closed.

Times are the decider's own monotonic seconds, from when it saw the thing happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ftcoord.core.records import Ask, Away, Round, Seat


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. Times in seconds."""

    min_nodes: int
    max_nodes: int
    last_call_timeout: float = 30.0
    settle_timeout: float = 1.0
    recall_on_loss: bool = True


@dataclass(frozen=True, slots=True)
class Member:
    """A live member: its id, what it asks, and when the decider saw it ask that."""

    id: str
    ask: Ask
    seen: float


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision rests on: the live members, oldest first, and the last decided round.

    Args:
        changed_at: when any member last came, changed or went.
        previous_at: when `previous` was first seen.
        vanished: `previous` is known, but its key is gone from etcd.
    """

    members: Sequence[Member]
    changed_at: float
    previous: Round | None
    previous_at: float
    vanished: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Make this the decided record."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Decide nothing now, and not before `until` unless something changes (None: only then)."""

    reason: str
    until: float | None = None


Verdict: TypeAlias = "Decision | Waiting"


def decide(situation: Situation, options: Options, now: float) -> Verdict:
    """What to do now. Depends on nothing but its arguments."""
    previous = situation.previous
    if previous is None:
        return _form(situation, options, now, list(situation.members), [])
    if previous.closed and not situation.vanished:
        return Waiting("the run is closed")
    if situation.vanished:
        return _recall(previous, "its record vanished from etcd", 0)
    asking = [member for member in situation.members if member.ask.after >= previous.last_seat_of(member.id)]
    busy = [member for member in situation.members if member.ask.after < previous.last_seat_of(member.id)]
    if not previous.recalled:
        return _judge_running(previous, busy, asking, options)
    return _form(situation, options, now, asking, busy)


def _judge_running(previous: Round, busy: Sequence[Member], asking: Sequence[Member], options: Options) -> Verdict:
    running = [member for member in busy if previous.rank_of(member.id) is not None]
    back = [member for member in asking if previous.rank_of(member.id) is not None]
    new = len(asking) - len(back)
    live = {member.id for member in (*running, *back)}
    gone = [seat for seat in previous.seats if seat.member not in live]
    if back:
        return _recall(previous, f"{_names(member.ask.host for member in back)} came back for a new round", new)
    if gone and (options.recall_on_loss or not running):
        return _recall(previous, f"{_names(seat.host for seat in gone)} is gone", new)
    if new and len(previous.seats) - len(gone) < options.max_nodes:
        return _recall(previous, f"{_names(member.ask.host for member in asking)} waits to join", new)
    return Waiting(f"round {previous.number} is running on {len(running)} nodes")


def _recall(previous: Round, reason: str, waiting: int) -> Decision:
    return Decision(replace(previous, recalled=reason, waiting=waiting), f"round {previous.number} recalled: {reason}")


def _form(
    situation: Situation, options: Options, now: float, asking: Sequence[Member], busy: Sequence[Member]
) -> Verdict:
    """The next round, or why not yet; `busy` are the members that still have an earlier one to end."""
    previous = situation.previous
    nodes_before = [seat.node for seat in previous.seats] if previous else []
    back = [member for member in asking if member.ask.node in nodes_before]
    if len(asking) < options.min_nodes:
        return Waiting(f"{len(asking)} of at least {options.min_nodes} nodes are there")
    still_out = sum(1 for member in busy if previous and previous.rank_of(member.id) is not None)
    full = len(asking) >= options.max_nodes
    if full and not still_out:
        return _complete(situation, options, asking, busy)
    until, why = _last_call_end(situation, options, asking), "the last call"
    if back and not still_out:
        until, why = min(until, situation.changed_at + options.settle_timeout), "the settle time-out"
    if now >= until:
        return _complete(situation, options, asking, busy)
    return Waiting(f"{len(asking)} nodes are there, {still_out} still to come back; {why} runs", until)


def _last_call_end(situation: Situation, options: Options, asking: Sequence[Member]) -> float:
    """The last call starts when there are enough members, but not before the last round was recalled."""
    enough_at = sorted(member.seen for member in asking)[options.min_nodes - 1]
    recalled_at = situation.previous_at if situation.previous else enough_at
    return max(enough_at, recalled_at) + options.last_call_timeout


def _complete(situation: Situation, options: Options, asking: Sequence[Member], busy: Sequence[Member]) -> Decision:
    previous = situation.previous
    nodes_before = [seat.node for seat in previous.seats] if previous else []
    back = sorted(
        (member for member in asking if member.ask.node in nodes_before),
        key=lambda member: nodes_before.index(member.ask.node),
    )
    new = [member for member in asking if member.ask.node not in nodes_before]
    chosen = (back + new)[: options.max_nodes]
    ranked = _rank(chosen, nodes_before)
    latest = max([member.ask.after for member in situation.members], default=0)
    number = max(latest, previous.number if previous else 0) + 1
    away = tuple(Away(member.id, previous.last_seat_of(member.id)) for member in busy) if previous else ()
    first = ranked[0].ask
    seats = tuple(Seat(member.id, member.ask.node, member.ask.host) for member in ranked)
    return Decision(Round(number, seats, first.address, first.port, away), f"round {number} on {len(seats)} nodes")


def _rank(chosen: Sequence[Member], nodes_before: Sequence[str]) -> list[Member]:
    """Order the members of a round by rank; `chosen` has those of the last round first, in its rank order."""
    places: list[Member | None] = [None] * len(chosen)
    homeless = []
    for index, member in enumerate(chosen):
        rank = nodes_before.index(member.ask.node) if member.ask.node in nodes_before else len(chosen)
        wanted = 0 if index == 0 else rank
        if wanted < len(chosen) and places[wanted] is None:
            places[wanted] = member
        else:
            homeless.append(member)
    rest = iter(homeless)
    return [place if place is not None else next(rest) for place in places]


def _names(hosts: Iterable[str]) -> str:
    names = sorted(set(hosts))
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
