"""The JSON records of a job's history: one event per key, below `<prefix>/events/`. See `docs/protocol.md`.

No decision depends on an event. So all texts are truncated, and events that cannot be read are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from ftcoord.core.strict import Raw, build, build_each, dump, load
from ftcoord.errors import StateError

LONGEST_LINE: Final = 400
"""Characters of a reason, an exception or a name."""
LONGEST_TRACEBACK: Final = 800
"""Characters of the head of a traceback."""
KEPT_EVENTS: Final = 300
"""The most events of one run, or of one job's quorums. The oldest are deleted first."""
HISTORY_TTL: Final = 7 * 24 * 3600
"""Seconds by which history outlives its job by default: a week."""

EventKind: TypeAlias = Literal[
    "round",
    "started",
    "limits",
    "recalled",
    "closed",
    "quorum",
    "failed",
    "expired",
    "died",
    "left",
    "lost",
    "waiting",
    "refused",
    "silent",
    "ordered",
    "outage",
]
EndId: TypeAlias = tuple[str, int, str, str]
_KINDS: Final = frozenset(get_args(EventKind))


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker failed.

    Args:
        pid: the worker's pid.
        rank: its global rank; -1 if unknown.
        local_rank: its rank on its node; -1 if unknown.
        exit_code: -1 if a signal ended it, or it is unknown.
        signal: the number of the signal that ended it; 0 for none.
        fate: how it ended, in words, such as "exited with code 3".
        exception: its exception from torch's error file, such as "ValueError: no such file"; else empty.
        traceback: the head of that exception's traceback.
        timer: the expiration timer for which it was killed; empty for none.
    """

    pid: int
    rank: int = -1
    local_rank: int = -1
    exit_code: int = -1
    signal: int = 0
    fate: str = ""
    exception: str = ""
    traceback: str = ""
    timer: str = ""

    @property
    def line(self) -> str:
        """The failure in one line, for people."""
        ranks = f" (rank {self.rank}, local rank {self.local_rank})" if self.rank >= 0 else ""
        if self.timer:
            return f"worker {self.pid}{ranks} was killed, since its timer {self.timer!r} had expired"
        return f"worker {self.pid}{ranks} {f'raised {self.exception}' if self.exception else self.fate}"


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """Something that happened to a job.

    Args:
        kind: `round` (a round was decided), `started` (all have taken their seats), `limits` (the decider stated the
            limits: nodes with others are refused), `recalled`, `closed`, `quorum` (one with other members was decided),
            or how one member's part in it ended: `failed` (a worker failed), `expired` (a worker's timer expired),
            `died` (its process died), `left` (it said so) or `lost` (its lease expired without a reason). For nodes
            without a seat: `waiting` and `refused`. `silent`: members that had reported nothing when another one left a
            run that was over, so they may be lost. `ordered`: what somebody did to the job by hand.
            `outage`: etcd did not answer one member for a while, and then answered it again.
        number: the round's number, or the quorum's id.
        who: the host or replica that it is about; empty for all of them.
        node: the agent's id or the replica's id; empty for all of them.
        reason: why, in one line.
        failures: for `failed` and `expired`, the worker's failure.
        noted: etcd's revision at which it was first written, as far as its writer knows; 0 for the event's own.
        by: the writer: a member, or an operator.
        wall_ms: when, on the writer's clock, in milliseconds since 1970. For people: no order depends on it, except
            that of ends which one writer saw.
        since_ms: for `lost`: the time after which it happened, on the same clock; 0 if unknown.
        member: for the end of a replica's part in a quorum: the member that it was. So its second death is not taken
            for the first, told again. Empty for all other events.
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
    since_ms: int = 0
    member: str = ""

    @property
    def end_id(self) -> EndId:
        """What is the same in all reports of one end: its kind, round or quorum, node and member.

        A replica's death is known by the revision at which its cause was written: whatever the last quorum was that the
        reporter knew of, and though a process that lost a lease was two members, each with that cause.
        """
        if self.kind == "died" and self.member:
            return self.kind, self.noted, self.node, ""
        return self.kind, self.number, self.node, self.member

    @property
    def is_end(self) -> bool:
        """Whether it reports how one member's part in a round, or quorum, ended."""
        return self.kind in _ENDS


_ENDS: Final = frozenset({"failed", "expired", "died", "left", "lost"})
_FORMED: Final = frozenset({"round", "quorum"})
_DECIDED: Final = frozenset({"round", "started", "limits", "recalled", "closed", "quorum"})


@dataclass(frozen=True, slots=True)
class PastEvent:
    """An event as stored in etcd.

    Args:
        revision: the revision at which it was written.
        life: which of the successive jobs with this id it is about: 0, 1, ...
    """

    event: HistoryEvent
    revision: int
    key: str
    life: int = 0


def encode(event: HistoryEvent) -> bytes:
    """The record as JSON, with the layout's version and truncated texts."""
    who, node, reason, by = map(cut, (event.who, event.node, event.reason, event.by))
    failures = tuple(map(clipped, event.failures[:1]))
    return dump(replace(event, who=who, node=node, reason=reason, by=by, failures=failures))


def clipped(failure: WorkerFailure) -> WorkerFailure:
    """The same failure, with truncated texts."""
    fate, exception, timer = map(cut, (failure.fate, failure.exception, failure.timer))
    traceback = cut(failure.traceback, LONGEST_TRACEBACK)
    return replace(failure, fate=fate, exception=exception, timer=timer, traceback=traceback)


def cut(text: str, longest: int = LONGEST_LINE) -> str:
    """The head of a text that is too long."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def failures_from(key: str, raw: Raw, name: str) -> tuple[WorkerFailure, ...]:
    """The failures in the list field `name`. Raises StateError."""
    return build_each(WorkerFailure, key, raw, name) if raw.get(name) != [] else ()


def parse_event(key: str, value: bytes) -> HistoryEvent:
    """Parse an event. Raises StateError."""
    raw = load(key, value)
    event = build(HistoryEvent, key, {**raw, "failures": failures_from(key, raw, "failures")})
    if event.kind not in _KINDS:
        raise StateError(key, f"is about a {event.kind!r}, which this ftcoord does not know")
    return event


def read_history(kvs: Iterable[tuple[str, bytes, int]]) -> list[PastEvent]:
    """The events in these keys, values and revisions, in etcd's order. Keys that hold no event are left out.

    A decider that takes over may report an end again, and one whose answer was lost may write an event twice: only the
    first counts. History outlives its job, so the id may have been used again: numbers then start again, in the next
    life.
    """
    found: list[PastEvent] = []
    told: set[object] = set()
    life, highest = 0, -1
    for key, value, revision in sorted(kvs, key=lambda kv: (kv[2], kv[0])):
        try:
            event = parse_event(key, value)
        except StateError:
            continue
        what = event.end_id if event.is_end else event
        if what in told:
            continue
        if _begins_again(event, highest):
            life, highest = life + 1, -1
            told.clear()
        highest = max(highest, event.number) if event.kind in _DECIDED else highest
        told.add(what)
        found.append(PastEvent(event, revision, key, life))
    return found


def _begins_again(event: HistoryEvent, highest: int) -> bool:
    """Whether a decision shows that the job is another one than that with this highest number."""
    if event.kind not in _DECIDED:
        return False
    return event.number <= highest if event.kind in _FORMED else event.number < highest


def last_life(past: Sequence[PastEvent]) -> list[PastEvent]:
    """The events of the last job with this id."""
    return [one for one in past if one.life == past[-1].life]


def ends_in(past: Iterable[PastEvent], number: int) -> list[HistoryEvent]:
    """How parts in this round, or quorum, ended, in the order in which they were written; for events of one life."""
    ends = (replace(one.event, noted=one.event.noted or one.revision) for one in past if one.event.is_end)
    return [end for end in ends if end.number == number]
