"""Which replicas train the next step together: torchft's rules, pure. `core.recovery` decides who heals from whom.

Rules
  Q1 asking. A replica is alive while it is among the situation's members. It asks while no quorum has answered its
     request. Several members with one replica id are one replica: its request is the last one of any of them, and the
     quorum with that request answers all of them. But once a newer member is there that does not ask yet, the others'
     requests count only if they are written again: they may be those of a process that was killed. A member whose
     record cannot be read, such as that of another version, is a separate replica that does not ask. A request without
     a profile counts only if the last quorum has that profile, or an earlier one had it when the decider read the
     request. If the last quorum does not have it, the member writes its request in full.
  Q2 fast. When all replicas of the last quorum ask again, every replica that asks is in, at once.
  Q3 enough. Otherwise `min_replicas` must ask, and more than half of the live replicas; and either all live replicas
     ask, or the earliest request is `join_timeout` old. Replicas that the last quorum left out count as asking since
     that quorum: otherwise their time would be over, and they would form a quorum without those that just got one.
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

from ftcoord.core.quorum_records import IdleMember, Profile, QuorumRecord, QuorumRequest, QuorumSeat, ReplicaRecord
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
        wrote_at: the revision at which it last wrote the request, possibly again.
        is_whole: whether its request is known. A member omits its profile if the last quorum has it. If that is not the
            last quorum here, the member asks for nothing until it writes its request in full, or that quorum becomes
            the last.
    """

    member: str
    request: QuorumRequest
    asked: int
    after: int
    joined: float
    came_at: int = 0
    asked_at: int = 0
    wrote_at: int = 0
    is_whole: bool = True
    heard: int = 0

    @classmethod
    def of(
        cls,
        member: str,
        record: ReplicaRecord,
        profiles: Mapping[str, Profile],
        joined: float,
        came_at: int,
        asked_at: int,
        wrote_at: int,
    ) -> QuorumCandidate:
        """The candidate for a member's record; `profiles` are those of the last quorum, by digest."""
        request = record.completed(profiles)
        known = record.request if request is None else request
        is_whole = request is not None
        of = (member, known, record.asked, record.after)
        return cls(*of, joined, came_at, asked_at, wrote_at, is_whole, record.heard)


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

    def and_of(self, quorum: QuorumRecord) -> Highest:
        """The highest, including this quorum."""
        return self.and_(quorum.number, quorum.id)

    def and_(self, number: int, id_: int) -> Highest:
        """The highest, including a quorum with this number and id."""
        return Highest(max(self.number, number), max(self.id, id_))


NOTHING_HEARD: Final = Highest()


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
    """

    members: Sequence[QuorumCandidate]
    previous: QuorumRecord | None
    previous_at: float = -inf
    highest: Highest = NOTHING_HEARD
    created: float = 0.0
    decider: str = ""
    unreadable: int = 0


def decide(situation: QuorumSituation, options: QuorumOptions, now: float) -> Verdict[QuorumRecord]:
    """What to do now. Depends on nothing but its arguments."""
    previous = situation.previous
    answered = previous.answered if previous else {}
    before = previous.names if previous else frozenset()
    poll = _poll(situation, answered, before)
    if before and before <= poll.asking.keys():
        reason, rule = f"Fast quorum found, all replicas of the last one ask again {poll}", FAST
    elif waiting := _obstacle(poll, options, situation.previous_at, now):
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
    return max(reversed(requests), key=lambda one: one.asked_at)  # of requests in one write the newest member's


def _asks(one: QuorumCandidate, answered: Mapping[str, int]) -> bool:
    return one.is_whole and one.asked > answered.get(one.member, 0)


def _obstacle(poll: _QuorumPoll, options: QuorumOptions, previous_at: float, now: float) -> Wait | None:
    count, needed = len(poll.asking), max(options.min_replicas, 1)
    only = f"New quorum not ready, only have {count} participants"
    if count < needed:
        return Wait(f"{only}, need min_replicas {needed} {poll}", rule=ENOUGH)
    if count <= poll.alive // 2:
        return Wait(f"{only}, need at least half of {poll.alive} healthy workers {poll}", rule=ENOUGH)
    if len(poll.eligible) < needed:
        return Wait(
            f"{only}, {len(poll.eligible)} of them of the last quorum, need min_replicas {needed} {poll}",
            rule=SHRINK_ONLY,
        )
    until = max(min(one.joined for one in poll.asking.values()), previous_at) + options.join_timeout
    if count != poll.alive and now < until:
        missing = f"waiting for {poll.alive - count} healthy workers until the join timeout"
        return Wait(f"New quorum not ready, have {count} participants, {missing} {poll}", until, ENOUGH)
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
        if one.member in seated or one.asked == 0:
            continue
        last = answered.get(one.member, 0)
        if one.asked <= last or (one.is_whole and one.request.replica_id in names):
            yield IdleMember(one.member, max(one.asked, last))


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
    now: QuorumRecord | None,
    me: Sequence[str],
    replica_id: str,
    asked: int,
    shortened: QuorumRequest | None = None,
    taken: QuorumRecord | None = None,
) -> Outlook[NoReturn]:
    """What the decided record `now` means for a replica with this request.

    ANSWERED: this quorum was decided after the request and has the replica. MISSED: its quorum was replaced by one
    without the replica before the replica learned of it, so it asks again. So it does if the quorum has the id of the
    one that it took part in last, but other replicas: etcd was restored, and the decider did not know of that one. The
    replica would keep its process groups, which have other peers. PENDING with something to write: a decider may not
    know the profile that the request omits, so the replica writes the request in full.

    Args:
        me: the ids of all members that this replica has been, through all of its leases, the present one last.
        asked: the number of the request.
        shortened: the request, if it was written without its profile.
        taken: the quorum that it took part in last.
    """
    if now is None:
        return _PENDING if shortened is None else _UNKNOWN_PROFILE
    answered = now.answered
    if any(answered.get(member, 0) >= asked for member in me):
        return _ANSWERED if replica_id in now.names and not now.contradicts(taken) else _MISSED
    if shortened is not None and not now.has_profile_of(shortened):
        return _UNKNOWN_PROFILE
    return _PENDING


# Said for every member at every event, so made once.
_PENDING: Final[Outlook[NoReturn]] = Outlook(Standing.PENDING)
_UNKNOWN_PROFILE: Final[Outlook[NoReturn]] = Outlook(Standing.PENDING, Next.WRITE)
_ANSWERED: Final[Outlook[NoReturn]] = Outlook(Standing.ANSWERED, Next.RETURN)
_MISSED: Final[Outlook[NoReturn]] = Outlook(Standing.MISSED, Next.WRITE)


def attendance(asking: Sequence[str], live: int, fewest: int) -> str:
    """Which replicas ask for the next quorum, of how many: those that live, or at least `fewest`."""
    who = f" ({named(sorted(asking))})" if asking else ""
    of = f"at least {fewest}" if live < fewest else f"{live} live"
    return f"{len(asking)} of {of} replicas {'asks' if len(asking) == 1 else 'ask'}{who}"


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
