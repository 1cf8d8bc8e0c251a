"""Which replicas train the next step together: torchft's rules, pure. `core.recovery` decides who heals from whom.

Rules
  Q1 asking. A replica is alive while it is among the situation's members. It asks while no quorum has answered its
     request. Several members with one replica id are one replica: its request is the last one of any of them, and the
     quorum with that request answers all of them. But once a newer member is there that does not ask yet, the others'
     requests count only if they are written again: they may be those of a process that was killed. A member whose
     record cannot be read, such as that of another version, is a separate replica that does not ask.
  Q2 fast. When all replicas of the last quorum ask again, every replica that asks is in, at once.
  Q3 enough. Otherwise `min_replicas` must ask, and more than half of the live replicas; and either all live replicas
     ask, or the earliest request is `join_timeout` old. Replicas that the last quorum left out count as asking since
     that quorum: otherwise their time would be over, and they would form a quorum without those that just got one. For
     a new decider no request is older than the time that all need to ask it: those that come first would form a quorum
     without the others.
  Q4 shrink only. While any request says `shrink_only`, only replicas of the last quorum are in. The others keep asking.
     As in torchft, that may be the request of one of those others: then nobody joins, not even that one.
  Q5 id. A quorum's id is new when its replicas differ from those of the last one, when one of them reports failed
     commits, or when a higher id may have been given: the record was lost. A number or an id that the decider has ever
     seen is never used again.

Where we differ from torchft, and why
  - A quorum is never empty, `min_replicas` holds for the quorum itself, and a last quorum without replicas counts as
    none: torchft publishes an empty quorum, after which any single replica forms one.
  - An id is never used again. torchft starts at 1 after a restart, and replicas that see a known id keep a process
    group with other peers.

Times are the decider's own monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NoReturn

from ftcoord.core.quorum_records import IdleMember, QuorumRecord, QuorumRequest, QuorumSeat, ReplicaRecord
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Verdict, Wait
from ftcoord.escaping import counted, named

RULES: Final = ("Q1 asking", "Q2 fast", "Q3 enough", "Q4 shrink only", "Q5 id")
"""The rules above, by the names in verdicts."""
_, FAST, ENOUGH, SHRINK_ONLY, _ = RULES
FAILED_COMMITS: Final = 3
"""Failed commits in a row from which on a replica needs attention: one or two are usual when another replica dies."""


@dataclass(frozen=True, slots=True)
class QuorumCandidate:
    """A member as the decider sees it.

    Args:
        member: the member id, which is its lease.
        request: its present or last request.
        asked: the number of that request among the member's requests, 1, 2, ...; 0 while it does not ask.
        after, heard: the highest quorum id, and the highest number of a quorum, that it knows; 0 for none.
        joined: when this request was first seen; meaningless while it does not ask.
        came_at, asked_at: etcd's revisions at which it became a member, and at which it made the request.
        wrote_at: the revision at which it last wrote the request, possibly again. For a request that came by port, in
            these two places, up to which the decider had then seen the members.
        order: of all requests that came by port, the how manieth it was; 0 for one that was written.
    """

    member: str
    request: QuorumRequest
    asked: int
    after: int
    joined: float
    came_at: int = 0
    asked_at: int = 0
    wrote_at: int = 0
    heard: int = 0
    order: int = 0

    @classmethod
    def of(cls, member: str, record: ReplicaRecord, *, joined: float, **when: int) -> QuorumCandidate:
        """The candidate for a member's record; `when` are the revisions above."""
        return cls(member, record.request, record.asked, record.after, joined, heard=record.heard, **when)


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """The user's rules. `join_timeout` is in seconds."""

    min_replicas: int
    join_timeout: float


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest number and id of all quorums seen: etcd may have lost those quorums."""

    number: int = 0
    id: int = 0

    @property
    def either(self) -> int:
        """The higher one of both."""
        return max(self.number, self.id)

    def and_(self, number: int, id_: int) -> Highest:
        """The highest, including a quorum with this number and id."""
        return Highest(max(self.number, number), max(self.id, id_))


@dataclass(frozen=True, slots=True)
class _QuorumPoll:
    """Who is alive and who asks. `asking` is by replica id; `eligible` are those of them that may be in the quorum."""

    alive: int
    unreadable: int
    asking: Mapping[str, QuorumCandidate]
    eligible: Sequence[QuorumCandidate]
    shrink_only: bool

    def __str__(self) -> str:
        """What torchft appends to all of its reasons. Here those that ask are healthy: the dead are not given to us."""
        count = len(self.asking)
        shrink = str(self.shrink_only).lower()
        told = f"[{count}/{count} participants healthy][{self.alive} heartbeating][shrink_only={shrink}]"
        return f"{told}[{self.unreadable} not readable: use one release in all of a job]" if self.unreadable else told


@dataclass(frozen=True, slots=True)
class QuorumSituation:
    """Everything that a decision depends on.

    Args:
        members: the live members, oldest first.
        previous: the last decided quorum.
        previous_at: when `previous` was first seen.
        highest: the highest values of all quorums that the decider has ever seen.
        created: the wall clock, for `QuorumRecord.created`.
        decider: the member that decides, for `QuorumRecord.by`.
        unreadable: how many live members have records that cannot be read.
        gathers_until: until then a new decider gathers what was asked of the one before.
    """

    members: Sequence[QuorumCandidate]
    previous: QuorumRecord | None
    previous_at: float = -inf
    highest: Highest = Highest()
    created: float = 0.0
    decider: str = ""
    unreadable: int = 0
    gathers_until: float = -inf


def decide(situation: QuorumSituation, options: QuorumOptions, now: float) -> Verdict[QuorumRecord]:
    """What to do now. Depends on nothing but its arguments."""
    previous = situation.previous
    answered = previous.answered if previous else {}
    before = previous.names if previous else frozenset()
    poll = _poll(situation, answered, before)
    if before and before <= poll.asking.keys():
        reason, rule = f"Fast quorum found, all replicas of the last one ask again {poll}", FAST
    elif waiting := _obstacle(poll, options, max(situation.previous_at, situation.gathers_until), now):
        return waiting
    else:
        reason, rule = f"Valid quorum found {poll}", ENOUGH
    # If each live member has a seat in it, nobody asks any more.
    nothing_follows = len(poll.eligible) == len(situation.members)
    return Publish(_conclude(poll.eligible, situation), reason, rule, nothing_follows=nothing_follows)


def _poll(situation: QuorumSituation, answered: Mapping[str, int], before: frozenset[str]) -> _QuorumPoll:
    replicas, unreadable = situation.members, situation.unreadable
    alive = {one.request.replica_id for one in replicas}
    if len(alive) == len(replicas):  # nearly always, and this runs for each replica at each event
        asking = {one.request.replica_id: one for one in replicas if _asks(one, answered)}
    else:
        asking = _asking(replicas, answered)
    shrink_only = any(one.request.shrink_only for one in asking.values())
    eligible = [one for name, one in asking.items() if not (shrink_only and before) or name in before]
    return _QuorumPoll(len(alive) + unreadable, unreadable, asking, eligible, shrink_only)


def _asking(replicas: Sequence[QuorumCandidate], answered: Mapping[str, int]) -> dict[str, QuorumCandidate]:
    """The members whose requests count, by replica id."""
    alive: dict[str, list[QuorumCandidate]] = {}
    for one in replicas:
        alive.setdefault(one.request.replica_id, []).append(one)
    requests = {name: _request_of(members, answered) for name, members in alive.items()}
    return {name: one for name, one in requests.items() if one is not None}


def _request_of(members: Sequence[QuorumCandidate], answered: Mapping[str, int]) -> QuorumCandidate | None:
    """The member of one replica id whose request counts; None if none does."""
    requests = [one for one in members if _asks(one, answered)]
    came_at = max((one.came_at for one in members if not _asks(one, answered)), default=0)
    if not requests or max(one.wrote_at for one in requests) < came_at:
        return None
    # Of requests in one write the newest member's.
    return max(reversed(requests), key=lambda one: (one.asked_at, one.order))


def _asks(one: QuorumCandidate, answered: Mapping[str, int]) -> bool:
    return one.asked > answered.get(one.member, 0)


def _obstacle(poll: _QuorumPoll, options: QuorumOptions, not_before: float, now: float) -> Wait | None:
    count, needed = len(poll.asking), max(options.min_replicas, 1)
    who = f" {named(sorted(poll.asking))} {'asks' if count == 1 else 'ask'}" if count else ""
    only = f"New quorum not ready, only have {count} participants"
    if count < needed:
        return Wait(f"{only}, need min_replicas {needed} {poll}{who}", rule=ENOUGH)
    if count <= poll.alive // 2:
        return Wait(f"{only}, need at least half of {poll.alive} healthy workers {poll}{who}", rule=ENOUGH)
    if len(poll.eligible) < needed:
        return Wait(
            f"{only}, {len(poll.eligible)} of them of the last quorum, need min_replicas {needed} {poll}{who}",
            rule=SHRINK_ONLY,
        )
    until = max(min(one.joined for one in poll.asking.values()), not_before) + options.join_timeout
    if count != poll.alive and now < until:
        missing = f"waiting for {poll.alive - count} healthy workers until the join timeout"
        return Wait(f"New quorum not ready, have {count} participants, {missing} {poll}{who}", until, ENOUGH)
    return None


def _conclude(chosen: Iterable[QuorumCandidate], situation: QuorumSituation) -> QuorumRecord:
    previous, members = situation.previous, situation.members
    # Python compares texts by code point, which is the order of their UTF-8 bytes.
    ordered = sorted(chosen, key=lambda one: one.request.replica_id)
    seats = tuple(QuorumSeat(one.member, one.asked, one.request) for one in ordered)
    idle = tuple(_idle(members, seats, previous.answered if previous else {}))
    heard = max((one.heard for one in members), default=0)
    number = max(previous.number if previous else 0, situation.highest.number, heard) + 1
    id_ = _id_of(seats, members, previous, situation.highest.id)
    return QuorumRecord(number, id_, seats, idle, situation.created, situation.decider)


def _idle(
    members: Iterable[QuorumCandidate], seats: Sequence[QuorumSeat], answered: Mapping[str, int]
) -> Iterator[IdleMember]:
    """The members without a seat that were answered: before, or now by the seat of another member with their name."""
    seated, names = {seat.member for seat in seats}, {seat.request.replica_id for seat in seats}
    for one in members:
        if one.member in seated:
            continue
        last = answered.get(one.member, 0)
        if one.request.replica_id in names:
            last = max(one.asked, last)
        if last:
            yield IdleMember(one.member, last)


def _id_of(
    seats: Sequence[QuorumSeat], members: Sequence[QuorumCandidate], previous: QuorumRecord | None, highest: int
) -> int:
    """If an id higher than that of `previous` is known, it was decided by a quorum whose record is lost: it must not be
    given again."""
    known = max([highest, *(one.after for one in members)])
    if previous is not None and known <= previous.id:
        same = [seat.request.replica_id for seat in seats] == [one.replica_id for one in previous.requests]
        if same and not any(seat.request.commit_failures > 0 for seat in seats):
            return previous.id
    return max(known, previous.id if previous else 0, 0) + 1


# -- the member's half ------------------------------------------------------------------------------------------


def outlook(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, taken: QuorumRecord | None = None
) -> Outlook[NoReturn]:
    """What the decided record `now` means for a replica with this request.

    ANSWERED: this quorum was decided after the request and has the replica. MISSED: its quorum was replaced by one
    without the replica before the replica learned of it, so it asks again. So it does if the quorum has the id of the
    one that it took part in last, but other replicas: etcd was restored, and the decider did not know of that one. The
    replica would keep its process groups, which have other peers.

    Args:
        me: the ids of all members that this replica has been, through all of its leases, the present one last.
        asked: the number of the request.
        taken: the quorum that it took part in last.
    """
    if now is None:
        return _PENDING
    answered = now.answered
    if any(answered.get(member, 0) >= asked for member in me):
        return _ANSWERED if replica_id in now.names and not now.contradicts(taken) else _MISSED
    return _PENDING


# Said for every member at every event, so made once.
_PENDING: Final[Outlook[NoReturn]] = Outlook(Standing.PENDING)
_ANSWERED: Final[Outlook[NoReturn]] = Outlook(Standing.ANSWERED, Next.RETURN)
_MISSED: Final[Outlook[NoReturn]] = Outlook(Standing.MISSED, Next.WRITE)


def attendance(asking: Sequence[str], live: int, fewest: int) -> str:
    """Which replicas ask for the next quorum, of how many: those that live, or at least `fewest`. If none is given, who
    asks may not be known: those that ask the decider itself do not show in etcd."""
    if not asking:
        of = f" of at least {fewest}" if live < fewest else ""
        return f"{live}{of} replicas {'lives' if live == 1 else 'live'}, and who waits logs why"
    of = f"at least {fewest}" if live < fewest else f"{live} live"
    return f"{len(asking)} of {of} replicas {'asks' if len(asking) == 1 else 'ask'} ({named(sorted(asking))})"


def failing(quorum: QuorumRecord, fewest: int) -> str:
    """That the commits of its replicas fail again and again, and why that is likely; empty if they do not."""
    failures = max((one.commit_failures for one in quorum.requests), default=0)
    if failures < FAILED_COMMITS:
        return ""
    return (
        f"{failures} commits in a row failed with {counted(len(quorum.seats), 'replica')}: if the Manager's"
        f" min_replica_size is larger than min_replicas={fewest} of the job's address, make them equal; else see the"
        " replicas' logs"
    )
