"""What happened to a job, and why it is in its present state: from its history, its deaths and its status. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ftcoord.core.death_records import KnownCause, causes_in
from ftcoord.core.history import (
    NOT_ASKING,
    OBEYED,
    HistoryEvent,
    PastEvent,
    ends_in,
    in_causal_order,
    is_consequence,
    read_history,
    replica_end,
    told_first,
)
from ftcoord.core.rendezvous_records import FINISHED
from ftcoord.escaping import counted, named
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.report import FORMAT, UNCOUNTED, Explanation, JobHistory, JobStatus, QuorumStatus, ToldEvent

ROUNDS, QUORUMS = "rendezvous", "quorums"
"""The groups of a job, as they are told."""
MOST_BEHIND: Final = 8
"""The most replicas that are named as behind, or members as gone."""
MOST_CRASHES: Final = 3
"""The most crashes that are named of a run that has finished."""


def tell_history(job: str, rounds: Iterable[KeyValue], quorums: Iterable[KeyValue]) -> JobHistory:
    """All events of a job, in etcd's order.

    Args:
        rounds, quorums: the keys of the two histories.
    """
    groups = (ROUNDS, rounds), (QUORUMS, quorums)
    told = [_tell(group, event, revision) for group, kvs in groups for event, revision in _past(kvs)]
    return JobHistory(FORMAT, job, tuple(sorted(told, key=lambda one: one.revision)))


def explain(
    status: JobStatus, rounds: Iterable[KeyValue], quorums: Iterable[KeyValue], deaths: Iterable[KeyValue] = ()
) -> Explanation:
    """Why a job is in its present state: by its rounds, if it has any, else by its quorums.

    Args:
        rounds, quorums: the keys of the two histories.
        deaths: the keys of the causes of death of members of quorums.
    """
    past, of_quorums = _past(rounds), _past(quorums)
    if past or (status.rounds is not None and not of_quorums):
        return _explain_rounds(status, past)
    return _explain_quorums(status, of_quorums, causes_in((kv.key, kv.value, kv.create_revision) for kv in deaths))


def _past(kvs: Iterable[KeyValue]) -> list[PastEvent]:
    return read_history((kv.key, kv.value, kv.mod_revision) for kv in kvs)


def _tell(group: str, event: HistoryEvent, revision: int) -> ToldEvent:
    worker = event.failures[0] if event.failures else None
    who = event.who, event.node, event.reason, event.noted
    return ToldEvent(revision, group, event.kind, event.number, *who, worker, event.by, event.wall_ms / 1000)


def _revision_of(past: Sequence[PastEvent], end: HistoryEvent) -> int:
    """When it was written; for an end that is not in the history, when it was noted."""
    return next((revision for event, revision in past if event.end_id == end.end_id), end.noted)


# -- rounds -----------------------------------------------------------------------------------------------------


def _explain_rounds(status: JobStatus, past: Sequence[PastEvent]) -> Explanation:
    now, do = _now_of_rounds(status), _do_now(status)
    nothing = Explanation(FORMAT, status.job, status.healthy, "", None, 0, "", now, "" if status.healthy else do)
    last = next((one for one in reversed(past) if one.event.kind in ("recalled", "closed")), None)
    if last is None:
        return nothing
    number, is_closed, reason = last.event.number, last.event.kind == "closed", last.event.reason
    successor = next((event for event, _ in past if event.kind == "round" and event.number > number), None)
    if is_closed and successor is None and reason.startswith(f"{FINISHED}:"):
        how = _after_colon(reason) + _on_its_way(past)
        return replace(nothing, happened=f"The run has finished: {how}.", now="", do="")
    first, followed = _first(past, last)
    what = f"Round {number} ended"
    if is_closed:
        what = "The run is over" if successor is None else f"{what}, and the run with it, which was started again since"
        reason = _after_colon(reason)
    nothing = replace(nothing, happened=f"{what}: {reason}.", lost=_lost(past, number, successor))
    if first is None:
        return nothing
    by = f" ({reason})" if is_closed and first.line not in reason else ""
    return replace(
        nothing,
        happened=f"{what}{by}. It began with this: {told_first(first)}.{_who_was_lost(past, first)}",
        first=_tell(ROUNDS, first, _revision_of(past, first)),
        followed=followed,
        do=_contradiction(status) or _advice(first) or do,
    )


def _first(past: Sequence[PastEvent], last: PastEvent) -> tuple[HistoryEvent | None, int]:
    """The first cause of a round's end, and how many more nodes ended; None if no member caused it, as when a node
    waits to join."""
    number, ends = last.event.number, ends_in(past, last.event.number)
    recalls = [revision for event, revision in past if event.kind == "recalled" and event.number == number]
    if not any(end.noted <= (recalls or [last.revision])[0] for end in ends):
        return None, 0
    first = in_causal_order(ends)[0]
    return first, len({end.node for end in ends} - {first.node})


def _on_its_way(past: Sequence[PastEvent]) -> str:
    """What first ended each of the last rounds of a run that has finished all the same."""
    recalls = {one.event.number: one for one in past if one.event.kind == "recalled"}
    firsts = [_first(past, one)[0] for one in recalls.values()]
    told = [first.line for first in firsts if first is not None and first.kind != "left"]
    more = f"{len(told) - MOST_CRASHES} more, " if len(told) > MOST_CRASHES else ""
    return f"; on its way: {more}{'; '.join(told[-MOST_CRASHES:])}" if told else ""


def _who_was_lost(past: Sequence[PastEvent], first: HistoryEvent) -> str:
    """For a first cause that is only a consequence: which members may be the cause."""
    silent = [event for event, _ in past if event.kind == "silent" and event.number == first.number]
    if not silent or not is_consequence(first):
        return ""
    return f" {silent[-1].reason}, the last that looked: it is likely that this one was lost."


def _lost(past: Sequence[PastEvent], number: int, successor: HistoryEvent | None) -> str:
    """What was lost with that round."""
    if not any(event.kind == "started" and event.number == number for event, _ in past):
        return f"No worker had started in round {number}, so no work was lost." if number else ""
    stopped = f"The workers of round {number} were stopped: what they did since their last checkpoint is lost."
    if successor is None:
        return stopped
    head, _, _ = successor.reason.partition("; the round before ended: ")
    return f"{stopped} Round {successor.number} followed: {head}."


def _now_of_rounds(status: JobStatus) -> str:
    rounds = status.rounds
    if rounds is None or rounds.closed:
        return ""
    gone = _gone([one.cause or one.host for one in rounds.missing])
    if rounds.state == "running":
        left = f"{rounds.size - len(rounds.missing)} of " if gone else ""
        return f"Now round {rounds.number} runs on {left}{counted(rounds.size, 'node')}{gone}."
    if gone:
        return f"Now it is {rounds.state}, and was in round {rounds.number}{gone}."
    return f"Now it is {rounds.state}: {rounds.next.reason}."


def _gone(causes: Sequence[str]) -> str:
    """Who is missing, and why; empty if nobody is."""
    more = f"; {len(causes) - MOST_BEHIND} more" if len(causes) > MOST_BEHIND else ""
    return f"; gone: {'; '.join(causes[:MOST_BEHIND])}{more}" if causes else ""


def _contradiction(status: JobStatus) -> str:
    """Who is refused while no round runs, and what to do about it."""
    rounds = status.rounds
    if status.healthy or rounds is None or rounds.closed or rounds.state == "running":
        return ""
    refused = named(one.host for one in rounds.members if one.standing == "refused")
    what = "is refused, since its --nnodes contradicts this run's. Give all nodes the same, or that one"
    return f"{refused} {what} another --rdzv-id." if refused else ""


def _do_now(status: JobStatus) -> str:
    rounds = status.rounds
    if rounds is None or rounds.closed:
        return ""
    if rounds.state == "unreadable":
        return "See what lies in the keys that `ftcoord status` calls unreadable."
    missing = rounds.min_nodes - sum(one.standing not in UNCOUNTED for one in rounds.members)
    start = f"Start {counted(missing, 'more node')} with the same --rdzv-id and --rdzv-endpoint." if missing > 0 else ""
    return _contradiction(status) or start


# -- quorums ----------------------------------------------------------------------------------------------------


def _explain_quorums(status: JobStatus, past: Sequence[PastEvent], deaths: Mapping[str, KnownCause]) -> Explanation:
    quorum = status.quorum
    now = "It has no history."
    if quorum is not None:
        # between two steps nobody asks yet: why there is no next quorum is no news then
        waits = "" if quorum.healthy and quorum.state == "training" else f"; {quorum.next.reason}"
        gone = _gone([f"{one.replica_id}: {one.cause}" if one.cause else one.replica_id for one in quorum.missing])
        which = f"quorum {quorum.id} has {counted(quorum.size, 'replica')}" if quorum.number else "it had no quorum yet"
        now = f"Now it is {quorum.state}: {which}{waits}{gone}."
    # Ends that were written with one decision are one interruption: the replicas come back, and the id may stay.
    at = next((revision for event, revision in reversed(past) if event.is_end), 0)
    ends = [_known_now(one, quorum, deaths) for one in past if one.event.is_end and one.revision == at]
    if quorum is not None and quorum.missing:  # no decision tells of these yet
        at = status.revision
        ends = [_end_of(quorum.id, one.member, one.replica_id, deaths=deaths, noted=at) for one in quorum.missing]
    if not ends:
        return Explanation(FORMAT, status.job, status.healthy, "", None, 0, "", now, "")
    first = in_causal_order(ends)[0]
    successor = next((event for event, revision in past if event.kind == "quorum" and revision >= at), None)
    followed = f"Quorum {successor.number} followed: {successor.reason}. " if successor is not None else ""
    lost = f"{followed}The others lost the step that they were in, at most. {_healing(quorum)}"
    return Explanation(
        FORMAT,
        status.job,
        status.healthy,
        f"Quorum {first.number} lost members. It began with this: {told_first(first)}.",
        _tell(QUORUMS, first, _revision_of(past, first)),
        len(ends) - 1,
        lost.rstrip(),
        now,
        _order(past, first) or _advice(first),
    )


def _known_now(one: PastEvent, quorum: QuorumStatus | None, deaths: Mapping[str, KnownCause]) -> HistoryEvent:
    """An end as it is known now: the others may have gone on without a replica before it died, or was lost."""
    end = replace(one.event, noted=one.event.noted or one.revision)
    live = {replica.member for replica in quorum.replicas} if quorum is not None else frozenset[str]()
    has_gone = NOT_ASKING in end.reason and end.member not in live
    if end.kind == "died" or not (end.member in deaths or has_gone):
        return end
    return _end_of(end.number, end.member, end.node, deaths=deaths, noted=end.noted)


def _end_of(number: int, member: str, name: str, *, deaths: Mapping[str, KnownCause], noted: int) -> HistoryEvent:
    end = replica_end(number, member, name, causes=deaths, words={})
    return replace(end, noted=end.noted or noted)


def _order(past: Sequence[PastEvent], first: HistoryEvent) -> str:
    """That somebody ended this replica by hand; empty if nobody did. Its process only exits then, with status 1."""
    until = _revision_of(past, first)
    about = [event for event, at in past if event.who == first.who and event.end_id != first.end_id and at <= until]
    return f"It was ended by hand: {about[-1].reason}." if about and about[-1].kind == "ordered" else ""


def _healing(quorum: QuorumStatus | None) -> str:
    """Which replicas are behind, and heal from another one."""
    behind = [one for one in quorum.replicas if one.behind] if quorum is not None else []
    told = [
        f"{one.replica_id} is {counted(one.behind, 'step')} behind"
        + (f", and heals from {one.heals_from}" if one.heals_from else "")
        for one in behind[:MOST_BEHIND]
    ]
    return f"{'; '.join(told)}." if told else ""


# -- words ------------------------------------------------------------------------------------------------------

_ADVICE: Final = (
    ("^follows", "See which host of that round does not run, or reaches neither etcd nor the others."),
    ("^lost", "See whether the host of {who} runs, and whether it reaches etcd; replace it if not."),
    (f"^left .*{OBEYED}", "It was told to stop: by the scheduler, or by hand."),
    ("^left", ""),
    ("^expired", "See in the log of {who} where the worker was in {timer!r}; give it longer if it was slow."),
    ("^died .*evicted by", "It was evicted by hand: it comes back unless its process or its host is stopped."),
    (r"^died .*\(OOM\)", "Give the host's job more memory, or have it use less."),
    (r"\(OOM\)|outofmemoryerror", "Give it more memory, or have it use less, such as smaller batches."),
    (
        "^failed raised",
        "See the traceback: `ftcoord history -o json` has its head, and the worker's log has all of it.",
    ),
    (r"^failed .*\(SIGKILL\)", "See who killed it on {who}: the kernel says so if memory ran out (dmesg)."),
    (
        r"\((SIGUSR1|SIGUSR2|SIGTERM|SIGHUP|SIGINT)\)",  # a process gets these from others only
        "See who sent {signal} on {who}: schedulers announce so that they end or preempt a job (Slurm by --signal)."
        " Have the script handle it, or only the batch script get it.",
    ),
    ("^died", "See the log of {who}, and what its kernel says (dmesg)."),
    ("signal", "See the worker's log on {who}: a library crashed, or aborted. A core dump tells where."),
    (
        "",
        "See the worker's log on {who}. With torch's `record` around its main function the exception is told here:"
        " torch.distributed.elastic.multiprocessing.errors.",
    ),
)
"""What to do about a first cause that is found in this way, the first one counts."""


def _advice(first: HistoryEvent) -> str:
    """What to do about a first cause."""
    about, timer = f"{first.kind} {first.reason}", ""
    if first.failures:
        worker = first.failures[0]
        raised, timer = worker.exception.lower().replace(" ", ""), worker.timer
        about = f"{first.kind} raised {raised}" if raised else f"{first.kind} {worker.fate}"
    if is_consequence(first):
        about = "follows"
    found = ((re.search(pattern, about, re.DOTALL), advice) for pattern, advice in _ADVICE)
    match, advice = next((match, advice) for match, advice in found if match)
    return advice.format(who=first.who, timer=timer, signal=match[match.lastindex or 0])


def _after_colon(reason: str) -> str:
    """The reason of a run's end, without its outcome."""
    return reason.partition(": ")[2] or reason
