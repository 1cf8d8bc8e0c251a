"""A job's history: the events that go with its decisions, and which of them is the first cause of an end. Pure.

One event is one key below `<prefix>/events/`; see `docs/protocol.md`. No decision depends on an event. So all texts are
truncated, and events that cannot be read are left out. `round_events` and `quorum_events` make the events of a decision
from the record before and the new one.

Which end of a round came first: clocks of different hosts are not compared. etcd's revisions show in which order the
ends were reported. That is not always the order in which they happened: a lost host is reported when its lease expires,
and a process that raised an exception may take longer to end than those that lose their connection to it. So the kind
of an end counts first.

  BEGINS   needs no earlier end: a worker raised an exception of its own, or was killed by a signal; an agent died, was
           evicted or asked to stop; a host was lost.
  UNCLEAR  an exit code without an exception, abort() (a library's assertion, or a backend's watchdog), or an expired
           timer: a first cause, or a peer that waited in vain. In the order of revisions it counts like BEGINS, unless
           a host was lost: that happened before it was reported.
  FOLLOWS  what processes do when a peer is lost: a connection ends, or a collective times out; an agent that has used
           up its restarts.
  STOPPED  what an agent does to its workers: SIGTERM, and SIGKILL if it was asked to stop itself; or what they do then.

The first cause is the one with the lowest revision among those of the strongest kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from ftcoord.core import rendezvous_records as records, strict
from ftcoord.core.death_records import KnownCause
from ftcoord.core.quorum_records import QuorumRecord, QuorumSeat
from ftcoord.core.rendezvous_records import Round, RoundHead, Seat, WorkerFailure
from ftcoord.errors import StateError
from ftcoord.escaping import counted, named

MOST_ENDS: Final = 16
"""Ends that are written with one decision: in a large round thousands may follow the first."""

EventKind: TypeAlias = Literal[
    "round", "started", "recalled", "closed", "quorum", "failed", "expired", "died", "left", "lost", "ordered"
]
_ENDS: Final = frozenset({"failed", "expired", "died", "left", "lost"})


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """Something that happened to a job.

    Args:
        kind: `round` (a round was decided), `started` (all have taken their seats), `recalled`, `closed`, `quorum` (one
            of other members was decided), or how one member's part in it ended: `failed` (a worker failed), `expired`
            (a worker's timer expired), `died` (its process died), `left` (it announced that) or `lost` (its lease
            expired without a reason). `ordered`: what somebody did to the job by hand.
        number: the round's number, or the quorum's id; 0 for `ordered`.
        who: the host or replica that it is about; empty for all of them.
        node: the agent's id or the replica's id; empty for all of them.
        reason: why, in one line.
        failures: for `failed` and `expired`, the worker's failure.
        noted: etcd's revision at which it was first written, as far as its writer knows; 0 for the event's own.
        by: the writer: a member, or an operator.
        wall_ms: when, on the writer's clock, in milliseconds since 1970. For people: no order depends on it.
        member: for the end of a replica's part in a quorum: the member that it was. Empty for all other events.
    """

    kind: str
    number: int
    who: str = ""
    node: str = ""
    reason: str = ""
    failures: tuple[WorkerFailure, ...] = ()
    noted: int = 0
    by: str = ""
    wall_ms: int = 0
    member: str = ""

    @property
    def end_id(self) -> tuple[str, int, str, str]:
        """What is the same in all reports of one end: its kind, round or quorum, node and member."""
        return self.kind, self.number, self.node, self.member

    @property
    def is_end(self) -> bool:
        """Whether it reports how one member's part in a round, or quorum, ended."""
        return self.kind in _ENDS

    @property
    def line(self) -> str:
        """An end in one line, for people."""
        return f"{self.who}: {self.failures[0].line}" if self.failures else self.reason


class PastEvent(NamedTuple):
    """An event as stored in etcd, and the revision at which it was written."""

    event: HistoryEvent
    revision: int


def encode(event: HistoryEvent) -> bytes:
    """The record as JSON, with the layout's version and truncated texts."""
    who, node, reason, by = map(records.cut, (event.who, event.node, event.reason, event.by))
    failures = tuple(map(records.clipped, event.failures[:1]))
    return strict.dump(replace(event, who=who, node=node, reason=reason, by=by, failures=failures))


def parse_event(key: str, value: bytes) -> HistoryEvent:
    """Parse an event. Raises StateError."""
    raw = strict.load(key, value)
    event = strict.build(HistoryEvent, key, {**raw, "failures": records.failures_from(key, raw, "failures")})
    if event.kind not in get_args(EventKind):
        raise StateError(key, f"is about a {event.kind!r}, which this ftcoord does not know")
    return event


def read_history(kvs: Iterable[tuple[str, bytes, int]]) -> list[PastEvent]:
    """The events in these keys, values and revisions, in etcd's order. Keys that hold no event are left out.

    Each decision repeats the ends that its decider knows, so of each end only the first report counts.
    """
    found: list[PastEvent] = []
    ends: set[object] = set()
    for key, value, revision in sorted(kvs, key=lambda kv: (kv[2], kv[0])):
        try:
            event = parse_event(key, value)
        except StateError:
            continue
        if event.is_end and event.end_id in ends:
            continue
        ends.add(event.end_id)
        found.append(PastEvent(event, revision))
    return found


def ends_in(past: Iterable[PastEvent], number: int) -> list[HistoryEvent]:
    """How parts in this round, or quorum, ended, in the order in which they were written."""
    ends = (replace(event, noted=event.noted or revision) for event, revision in past if event.is_end)
    return [end for end in ends if end.number == number]


def signed(events: Sequence[HistoryEvent], by: str, wall_ms: int) -> list[HistoryEvent]:
    """The same events, with their writer and the time, for people."""
    return [replace(one, by=by, wall_ms=wall_ms) for one in events]


# -- what a decision shows --------------------------------------------------------------------------------------------


def round_events(before: RoundHead | None, new: RoundHead, ends: Sequence[HistoryEvent]) -> list[HistoryEvent]:
    """The events of the decision that replaces the record `before` by `new`: first the known ends of parts in that
    round, and then what was decided. None for a decision that changes neither the round nor its state."""
    old = before or records.NO_ROUND
    told = in_causal_order(ends)[:MOST_ENDS]

    def tell(kind: EventKind, reason: str) -> None:
        told.append(HistoryEvent(kind, new.number, reason=reason))

    if isinstance(new, Round) and new.number != old.number and new.seats:
        tell("round", _formed(old, new))
    elif new.closed and not old.closed:
        tell("closed", f"{new.outcome}: {new.closed}")
    elif new.recalled and (new.number != old.number or not old.recalled):
        tell("recalled", new.recalled)
    elif new.ready and not old.ready:
        tell("started", f"round {new.number} is ready on {counted(new.size, 'node')}")
    return told


def _formed(old: RoundHead, new: Round) -> str:
    seats, nodes = (old.seats, old.nodes) if isinstance(old, Round) else ((), {})
    came = [seat.host for seat in new.seats if seat.node not in nodes]
    gone = [seat.host for seat in seats if seat.node not in new.nodes]
    before = f"; the round before ended: {new.before}" if new.before else ""
    return _told(counted(new.size, "node"), came, gone) + before


def _told(size: str, came: Sequence[str], gone: Sequence[str]) -> str:
    return size + (f"; new: {named(came)}" if came else "") + (f"; without {named(gone)}" if gone else "")


def quorum_events(
    previous: QuorumRecord | None, new: QuorumRecord, causes: Mapping[str, KnownCause], words: Mapping[str, str]
) -> list[HistoryEvent]:
    """The events of the decision that replaces the quorum `previous` by `new`; none between the same members, as in
    most steps. A replica that is there under another member is no event, unless its first member is known to have died.

    Args:
        causes: why members of the last quorum are gone, by id, and etcd's revision at which that was written.
        words: why members that are there no longer take part, by id.
    """
    ends = [
        replica_end(previous.id, one.member, one.request.replica_id, causes=causes, words=words)
        for one in gone_seats(previous, new)
        if previous and (one.request.replica_id not in new.names or one.member in causes)
    ]
    told, before = ends[:MOST_ENDS], previous.names if previous else frozenset()
    if before != new.names:
        came = sorted(new.names - before) if previous else ()
        reason = _told(counted(len(new.seats), "replica"), came, sorted(before - new.names))
        told.append(HistoryEvent("quorum", new.id, reason=reason))
    return told


NOT_ASKING: Final = "it is there, and did not ask"
"""The word of a replica that the others went on without."""


def gone_seats(previous: QuorumRecord | None, new: QuorumRecord) -> list[QuorumSeat]:
    """The seats whose members the new quorum no longer has, or has no longer under this member."""
    return [seat for seat in previous.seats if seat.member not in new.seated] if previous else []


def replica_end(
    number: int, member: str, name: str, *, causes: Mapping[str, KnownCause], words: Mapping[str, str]
) -> HistoryEvent:
    """How a replica's part in this quorum ended; see `quorum_events`."""
    kind: EventKind = "lost"
    reason, noted = f"{name} is gone (its lease ended, or it left)", 0
    if member in causes:
        known = causes[member]
        noted, kind = known.revision, "left" if known.left else "died"
        reason = told_leaving(name, known.cause) if known.left else f"{name}: {known.cause}"
    elif member in words:
        kind, reason = "left", told_leaving(name, words[member])
    return HistoryEvent(kind, number, name, name, reason, noted=noted, member=member)


# -- how parts in a round ended ---------------------------------------------------------------------------------------

Ends: TypeAlias = Mapping[tuple[str, str], HistoryEvent]
"""How parts in one round ended, by kind and node, as first reported."""


Vacant: TypeAlias = tuple[Seat, KnownCause]
"""A seat whose member is gone, and why. Of one without a reason: an empty cause, and when it was seen to be gone."""


def told_end(seat: Seat, known: KnownCause) -> str:
    """Why a member is gone, in one line; empty if that is not known."""
    return told_leaving(seat.host, known.cause) if known.left else known.cause


def note_ends(
    before: Ends, round_: Round, asks: Iterable[tuple[records.JoinRequest, int]], vacant: Iterable[Vacant]
) -> Ends:
    """The known ends in this round, with those that these requests of live members, and these seats, add now.

    Members that are gone without a reason are left out: they may come back to their seats; see `lost_ends`.

    Args:
        asks: the requests, and etcd's revision of each.
    """
    number, ends = round_.number, list[HistoryEvent]()
    for ask, at in asks:
        if ask.failed and ask.node in round_.nodes and number in (ask.seated, ask.after):
            ends += [replace(failure_event(number, ask.host, ask.node, one), noted=at) for one in ask.failed]
    for seat, known in vacant:
        told = [failure_event(number, seat.host, seat.node, one) for one in known.failures]
        if known.cause:
            kind: EventKind = "left" if known.left else "died"
            told.append(HistoryEvent(kind, number, seat.host, seat.node, told_end(seat, known)))
        ends += [replace(end, noted=known.revision) for end in told]
    return {**{(end.kind, end.node): end for end in reversed(ends)}, **before}


def lost_ends(round_: Round, vacant: Iterable[Vacant], present: Collection[str]) -> list[HistoryEvent]:
    """The members that are gone without a reason, and have not come back as any of the nodes that are `present`."""
    lost = ((seat, known) for seat, known in vacant if not known.cause and seat.node not in present)
    return [
        HistoryEvent(
            "lost", round_.number, one.host, one.node, f"{one.host} is gone (its lease ended)", noted=at.revision
        )
        for one, at in lost
    ]


def failure_event(number: int, host: str, node: str, failure: WorkerFailure) -> HistoryEvent:
    """The event for a failed worker of this node in the round of this number."""
    return HistoryEvent("expired" if failure.timer else "failed", number, host, node, failure.line, (failure,))


# -- the first cause --------------------------------------------------------------------------------------------------

_SIGABRT, _SIGKILL, _SIGPIPE, _SIGTERM = 6, 9, 13, 15
_PEERS: Final = re.compile(
    "connection (reset|closed|refused|aborted)|closed by peer|broken ?pipe|socket (closed|timeout)|remote ?error"
    "|remote process exited|communicator was aborted|collective operation timeout|watchdog caught|wait timeout"
    "|timed out (waiting|after)|caused pair closure|distnetworkerror|distbackenderror|roundovererror"
    "|connectionreseterror",
    re.IGNORECASE,
)
"""Texts of torch, NCCL and Gloo about a lost peer."""
OBEYED: Final = "was stopped by "
"""The beginning of the reason of an agent that leaves because it was asked to stop, before the signal's name."""
_SPENT: Final = "ChildFailedError"
"""The reason of an agent that leaves because its workers have failed too often."""
UNKNOWN_PEER: Final = "a peer was lost, and nobody knows yet which"
"""The text if the first known cause is only a consequence of another."""


class Weight(IntEnum):
    """What an end can be: see above."""

    BEGINS = 0
    UNCLEAR = 1
    FOLLOWS = 2
    STOPPED = 3


def weight_of(event: HistoryEvent) -> Weight:
    """The weight of one end alone."""
    if event.failures:
        return _weight_of_failure(event.failures[0])
    return Weight.FOLLOWS if event.kind == "left" and _SPENT in event.reason else Weight.BEGINS


def _weight_of_failure(failure: WorkerFailure) -> Weight:
    if failure.timer:
        return Weight.UNCLEAR
    if failure.exception:
        return Weight.FOLLOWS if _PEERS.search(failure.exception) else Weight.BEGINS
    if failure.signal == _SIGPIPE:
        return Weight.FOLLOWS
    if failure.signal == _SIGTERM or failure.exit_code == 128 + _SIGTERM:
        return Weight.STOPPED
    return Weight.BEGINS if failure.signal and failure.signal != _SIGABRT else Weight.UNCLEAR


def in_causal_order(ends: Sequence[HistoryEvent]) -> list[HistoryEvent]:
    """The ends, the first cause first. Ends written at the same revision stay in the given order."""
    stopping = {end.node for end in ends if end.kind == "left" and OBEYED in end.reason}
    has_lost = any(end.kind == "lost" for end in ends)

    def place(end: HistoryEvent) -> tuple[int, int]:
        weight = weight_of(end)
        if end.node in stopping and (weight is Weight.UNCLEAR or _was_just_killed(end)):
            weight = Weight.STOPPED
        elif weight is Weight.UNCLEAR and not has_lost:
            weight = Weight.BEGINS
        return weight, end.noted

    return sorted(ends, key=place)


def _was_just_killed(end: HistoryEvent) -> bool:
    """Whether a worker got SIGKILL, and neither a timer nor a lack of memory explains it."""
    killed = [one for one in end.failures[:1] if one.signal == _SIGKILL and "SIGKILL" in one.fate]
    return any(not one.exception and not one.timer for one in killed)


def first_failure(failures: Sequence[WorkerFailure]) -> WorkerFailure | None:
    """The first cause among the workers of one node, given in the order in which their agent saw them end; None for
    none."""
    return min(failures, key=_weight_of_failure, default=None)


def follows(failure: WorkerFailure) -> bool:
    """Whether a failure is probably a consequence of another; that includes abort(), which backends' watchdogs call."""
    return failure.signal == _SIGABRT or _weight_of_failure(failure) >= Weight.FOLLOWS


def told_leaving(who: str, why: str) -> str:
    """Who left, and why, in one line."""
    return f"{who} {why}" if why.startswith(OBEYED) else f"{who} left ({why})"


def is_consequence(end: HistoryEvent) -> bool:
    """Whether a worker ended because it had lost a peer."""
    return bool(end.failures) and weight_of(end) is Weight.FOLLOWS


def told_first(first: HistoryEvent) -> str:
    """The first known cause, in one line; and that it is no cause, if it is only a consequence."""
    return f"{UNKNOWN_PEER}: {first.line}" if is_consequence(first) else first.line


def told_ends(ends: Sequence[HistoryEvent]) -> str:
    """The first cause, and how many more ends there are; empty for none."""
    if not ends:
        return ""
    first = in_causal_order(ends)[0]
    more = len({end.node for end in ends} - {first.node})
    return told_first(first) + (f"; {counted(more, 'more node')} followed" if more else "")


def why_ended(recalled: str, recalled_at: int, ends: Sequence[HistoryEvent]) -> str:
    """Why a round ended.

    If a round was recalled for another reason (a node waits to join), that reason ended it, whatever happens to its
    workers while they are stopped.

    Args:
        recalled: why it was recalled.
        recalled_at: etcd's revision then.
        ends: how its members' parts ended, as far as is known.
    """
    if not ends or not (UNKNOWN_PEER in recalled or any(end.noted <= recalled_at for end in ends)):
        return recalled
    first = in_causal_order(ends)[0]
    is_known = first.line in recalled or (is_consequence(first) and UNKNOWN_PEER not in recalled)
    return recalled if is_known else told_ends(ends)
