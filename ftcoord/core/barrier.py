"""Who passes a barrier, and when: pure.

Rules
  1. All parties want to be the same number: that of the record as long as any live member wants it, else that of the
     oldest member. Members that want another number count for nothing, and the record tells them.
  2. A member has arrived when it asks to pass after the last generation that it passed.
  3. When as many have arrived as are wanted, the oldest of them pass together, as the next generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from ftcoord.core.barrier_records import Arrival, Generation, Passed
from ftcoord.core.outlook import Next, Outlook, Standing
from ftcoord.core.situation import Situation
from ftcoord.core.verdict import Publish, Verdict, Wait

BarrierSituation: TypeAlias = Situation[Generation, Arrival]


def decide(situation: BarrierSituation) -> Verdict[Generation]:
    """What to do now."""
    if not situation.members:
        return Wait("nobody has arrived", rule="2")
    parties = _parties(situation)
    last = situation.previous or Generation(0, parties, ())
    if situation.vanished:
        return Publish(last, "the record vanished", "1")
    if last.parties != parties or (situation.previous is None and _disagree(situation)):
        return Publish(replace(last, parties=parties), f"{parties} parties pass together", "1")
    before = {one.member: one for one in last.passed}
    arrived = [
        one.member
        for one in situation.members
        if one.ask.parties == parties and one.ask.after >= (before[one.member].number if one.member in before else 0)
    ]
    if len(arrived) < parties:
        return Wait(f"{len(arrived)} of {parties} parties have arrived", rule="2")
    number = max(situation.highest, last.number, *(one.ask.after for one in situation.members)) + 1
    now = {member: Passed(member, number, index) for index, member in enumerate(arrived[:parties])}
    live = {one.member for one in situation.members}
    passed = tuple(one for member, one in {**before, **now}.items() if member in live)
    return Publish(Generation(number, parties, passed), f"generation {number} passes", "3")


def _parties(situation: BarrierSituation) -> int:
    wanted = [one.ask.parties for one in situation.members]
    last = situation.previous
    return last.parties if last is not None and last.parties in wanted else wanted[0]


def _disagree(situation: BarrierSituation) -> bool:
    return len({one.ask.parties for one in situation.members}) > 1


def outlook(now: Generation | None, me: Sequence[str], ask: Arrival) -> Outlook[Arrival]:
    """What the record means for a member that has arrived. REFUSED: others want another number of parties.

    One that hears late has passed all the same, also when later generations have passed since.
    """
    if now is None:
        return Outlook(Standing.PENDING)
    if any(one.member in me and one.number > ask.after for one in now.passed):
        return Outlook(Standing.ANSWERED, Next.RETURN)
    if now.parties != ask.parties:
        return Outlook(Standing.REFUSED, Next.RETURN)
    return Outlook(Standing.PENDING)
