"""Which replicas train the next step together, and who heals from whom: torchft's rules, pure.

Rules
  1. A replica is alive when it is given to `decide`, and asks when its request has not been answered by a quorum yet.
  2. All replicas of the last quorum ask again: everybody who asks is in, at once ("fast").
  3. Else there must be `min_replicas` that ask, and more than half of the live replicas; and either all live replicas
     ask, or the earliest request is `join_timeout` old.
  4. While anybody who asks says `shrink_only`, only replicas of the last quorum are in. The others go on asking.
  5. The quorum's id is new when its replicas are others than before, or when one of them reports failed commits.

Where we differ from torchft, and why
  - A quorum is never empty, `min_replicas` holds for the quorum itself, and a last quorum without replicas is none:
    torchft publishes an empty quorum, after which any single replica forms one.
  - An id is never used again. torchft starts at 1 after a restart, and replicas that see a known id keep a process
    group whose peers are others.

Times are the decider's own monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final

from ftcoord.core.outlook import Next, Outlook, Standing
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import NotInQuorum


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """What one replica (one replica group) asks a quorum for. It is returned to all participants as it was sent.

    Args:
        replica_id: unlike that of all other replicas; places in a quorum are in its order.
        address: where its manager is reached.
        store_address: where its store is reached.
        step: the step it has completed; the highest in a quorum is what others heal to.
        world_size: the ranks in the replica group.
        shrink_only: no replica may join now.
        data: whatever the replica wants others to know, as JSON text; empty for nothing.
        commit_failures: steps it failed to commit since the last one that it did commit.
        handles: what peers need to reconfigure, one for each group rank.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    handles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuorumCandidate:
    """A member as the decider sees it.

    Args:
        member: the member id, which is its lease.
        request: what it asks, or asked last.
        asked: which of the member's requests that is, 1, 2, ...; 0 while it does not ask.
        after: the highest quorum id that it knows of; 0 for none.
        joined: when it was first seen asking that; means nothing while it does not ask.
        came_at, asked_at: etcd's revisions at which it became a member, and at which it said what it asks.
    """

    member: str
    request: QuorumRequest
    asked: int
    after: int
    joined: float
    came_at: int = 0
    asked_at: int = 0


@dataclass(frozen=True, slots=True)
class QuorumSeat:
    """One participant, and the request of it that is answered; its place in `QuorumRecord.seats` is its rank."""

    member: str
    asked: int
    request: QuorumRequest


@dataclass(frozen=True, slots=True)
class Answered:
    """A member that has no seat, and which of its requests an earlier quorum answered."""

    member: str
    asked: int


@dataclass(frozen=True)
class QuorumRecord:
    """The decided record.

    Args:
        number: 1, 2, ...; another one for every decision.
        id: changes when process groups must be built anew; never used for other replicas.
        seats: the participants, byte-wise by their replica id.
        idle: the members whose last request was answered before: they do not ask now.
        created: wall clock, seconds since 1970, for people only.
        by: the member that decided this.
    """

    number: int
    id: int
    seats: tuple[QuorumSeat, ...]
    idle: tuple[Answered, ...]
    created: float
    by: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        """The replica ids of the participants."""
        return frozenset(seat.request.replica_id for seat in self.seats)

    @property
    def requests(self) -> tuple[QuorumRequest, ...]:
        """What the participants asked, in the order of their ranks."""
        return tuple(seat.request for seat in self.seats)

    @cached_property
    def seated(self) -> Mapping[str, int]:
        """By member with a seat: its request that this quorum answers."""
        return {seat.member: seat.asked for seat in self.seats}

    @cached_property
    def answered(self) -> Mapping[str, int]:
        """By member: its last request that this quorum or an earlier one answered."""
        return {one.member: one.asked for one in self.idle} | dict(self.seated)


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """What the user asked for. `join_timeout` in seconds."""

    min_replicas: int
    join_timeout: float


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest number and id of all quorums that were heard of: etcd may have lost those that they belong to."""

    number: int = 0
    id: int = 0

    def and_of(self, quorum: QuorumRecord) -> Highest:
        """The same, of one quorum more."""
        return Highest(max(self.number, quorum.number), max(self.id, quorum.id))


NOTHING_HEARD: Final = Highest()


@dataclass(frozen=True, slots=True)
class _QuorumPoll:
    """Who is alive and who asks; `asking` by replica id, `eligible` those of them that may be in the quorum."""

    alive: int
    asking: Mapping[str, QuorumCandidate]
    eligible: Sequence[QuorumCandidate]
    shrink_only: bool

    def __str__(self) -> str:
        """What torchft appends to all of its reasons. Here those that ask are healthy: the dead are not given to us."""
        count = len(self.asking)
        shrink = str(self.shrink_only).lower()
        return f"[{count}/{count} participants healthy][{self.alive} heartbeating][shrink_only={shrink}]"


def decide(
    replicas: Sequence[QuorumCandidate],
    previous: QuorumRecord | None,
    options: QuorumOptions,
    now: float,
    created: float,
    *,
    previous_at: float = -inf,
    silent: Sequence[QuorumCandidate] = (),
    highest: Highest = NOTHING_HEARD,
) -> Verdict[QuorumRecord]:
    """What to do now. Depends on nothing but its arguments.

    Args:
        replicas: the live members, oldest first. Of several with one replica id only one counts: the one that gave the
            last sign of what it wants, by joining or by asking for what is not answered yet.
        previous: the last decided quorum.
        created: the wall clock for `QuorumRecord.created`.
        previous_at: when `previous` was first seen. Whoever it left out asks anew from then on: else the join time-out
            would be over for them, and they would form a quorum without those that just got one.
        silent: members that are not alive but may be again (they keep their lease and send no beats). They do not
            count; but it is not forgotten which of their requests were answered, and which ids they know.
        highest: of all quorums that the decider ever heard of.
    """
    answered = previous.answered if previous else {}
    before = previous.names if previous else frozenset()
    poll = _poll(replicas, answered, before)
    if before and before <= poll.asking.keys():
        reason = f"Fast quorum found, all replicas of the last one ask again {poll}"
    elif waiting := _obstacle(poll, options, previous_at, now):
        return waiting
    else:
        reason = f"Valid quorum found {poll}"
    return Publish(_conclude(poll.eligible, (*silent, *replicas), previous, created, highest), reason)


def _poll(replicas: Sequence[QuorumCandidate], answered: Mapping[str, int], before: frozenset[str]) -> _QuorumPoll:
    counted: dict[str, QuorumCandidate] = {}
    for one in replicas:
        other = counted.get(one.request.replica_id)
        if other is None or _last_sign(one, answered) >= _last_sign(other, answered):
            counted[one.request.replica_id] = one
    asking = {name: one for name, one in counted.items() if _asks(one, answered)}
    shrink_only = any(one.request.shrink_only for one in asking.values())
    eligible = [one for name, one in asking.items() if not (shrink_only and before) or name in before]
    return _QuorumPoll(len(counted), asking, eligible, shrink_only)


def _asks(one: QuorumCandidate, answered: Mapping[str, int]) -> bool:
    return one.asked > answered.get(one.member, 0)


def _last_sign(one: QuorumCandidate, answered: Mapping[str, int]) -> int:
    """The revision at which a member last showed that it wants to be the one of its name."""
    return max(one.came_at, one.asked_at) if _asks(one, answered) else one.came_at


def _obstacle(poll: _QuorumPoll, options: QuorumOptions, previous_at: float, now: float) -> Wait | None:
    count, needed = len(poll.asking), max(options.min_replicas, 1)
    only = f"New quorum not ready, only have {count} participants"
    if count < needed:
        return Wait(f"{only}, need min_replicas {needed} {poll}")
    if count <= poll.alive // 2:
        return Wait(f"{only}, need at least half of {poll.alive} healthy workers {poll}")
    if len(poll.eligible) < needed:
        return Wait(f"{only}, {len(poll.eligible)} of them of the last quorum, need min_replicas {needed} {poll}")
    until = max(min(one.joined for one in poll.asking.values()), previous_at) + options.join_timeout
    if count != poll.alive and now < until:
        missing = f"waiting for {poll.alive - count} healthy workers until the join timeout"
        return Wait(f"New quorum not ready, have {count} participants, {missing} {poll}", until)
    return None


def _conclude(
    chosen: Iterable[QuorumCandidate],
    members: Sequence[QuorumCandidate],
    previous: QuorumRecord | None,
    created: float,
    highest: Highest,
) -> QuorumRecord:
    answered = previous.answered if previous else {}
    # Python compares texts by code point, which is the order of their UTF-8 bytes.
    ordered = sorted(chosen, key=lambda one: one.request.replica_id)
    seats = tuple(QuorumSeat(one.member, one.asked, one.request) for one in ordered)
    idle = tuple(
        Answered(one.member, answered[one.member]) for one in members if 0 < one.asked <= answered.get(one.member, 0)
    )
    number = max(previous.number if previous else 0, highest.number) + 1
    return QuorumRecord(number, _id_of(seats, members, previous, highest.id), seats, idle, created)


def _id_of(
    seats: Sequence[QuorumSeat], members: Sequence[QuorumCandidate], previous: QuorumRecord | None, highest: int
) -> int:
    """An id higher than `previous` has was decided by a quorum whose record is lost: it must not come again."""
    known = max([highest, *(one.after for one in members)])
    if previous is not None and known <= previous.id:
        same = [seat.request.replica_id for seat in seats] == [one.replica_id for one in previous.requests]
        if same and not any(seat.request.commit_failures > 0 for seat in seats):
            return previous.id
    return max(known, previous.id if previous else 0, 0) + 1


# -- the member's half ------------------------------------------------------------------------------------------


def outlook(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
    """What the decided record `now` means for a replica that asked this.

    ANSWERED: a quorum with it was decided after it asked. MISSED: that quorum was replaced before the replica heard of
    it, so it asks again. OUTRANKED: another member of the same replica id has the seat; it waits, since whoever asked
    last counts in the next quorum.

    Args:
        me: the ids of all members that this replica has been, through all of its leases, the present one last.
        asked: which of its requests that is.
    """
    if now is None:
        return Outlook(Standing.PENDING)
    if any(now.seated.get(member, 0) >= asked for member in me):
        return Outlook(Standing.ANSWERED, Next.RETURN)
    if any(now.answered.get(member, 0) >= asked for member in me):
        return Outlook(Standing.MISSED, Next.WRITE)
    outranked = replica_id in now.names and not any(member in now.seated for member in me)
    return Outlook(Standing.OUTRANKED if outranked else Standing.PENDING)


# -- what a quorum means ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a quorum means for one rank of one replica; the names are those of torchft's QuorumResult.

    Args:
        replica_rank: its place among all participants, of which there are `replica_world_size`.
        recover_src_manager_address, recover_src_replica_rank: whom to heal from; empty and None if not `heal`.
        recover_dst_replica_ranks: who heals from this replica, ascending.
        store_address: the store in which this rank meets its peers; one for all replicas.
        max_step: the highest step in the quorum.
        max_replica_rank: its place among the `max_world_size` participants at that step; None when it is behind.
        heal: its state is not what the others have: load it before the step.
        replica_ids: of all participants, in order.
        reconfigure_handles: of this rank, of all participants, in order; empty where one has none.
        commit_failures: the most that any participant reports.
    """

    replica_rank: int
    replica_world_size: int
    recover_src_manager_address: str
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: tuple[int, ...]
    store_address: str
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    replica_ids: tuple[str, ...]
    reconfigure_handles: tuple[str, ...]
    commit_failures: int


def recovery(quorum_requests: Sequence[QuorumRequest], replica_id: str, rank: int, init_sync: bool) -> Recovery:
    """What a quorum means for the group rank `rank` of a replica. Raises NotInQuorum.

    Args:
        quorum_requests: of all participants, in any order.
        init_sync: before the first step, all take over the state of one replica.
    """
    group = sorted(quorum_requests, key=lambda one: one.replica_id)
    names = tuple(one.replica_id for one in group)
    if replica_id not in names:
        raise NotInQuorum(replica_id)
    me = names.index(replica_id)
    top = max(one.step for one in group)
    leaders = [place for place, one in enumerate(group) if one.step == top]
    primary = leaders[rank % len(leaders)]
    sources = _sources(len(group), [primary] if init_sync and top == 0 else leaders, rank)
    source = sources.get(me)
    return Recovery(
        replica_rank=me,
        replica_world_size=len(group),
        recover_src_manager_address="" if source is None else group[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=tuple(place for place, source in sources.items() if source == me),
        store_address=group[primary].store_address,
        max_step=top,
        max_replica_rank=leaders.index(me) if me in leaders else None,
        max_world_size=len(leaders),
        heal=source is not None,
        replica_ids=names,
        reconfigure_handles=tuple(one.handles[rank] if rank < len(one.handles) else "" for one in group),
        commit_failures=max(one.commit_failures for one in group),
    )


def _sources(size: int, fresh: Sequence[int], rank: int) -> dict[int, int]:
    """Whom each of those that are behind heals from, ascending; another one for each rank, to spread the load."""
    behind = [place for place in range(size) if place not in set(fresh)]
    return {place: fresh[(index + rank) % len(fresh)] for index, place in enumerate(behind)}
