"""Who passes a barrier, and when: pure.

Rules
  B1 parties. All parties must want the same number of parties: that of the record as long as any live member wants it,
     else that of the oldest member. Members that want another number do not count, and the record names them. A record
     that vanished is put back.
  B2 arriving. A party has arrived when it asks to pass after the last generation that it passed, under any lease. If a
     party has several members, the newest counts.
  B3 passing. When enough parties have arrived, the oldest of them pass together, as the next generation. Its number is
     higher than all that the decider, or any member, has ever seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from ftcoord.core.barrier_records import Arrival, Generation, Passed
from ftcoord.core.outlook import Next, Outlook, Standing
from ftcoord.core.situation import Situation
from ftcoord.core.verdict import Publish, Verdict, Wait

RULES: Final = ("B1 parties", "B2 arriving", "B3 passing")
"""The rules above, by the names in verdicts."""
PARTIES, ARRIVING, PASSING = RULES

BarrierSituation: TypeAlias = Situation[Generation, Arrival]


def decide(situation: BarrierSituation) -> Verdict[Generation]:
    """What to do now."""
    if not situation.members:
        return Wait("nobody has arrived", rule=ARRIVING)
    parties = _parties(situation)
    refused = tuple(one.member for one in situation.members if one.ask.parties != parties)
    last = situation.previous or Generation(0, parties, ())
    if situation.vanished:
        return Publish(last, "the record vanished", PARTIES)
    if last.parties != parties or not set(refused) <= set(last.refused):
        return Publish(replace(last, parties=parties, refused=refused), f"{parties} parties pass together", PARTIES)
    asks = {one.ask.party: one.ask for one in situation.members}  # in the order in which the parties came
    before = {one.party: one for one in last.passed if one.party in asks}
    arrived = [
        party
        for party, ask in asks.items()
        if ask.parties == parties and (party not in before or ask.after >= before[party].number)
    ]
    if len(arrived) < parties:
        return Wait(f"{len(arrived)} of {parties} parties have arrived", rule=ARRIVING)
    number = max(situation.highest, last.number, *(max(ask.after, ask.known) for ask in asks.values())) + 1
    now = {party: Passed(party, number, index) for index, party in enumerate(arrived[:parties])}
    return Publish(
        Generation(number, parties, (*{**before, **now}.values(),), refused), f"generation {number} passes", PASSING
    )


def _parties(situation: BarrierSituation) -> int:
    wanted = [one.ask.parties for one in situation.members]
    last = situation.previous
    return last.parties if last is not None and last.parties in wanted else wanted[0]


def outlook(now: Generation | None, me: Sequence[str], ask: Arrival) -> Outlook[Arrival]:
    """What the record means for a member that has arrived. REFUSED: other live members want another number of parties.

    A member that learns late of its generation has still passed, even if later generations have passed since.
    """
    if now is None:
        return Outlook(Standing.PENDING)
    if any(one.party == ask.party and one.number > ask.after for one in now.passed):
        return Outlook(Standing.ANSWERED, Next.RETURN)
    if me[-1] in now.refused and now.parties != ask.parties:
        return Outlook(Standing.REFUSED, Next.RETURN)
    return Outlook(Standing.PENDING)
