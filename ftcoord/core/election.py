"""Who leads: one candidate at a time, pure.

Rules
  E1 leading. The leader of the last term leads as long as it is a member. A record that vanished is put back.
  E2 next term. Else the oldest candidate leads the next term. Terms only grow: the number is higher than all that the
     decider, or any candidate, ever heard of. If one of them heard of a later term than the record's, etcd has lost
     that, and the record's leader is none: its term was over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from ftcoord.core.election_records import Candidacy, Term
from ftcoord.core.outlook import Next, Outlook, Standing
from ftcoord.core.situation import Situation
from ftcoord.core.verdict import Publish, Verdict, Wait

RULES: Final = ("E1 leading", "E2 next term")
"""The rules above, as verdicts name them."""
LEADING, NEXT_TERM = RULES

ElectionSituation: TypeAlias = Situation[Term, Candidacy]


def decide(situation: ElectionSituation) -> Verdict[Term]:
    """What to do now."""
    last = situation.previous
    known = max(situation.highest, *(one.ask.after for one in situation.members), 0)
    live = situation.unreadable | {one.member for one in situation.members}
    if last is not None and last.number >= known and last.member in live:
        if situation.vanished:
            return Publish(last, f"term {last.number} goes on, though its record vanished", LEADING)
        return Wait(f"{last.name} leads term {last.number}", rule=LEADING)
    if not situation.members:
        return Wait("nobody wants to lead", rule=NEXT_TERM)
    number = max(known, last.number if last else 0) + 1
    first = situation.members[0]
    return Publish(Term(number, first.member, first.ask.name), f"{first.ask.name} leads term {number}", NEXT_TERM)


def outlook(now: Term | None, me: Sequence[str], ask: Candidacy) -> Outlook[Candidacy]:
    """What the record means for a candidate. SPARE: another one leads, and may do so forever."""
    if now is None:
        return Outlook(Standing.PENDING)
    if now.member == me[-1]:  # also when it asks while it leads
        return Outlook(Standing.ANSWERED, Next.RETURN)
    return Outlook(Standing.SPARE)
