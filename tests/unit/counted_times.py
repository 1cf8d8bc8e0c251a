"""The times that a decision about rounds may rest on. All others count for nothing, and may be anything.

`core.rendezvous` looks at a time only while a rule is about it. When a member was seen to ask counts while it asks, and
when it was seen to take its seat counts while seats are taken. So two states that differ in other times only have the
same future, and one of them is enough. The models check that of each decision, see `as_at_any_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import is_
from typing import Final

from exploring import replace
from invariants import require

from ftcoord.core.rendezvous_records import NO_ROUND, Round
from ftcoord.core.round_situation import RoundCandidate, RoundSituation
from ftcoord.core.verdict import Verdict

NOW: Final = 0.0


def with_idle_times(view: RoundSituation, time: float = NOW, blind: Set[str] = frozenset()) -> RoundSituation:
    """The same situation, with this one for every time that counts for nothing.

    That is so until what the time belongs to happens again, which sets it anew:
      - `seen` of a member that neither asks, nor holds a seat for another one, nor has a seat while seats are taken: it
        counts again once the member writes;
      - `changed_at` while nobody of the last round asks again: whoever does changes it;
      - `previous_at` while a round runs, and where there is none: the next record changes it;
      - all of them once the run is closed. None here asks to go on from it. So only a vanished record opens it again,
        and only for members that never saw it, which are `blind`.
    """
    last = view.previous or NO_ROUND
    if last.closed:
        seen = [member if member.id in blind else _seen_at(member, time) for member in view.members]
        return _with(view, seen, time, time)
    taking = bool(last.seats) and not (last.ready or last.recalled)
    is_lost = any(member.ask.seated > last.number for member in view.members)
    members: list[RoundCandidate] = []
    is_back = False
    for member in view.members:
        if _asks(member, last):
            is_back = is_back or member.ask.node in last.nodes
        elif not (is_lost or member.ask.holds or (taking and member.id in last.ranks)):
            member = _seen_at(member, time)
        members.append(member)
    stands = taking or bool(last.recalled)  # a round that etcd has lost is recalled too, without seats
    return _with(view, members, view.changed_at if is_back else time, view.previous_at if stands else time)


def _seen_at(member: RoundCandidate, time: float) -> RoundCandidate:
    return member if member.seen == time else RoundCandidate(member.id, member.ask, time, member.revision)


def _with(
    view: RoundSituation, members: Sequence[RoundCandidate], changed_at: float, previous_at: float
) -> RoundSituation:
    """The same object where nothing changes, which is told at once."""
    same = all(map(is_, members, view.members))
    if same and (changed_at, previous_at) == (view.changed_at, view.previous_at):
        return view
    return replace(view, members=tuple(members), changed_at=changed_at, previous_at=previous_at)


def _asks(member: RoundCandidate, last: Round) -> bool:
    return not member.ask.holds and member.ask.after >= max(member.ask.seated, last.last_seats.get(member.id, 0))


def as_at_any_time(
    judge: Callable[[RoundSituation], Verdict[Round]], view: RoundSituation, oldest: float
) -> Verdict[Round]:
    """What it decides, when times that count for nothing are as new as they can be, and as old.

    Raises InvariantBroken if that makes a difference: then a rule looks at a time that counts for nothing here.
    """
    verdict = judge(view)
    other = with_idle_times(view, oldest)
    require("no rule looks at a time that counts for nothing", other is view or judge(other) == verdict)
    return verdict
