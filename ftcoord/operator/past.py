"""What happened to a job, and why it is in its present state: from its history and its status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from ftcoord.core.causes import OBEYED, in_causal_order, is_consequence, told_end, told_first
from ftcoord.core.event_records import HistoryEvent, PastEvent, WorkerFailure, ends_in, last_life, read_history
from ftcoord.core.rendezvous_records import CLOSED, FAILED, FINISHED
from ftcoord.core.round_history import counted
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.told import (
    FORMAT,
    UNCOUNTED,
    Explanation,
    JobHistory,
    JobLine,
    JobStatus,
    QuorumStatus,
    ReplicaStatus,
    ToldEvent,
)

ROUNDS, QUORUMS = "rendezvous", "quorums"
"""The groups of a job, as they are told."""
MOST_BEHIND: Final = 8
"""The most replicas that are named as behind, or members as gone."""
MOST_CRASHES: Final = 3
"""The most crashes that are named of a run that has finished."""
_SIGKILL: Final = 9
_SENT: Final = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGINT")
"""Signals that a process gets from others only, never by a fault of its own."""


def tell_history(job: str, rounds: Iterable[KeyValue], quorums: Iterable[KeyValue]) -> JobHistory:
    """All events of a job, in etcd's order.

    Args:
        rounds, quorums: the keys of the two histories.
    """
    told = [*_told(ROUNDS, _past(rounds)), *_told(QUORUMS, _past(quorums))]
    return JobHistory(FORMAT, job, tuple(sorted(told, key=lambda one: one.revision)))


def explain(status: JobStatus, rounds: Iterable[KeyValue], quorums: Iterable[KeyValue]) -> Explanation:
    """Why a job is in its present state: by its rounds, if it has any, else by its quorums."""
    past, of_quorums = last_life(_past(rounds)), last_life(_past(quorums))
    if status.rounds is not None and _is_of_others(past, status.rounds.state, status.rounds.number, status.revision):
        past = []
    if status.quorum is not None and _is_of_others(of_quorums, status.quorum.state, status.quorum.id, status.revision):
        of_quorums = []
    if past or (status.rounds is not None and not of_quorums):
        return _explain_rounds(status, past)
    return _explain_quorums(status, of_quorums)


def tell_ended(job: str, rounds: Iterable[KeyValue], quorums: Iterable[KeyValue]) -> JobLine:
    """The line about a job without rounds and quorums: how it ended, if its history is left."""
    past = last_life(_past(rounds)) or last_life(_past(quorums))
    last = _last_known(past)
    state, note, at = "other", "", 0.0
    if last is not None:
        outcome, _, rest = last.reason.partition(": ")
        is_closed = last.kind == "closed" and outcome in (FINISHED, FAILED, CLOSED)
        state, note, at = outcome if is_closed else "ended", rest if is_closed else told_end(last), last.wall_ms / 1000
    return JobLine(job, state, None, None, None, None, 0, note, at)


def _last_known(past: Sequence[PastEvent]) -> HistoryEvent | None:
    """What tells best how a job ended: that it was closed, or the last end of a member, or what happened last."""
    events = [one.event for one in reversed(past)]
    closed = [one for one in events if one.kind == "closed"][:1]
    return next(iter(closed or [one for one in events if one.is_end] or events), None)


def _past(kvs: Iterable[KeyValue]) -> list[PastEvent]:
    return read_history((kv.key, kv.value, kv.mod_revision) for kv in kvs)


def _is_of_others(past: Sequence[PastEvent], state: str, number: int, revision: int) -> bool:
    """Whether this happened to an earlier job with the same id: until the present job has decided its first round, or
    quorum, no event shows that.

    Args:
        state, number: by the job's status, at this `revision` of etcd.
    """
    return state != "unreadable" and any(one.event.number > number for one in past if one.revision <= revision)


def _told(group: str, past: Iterable[PastEvent]) -> list[ToldEvent]:
    return [_tell(group, one.event, one.revision) for one in past]


def _tell(group: str, event: HistoryEvent, revision: int) -> ToldEvent:
    worker = event.failures[0] if event.failures else None
    at = event.wall_ms / 1000
    who = event.who, event.node, event.reason, event.noted
    return ToldEvent(revision, group, event.kind, event.number, *who, worker, event.by, at)


# -- rounds -----------------------------------------------------------------------------------------------------


def _explain_rounds(status: JobStatus, past: Sequence[PastEvent]) -> Explanation:
    now = _now_of_rounds(status, past)
    last = next((one for one in reversed(past) if one.event.kind in ("recalled", "closed")), None)
    is_over = last is not None and last.event.kind == "closed" and _next_round(past, last) is None
    healthy = status.healthy
    if status.rounds is None:  # all but the history has expired
        healthy = last is not None and is_over and _finished(last.event)
    do = _contradiction(status, past) or _do_now(status)
    nothing = Explanation(FORMAT, status.job, healthy, "", None, 0, "", now, "" if healthy else do)
    if last is None:
        known = _last_known(past) if status.rounds is None else None
        return replace(nothing, happened=f"The last that is known of it: {told_end(known)}.") if known else nothing
    if is_over and _finished(last.event):
        how = _after_colon(last.event.reason) + _on_its_way(past)
        return replace(nothing, happened=f"The run has finished: {how}.", now="", do="")
    number, ends = last.event.number, ends_in(past, last.event.number)
    first = _first(last, past, ends)
    return Explanation(
        FORMAT,
        status.job,
        healthy,
        _happened(last.event, first, is_over) + _who_was_lost(past, first),
        None if first is None else _tell(ROUNDS, first, _revision_of(past, first)),
        len({end.node for end in ends} - {first.node}) if first is not None else 0,
        _lost(past, last, number),
        now,
        _contradiction(status, past) or _advice(first) or _do_now(status) if first is not None or not healthy else "",
    )


def _on_its_way(past: Sequence[PastEvent]) -> str:
    """What first ended each of the last rounds of a run that has finished all the same."""
    recalls = {one.event.number: one for one in past if one.event.kind == "recalled"}
    firsts = [_first(one, past, ends_in(past, number)) for number, one in recalls.items()]
    told = [told_end(first) for first in firsts if first is not None and first.kind != "left"]
    more = f"{len(told) - MOST_CRASHES} more, " if len(told) > MOST_CRASHES else ""
    return f"; on its way: {more}{'; '.join(told[-MOST_CRASHES:])}" if told else ""


def _contradiction(status: JobStatus, past: Sequence[PastEvent]) -> str:
    """Who was refused while no round runs, and what to do about it."""
    if status.healthy or status.rounds is None or status.rounds.closed or status.rounds.state == "running":
        return ""
    since = max((one.revision for one in past if one.event.kind == "round"), default=0)
    refused = [one.event.reason for one in past if one.event.kind == "refused" and one.revision > since]
    return f"{refused[-1]}. Give all nodes the same --nnodes, or that one another --rdzv-id." if refused else ""


def _next_round(past: Sequence[PastEvent], last: PastEvent) -> HistoryEvent | None:
    """The first round after the one that this event ended."""
    later = (one.event for one in past if one.event.kind == "round" and one.event.number > last.event.number)
    return next(later, None)


def _first(last: PastEvent, past: Sequence[PastEvent], ends: Sequence[HistoryEvent]) -> HistoryEvent | None:
    """The first cause; None if no member caused the round's end, as when a node waits to join."""
    number = last.event.number
    recalls = [one for one in past if one.event.kind == "recalled" and one.event.number == number]
    ended = recalls[0] if recalls else last
    if not ends or not any(end.noted <= ended.revision for end in ends):
        return None
    return in_causal_order(ends)[0]


def _happened(last: HistoryEvent, first: HistoryEvent | None, is_over: bool) -> str:
    is_closed = last.kind == "closed"
    what = "The run is over" if is_over else f"Round {last.number} ended"
    what = f"{what}, and the run with it, which was started again since" if is_closed and not is_over else what
    if first is None:
        return f"{what}: {_after_colon(last.reason) if is_closed else last.reason}."
    by = f" ({_after_colon(last.reason)})" if is_closed and told_end(first) not in last.reason else ""
    return f"{what}{by}. It began with this: {told_first(first)}."


def _who_was_lost(past: Sequence[PastEvent], first: HistoryEvent | None) -> str:
    """For a first cause that is only a consequence: which members may be the cause."""
    if first is None or not is_consequence(first):
        return ""
    silent = [one.event for one in past if one.event.kind == "silent" and one.event.number == first.number]
    return f" {silent[-1].reason}, the last that looked: it is likely that this one was lost." if silent else ""


def _lost(past: Sequence[PastEvent], last: PastEvent, number: int) -> str:
    """What was lost with that round."""
    started = any(one.event.kind == "started" and one.event.number == number for one in past)
    if not started:
        return f"No worker had started in round {number}, so no work was lost." if number else ""
    stopped = f"The workers of round {number} were stopped: what they did since their last checkpoint is lost."
    successor = _next_round(past, last)
    return f"{stopped} Round {successor.number} followed: {_head(successor.reason)}." if successor else stopped


def _now_of_rounds(status: JobStatus, past: Sequence[PastEvent]) -> str:
    rounds = status.rounds
    if rounds is None:
        return "Nothing is left of it but its history." if past else "It has no history."
    if rounds.closed:
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


def _do_now(status: JobStatus) -> str:
    rounds = status.rounds
    if rounds is None or rounds.closed:
        return ""
    if rounds.state == "unreadable":
        return "See what lies in the keys that `ftcoord status` calls unreadable."
    missing = rounds.min_nodes - sum(one.standing not in UNCOUNTED for one in rounds.members)
    if missing > 0:
        return (
            f"Start {missing} more {'node' if missing == 1 else 'nodes'} with the same --rdzv-id and --rdzv-endpoint."
        )
    return ""


# -- quorums ----------------------------------------------------------------------------------------------------


def _explain_quorums(status: JobStatus, past: Sequence[PastEvent]) -> Explanation:
    quorum = status.quorum
    now = "It has no history." if not past else "Nothing is left of it but its history."
    if quorum is not None:
        # between two steps nobody asks yet: why there is no next quorum is no news then
        waits = "" if quorum.healthy and quorum.state == "training" else f"; {quorum.next.reason}"
        gone = _gone([f"{one.replica_id}: {one.cause}" if one.cause else one.replica_id for one in quorum.missing])
        which = f"quorum {quorum.id} has {counted(quorum.size, 'replica')}" if quorum.number else "it had no quorum yet"
        now = f"Now it is {quorum.state}: {which}{waits}{gone}."
    last = next((one for one in reversed(past) if one.event.is_end), None)
    if last is None:
        return Explanation(FORMAT, status.job, status.healthy, "", None, 0, "", now, "")
    number, ends = last.event.number, _of_last_members(ends_in(past, last.event.number))
    first = _best_known(in_causal_order(ends)[0], ends)
    successor = next((one.event for one in past if one.event.kind == "quorum" and one.revision >= last.revision), None)
    lost = f"The others lost the step that they were in, at most. {_healing(quorum)}"
    if successor is not None:
        lost = f"Quorum {successor.number} followed: {successor.reason}. {lost}"
    return Explanation(
        FORMAT,
        status.job,
        status.healthy,
        f"Quorum {number} lost members. It began with this: {told_first(first)}.",
        _tell(QUORUMS, first, _revision_of(past, first)),
        len({end.node for end in ends} - {first.node}),
        lost.rstrip(),
        now,
        _order(past, first) or _advice(first),
    )


def _order(past: Sequence[PastEvent], first: HistoryEvent) -> str:
    """That somebody ended this replica by hand; empty if nobody did. Its process only exits then, with status 1."""
    before = [one.event for one in past if one.event.who == first.who and one.revision < _revision_of(past, first)]
    return f"It was ended by hand: {before[-1].reason}." if before and before[-1].kind == "ordered" else ""


def _of_last_members(ends: Sequence[HistoryEvent]) -> list[HistoryEvent]:
    """The ends without those of replicas that came back since, under the same quorum id, and ended again."""
    last = {end.node: end.member for end in ends}
    return [end for end in ends if end.member == last[end.node]]


def _best_known(first: HistoryEvent, ends: Sequence[HistoryEvent]) -> HistoryEvent:
    """The others may have gone on without a replica long before anybody knew what had become of it."""
    ranks = {"died": 0, "lost": 1}
    same = [end for end in ends if (end.node, end.member) == (first.node, first.member)]
    return min(same, key=lambda end: ranks.get(end.kind, len(ranks)))


def _healing(quorum: QuorumStatus | None) -> str:
    """Which replicas are behind, and heal from another one."""
    behind = [one for one in quorum.replicas if one.behind] if quorum is not None else []
    told = [_behind(one) for one in behind[:MOST_BEHIND]]
    return f"{'; '.join(told)}." if told else ""


def _behind(one: ReplicaStatus) -> str:
    heals = f", and heals from {one.heals_from}" if one.heals_from else ""
    return f"{one.replica_id} is {counted(one.behind, 'step')} behind{heals}"


# -- words ------------------------------------------------------------------------------------------------------


def _advice(first: HistoryEvent | None) -> str:
    """What to do about a first cause."""
    if first is None:
        return ""
    if is_consequence(first):
        return "See which host of that round does not run, or reaches neither etcd nor the others."
    if first.failures:
        return _advice_for_worker(first, first.failures[0])
    if first.kind == "lost":
        return f"See whether the host of {first.who} runs, and whether it reaches etcd; replace it if not."
    if first.kind == "left":
        obeyed = OBEYED in first.reason
        return "It was told to stop: by the scheduler, or by hand." if obeyed else ""
    if "evicted by" in first.reason:
        return "It was evicted by hand: it comes back unless its process or its host is stopped."
    if "(OOM)" in first.reason:
        return "Give the host's job more memory, or have it use less."
    if sent := _sent(first.reason):
        return _who_sent(sent, first.who)
    return f"See the log of {first.who}, and what its kernel says (dmesg)."


def _advice_for_worker(end: HistoryEvent, worker: WorkerFailure) -> str:
    if worker.timer:
        return f"See in the log of {end.who} where the worker was in {worker.timer!r}; give it longer if it was slow."
    if "outofmemoryerror" in worker.exception.lower().replace(" ", "") or "(OOM)" in worker.fate:
        return "Give it more memory, or have it use less, such as smaller batches."
    if worker.exception:
        return "See the traceback: `ftcoord history -o json` has its head, and the worker's log has all of it."
    if worker.signal == _SIGKILL:
        return f"See who killed it on {end.who}: the kernel says so if memory ran out (dmesg)."
    if sent := _sent(worker.fate):
        return _who_sent(sent, end.who)
    if worker.signal:
        return f"See the worker's log on {end.who}: a library crashed, or aborted. A core dump tells where."
    return (
        f"See the worker's log on {end.who}. With torch's `record` around its main function the exception is told here:"
        " torch.distributed.elastic.multiprocessing.errors."
    )


def _sent(fate: str) -> str:
    """The signal that others sent; empty for none."""
    return next((name for name in _SENT if f"({name})" in fate), "")


def _who_sent(name: str, host: str) -> str:
    return (
        f"See who sent {name} on {host}: schedulers announce so that they end or preempt a job (Slurm by --signal)."
        " Have the script handle it, or only the batch script get it."
    )


def _finished(closed: HistoryEvent) -> bool:
    return closed.reason.startswith(f"{FINISHED}:")


def _after_colon(reason: str) -> str:
    """The reason of a run's end, without its outcome."""
    return reason.partition(": ")[2] or reason


def _head(reason: str) -> str:
    """The reason of a new round, without why the last one ended."""
    return reason.partition("; the round before ended: ")[0]


def _revision_of(past: Sequence[PastEvent], event: HistoryEvent) -> int:
    return next(one.revision for one in past if one.event.end_id == event.end_id)
