"""The JSON records of a job's history: one event a key, below `<prefix>/events/`. `docs/protocol.md` describes them.

Nothing is decided by an event. So all texts are cut to a length, and what cannot be read is left out.
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
"""Of one run, or of one job's quorums. The oldest go first."""
HISTORY_TTL: Final = 7 * 24 * 3600
"""Seconds for which history outlives its job where the user does not say it: a week."""

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
]
_KINDS: Final = frozenset(get_args(EventKind))


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What became of a worker that failed.

    Args:
        pid: of the worker.
        rank: its global rank; -1 if nobody could tell.
        local_rank: its rank on its node; -1 if nobody could tell.
        exit_code: -1 if a signal ended it, or nobody could tell.
        signal: the number of the signal that ended it; 0 for none.
        fate: what became of it, in words, such as "exited with code 3".
        exception: what it raised, as "ValueError: no such file", where torch's error file says so; else empty.
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
        """For people, on one line."""
        ranks = f" (rank {self.rank}, local rank {self.local_rank})" if self.rank >= 0 else ""
        if self.timer:
            return f"worker {self.pid}{ranks} was killed, since its timer {self.timer!r} had expired"
        return f"worker {self.pid}{ranks} {f'raised {self.exception}' if self.exception else self.fate}"


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """Something that happened to a job.

    Args:
        kind: `round` (a round was decided), `started` (all have taken their seats), `limits` (the decider said which
            limits count: nodes with others are refused), `recalled`, `closed`, `quorum` (one with other members was
            decided), or how one member's part in it ended: `failed` (a worker did), `expired` (so did a worker's
            timer), `died` (its process did), `left` (it said so) or `lost` (its lease ended without a word).
            Of nodes without a seat: `waiting` and `refused`. `silent`: who had said nothing when another one left a run
            that was over, so that it may be lost. `ordered`: what somebody did to the job by hand.
        number: the round's, or the quorum's id.
        who: the host or replica that it is about; empty for all of them.
        node: the agent's id or the replica's id; empty for all of them.
        reason: why, in one line.
        failures: of `failed` and `expired`, the worker.
        noted: etcd's revision at which it was said first, as far as its writer could tell; 0 for the event's own.
        by: who wrote it: a member, or an operator.
        wall_ms: when, by the writer's clock, in milliseconds since 1970. For people: no order rests on it but that of
            ends which one writer saw.
        since_ms: of `lost`: the time after which it happened, by the same clock; 0 if nobody knows.
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

    @property
    def is_end(self) -> bool:
        """Whether it says how one member's part in a round, or quorum, ended."""
        return self.kind in _ENDS


_ENDS: Final = frozenset({"failed", "expired", "died", "left", "lost"})
_FORMED: Final = frozenset({"round", "quorum"})
_DECIDED: Final = frozenset({"round", "started", "limits", "recalled", "closed", "quorum"})


@dataclass(frozen=True, slots=True)
class PastEvent:
    """An event as it lies in etcd.

    Args:
        revision: the one at which it was written.
        life: which of the jobs that had this id one after the other it is about: 0, 1, ...
    """

    event: HistoryEvent
    revision: int
    key: str
    life: int = 0


def encode(event: HistoryEvent) -> bytes:
    """The record as JSON, with the layout's version and its texts cut to a length."""
    who, node, reason, by = map(cut, (event.who, event.node, event.reason, event.by))
    failures = tuple(map(clipped, event.failures[:1]))
    return dump(replace(event, who=who, node=node, reason=reason, by=by, failures=failures))


def clipped(failure: WorkerFailure) -> WorkerFailure:
    """The same, with its texts cut to a length."""
    fate, exception, timer = map(cut, (failure.fate, failure.exception, failure.timer))
    traceback = cut(failure.traceback, LONGEST_TRACEBACK)
    return replace(failure, fate=fate, exception=exception, timer=timer, traceback=traceback)


def cut(text: str, longest: int = LONGEST_LINE) -> str:
    """The head of a text that is too long."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def failures_from(key: str, raw: Raw, name: str) -> tuple[WorkerFailure, ...]:
    """The failures in the list that the field `name` is. Raises StateError."""
    return build_each(WorkerFailure, key, raw, name) if raw.get(name) != [] else ()


def parse_event(key: str, value: bytes) -> HistoryEvent:
    """Raises StateError."""
    raw = load(key, value)
    event = build(HistoryEvent, key, {**raw, "failures": failures_from(key, raw, "failures")})
    if event.kind not in _KINDS:
        raise StateError(key, f"is about a {event.kind!r}, which this ftcoord does not know")
    return event


def read_history(kvs: Iterable[tuple[str, bytes, int]]) -> list[PastEvent]:
    """The events in these keys, values and revisions, in etcd's order; what is none is left out.

    A decider that takes over may tell again how a member's part ended, and one whose answer was lost may write an event
    twice: only the first time counts. History outlives its job, so the id may have been used again since: numbers begin
    again then, and so does the next life.
    """
    found: list[PastEvent] = []
    told: set[object] = set()
    life, highest = 0, -1
    for key, value, revision in sorted(kvs, key=lambda kv: (kv[2], kv[0])):
        try:
            event = parse_event(key, value)
        except StateError:
            continue
        what = (event.kind, event.number, event.node) if event.is_end else event
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
    """Whether what was decided shows that the job is another one than that whose highest number this was."""
    if event.kind not in _DECIDED:
        return False
    return event.number <= highest if event.kind in _FORMED else event.number < highest


def last_life(past: Sequence[PastEvent]) -> list[PastEvent]:
    """The events of the job that had the id last."""
    return [one for one in past if one.life == past[-1].life]


def ends_in(past: Iterable[PastEvent], number: int) -> list[HistoryEvent]:
    """How parts in this round, or quorum, ended, in the order in which they were told; of events of one life."""
    ends = (replace(one.event, noted=one.event.noted or one.revision) for one in past if one.event.is_end)
    return [end for end in ends if end.number == number]
