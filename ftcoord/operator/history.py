"""What happened to a job, and why it is in its present state: from its history, its deaths and its status. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from ftcoord.core import history
from ftcoord.core.death_records import KnownCause, causes_in
from ftcoord.core.history import HistoryEvent, PastEvent
from ftcoord.core.rendezvous_records import DONE
from ftcoord.escaping import counted, named
from ftcoord.operator import report
from ftcoord.operator.report import FORMAT, UNCOUNTED, Explanation, JobStatus, QuorumStatus, made_of
from ftcoord.operator.status import GroupKeys, JobKeys, late_ends

ROUNDS, QUORUMS = "rendezvous", "quorums"
"""The names of a job's groups in reports."""
MOST_BEHIND: Final = 8
"""The most replicas that are named as behind, or members as gone."""


def history_of(keys: JobKeys) -> report.JobHistory:
    """All events of a job, in etcd's order, from keys that were read with its history."""
    groups = (ROUNDS, keys.rounds), (QUORUMS, keys.quorum)
    told = [_job_event(name, event, revision) for name, group in groups for event, revision in _past(group)]
    return {"format": FORMAT, "job": keys.job, "events": sorted(told, key=itemgetter("revision"))}


def explain(status: JobStatus, keys: JobKeys) -> Explanation:
    """Why a job is in its present state, by its rounds, if it has any, else by its quorums; from its status and keys
    that were read with its history."""
    past, of_quorums = _past(keys.rounds), _past(keys.quorum)
    if past or (status["rounds"] is not None and not of_quorums):
        return _explain_rounds(status, past, late_ends(keys.rounds))
    deaths = ((kv.key, kv.value, kv.create_revision) for kv in keys.quorum.deaths)
    return _explain_quorums(status, of_quorums, causes_in(deaths))


def _nothing(status: JobStatus, now: str) -> Explanation:
    """What is known where nothing has happened."""
    known = {"format": FORMAT, "job": status["job"], "healthy": status["healthy"], "now": now}
    return made_of(None, Explanation, **known, happened="", first=None, followed=0, lost="", do="")


def _past(keys: GroupKeys) -> list[PastEvent]:
    return history.read_history((kv.key, kv.value, kv.mod_revision) for kv in keys.events)


def _job_event(group: str, event: HistoryEvent, revision: int) -> report.JobEvent:
    worker, at = event.failures[0] if event.failures else None, event.wall_ms / 1000
    return made_of(event, report.JobEvent, revision=revision, group=group, worker=worker, at=at)


def _revision_of(past: Sequence[PastEvent], end: HistoryEvent) -> int:
    """When it was written; for an end that is not in the history, when it was noted."""
    return next((revision for event, revision in past if event.end_id == end.end_id), end.noted)


# -- rounds -----------------------------------------------------------------------------------------------------


def _explain_rounds(status: JobStatus, past: Sequence[PastEvent], late: Sequence[HistoryEvent]) -> Explanation:
    """What is `late` counts if all that was known at a decision only followed from another end."""
    refused, start = _do_now(status)
    nothing: Explanation = {**_nothing(status, _now_of_rounds(status)), "do": refused or start}
    last = next((one for one in reversed(past) if one.event.kind in ("recalled", "closed")), None)
    if last is None:
        return nothing
    number, is_closed, reason = last.event.number, last.event.kind == "closed", last.event.reason
    successor = next((event for event, _ in past if event.kind == "round" and event.number > number), None)
    if is_closed and successor is None and (outcome := reason.partition(":")[0]) in DONE:
        return {**nothing, "happened": f"The run has {outcome}: {_after_colon(reason)}.", "now": "", "do": ""}
    what = f"Round {number} ended"
    if is_closed:
        what = "The run is over" if successor is None else f"{what}, and the run with it, which was started again since"
        reason = _after_colon(reason)
    nothing = {**nothing, "happened": f"{what}: {reason}.", "lost": _lost(past, number, successor)}
    recalls = (at for event, at in past if event.kind == "recalled" and event.number == number)
    recalled_at, ends = next(recalls, last.revision), history.ends_in(past, number)
    if not any(end.noted <= recalled_at for end in ends):  # no member caused it, as when a node waits to join
        return nothing
    first = history.in_causal_order(ends)[0]
    if history.is_consequence(first):
        ends += [end for end in late if end.number == number]
        first = history.in_causal_order(ends)[0]
    by = f" ({reason})" if is_closed and first.line not in reason else ""
    return {
        **nothing,
        "happened": f"{what}{by}. It began with this: {history.told_first(first)}.",
        "first": _job_event(ROUNDS, first, _revision_of(past, first)),
        "followed": len({end.node for end in ends} - {first.node}),
        "do": refused or _advice(first) or start,
    }


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
    rounds = status["rounds"]
    if rounds is None or rounds["closed"]:
        return ""
    state, number, size, missing = rounds["state"], rounds["number"], rounds["size"], rounds["missing"]
    gone = _gone([one["cause"] or one["host"] for one in missing])
    if state == "running":
        left = f"{size - len(missing)} of " if gone else ""
        return f"Now round {number} runs on {left}{counted(size, 'node')}{gone}."
    reason = rounds["stop"] or rounds["next"]["reason"]
    return f"Now it is {state}, and was in round {number}{gone}." if gone else f"Now it is {state}: {reason}."


def _gone(causes: Sequence[str]) -> str:
    """Who is missing, and why; empty if nobody is."""
    more = f"; {len(causes) - MOST_BEHIND} more" if len(causes) > MOST_BEHIND else ""
    return f"; gone: {'; '.join(causes[:MOST_BEHIND])}{more}" if causes else ""


def _do_now(status: JobStatus) -> tuple[str, str]:
    """What to do about nodes that are refused while no round runs; and about what else the run waits for."""
    rounds = status["rounds"]
    if rounds is None or rounds["closed"] or status["healthy"]:
        return "", ""
    if rounds["state"] == "unreadable":
        return "", "See what lies in the keys that `ftcoord status` calls unreadable."
    missing = rounds["min_nodes"] - sum(one["standing"] not in UNCOUNTED for one in rounds["members"])
    start = f"Start {counted(missing, 'more node')} with the same --rdzv-id and --rdzv-endpoint." if missing > 0 else ""
    refused = named(one["host"] for one in rounds["members"] if one["standing"] == "refused")
    if not refused or rounds["state"] == "running":
        return "", start
    what = "is refused, since its --nnodes contradicts this run's. Give all nodes the same, or that one"
    return f"{refused} {what} another --rdzv-id.", start


# -- quorums ----------------------------------------------------------------------------------------------------


def _explain_quorums(status: JobStatus, past: Sequence[PastEvent], deaths: Mapping[str, KnownCause]) -> Explanation:
    quorum, now, missing = status["quorum"], "It has no history.", list[report.MissingReplica]()
    if quorum is not None:
        missing, state = quorum["missing"], quorum["state"]
        # between two steps nobody asks yet: why there is no next quorum is no news then
        waits = "" if quorum["healthy"] and state == "training" else f"; {quorum['stop'] or quorum['next']['reason']}"
        gone = _gone([": ".join(filter(None, (one["replica_id"], one["cause"]))) for one in missing])
        which = f"quorum {quorum['id']} has {counted(quorum['size'], 'replica')}"
        now = f"Now it is {state}: {which if quorum['number'] else 'it had no quorum yet'}{waits}{gone}."
    # Ends that were written with one decision are one interruption: the replicas come back, and the id may stay.
    at = next((revision for event, revision in reversed(past) if event.is_end), 0)
    ends = [_known_now(one, quorum, deaths) for one in past if one.event.is_end and one.revision == at]
    if quorum is not None and missing:  # no decision has named these yet
        at, id_ = status["revision"], quorum["id"]
        ends = [_end_of(id_, one["member"], one["replica_id"], deaths=deaths, noted=at) for one in missing]
    nothing = _nothing(status, now)
    if quorum is not None and quorum["state"] in DONE:
        reason = next((one.event.reason for one in reversed(past) if one.event.kind == "closed"), "")
        return {**nothing, "happened": f"The run has {quorum['state']}: {_after_colon(reason)}.", "now": ""}
    if not ends:
        return nothing
    first = history.in_causal_order(ends)[0]
    successor = next((event for event, revision in past if event.kind == "quorum" and revision >= at), None)
    followed = f"Quorum {successor.number} followed: {successor.reason}. " if successor is not None else ""
    lost = f"{followed}The others lost the step that they were in, at most. {_healing(quorum)}"
    return {
        **_nothing(status, now),
        "happened": f"Quorum {first.number} lost members. It began with this: {history.told_first(first)}.",
        "first": _job_event(QUORUMS, first, _revision_of(past, first)),
        "followed": len(ends) - 1,
        "lost": lost.rstrip(),
        "do": _order(past, first) or _advice(first),
    }


def _known_now(one: PastEvent, quorum: QuorumStatus | None, deaths: Mapping[str, KnownCause]) -> HistoryEvent:
    """An end as it is known now: the others may have gone on without a replica before it died, or was lost."""
    end = replace(one.event, noted=one.event.noted or one.revision)
    live = {replica["member"] for replica in quorum["replicas"]} if quorum is not None else frozenset[str]()
    has_gone = history.NOT_ASKING in end.reason and end.member not in live
    if end.kind == "died" or not (end.member in deaths or has_gone):
        return end
    return _end_of(end.number, end.member, end.node, deaths=deaths, noted=end.noted)


def _end_of(number: int, member: str, name: str, *, deaths: Mapping[str, KnownCause], noted: int) -> HistoryEvent:
    end = history.replica_end(number, member, name, causes=deaths, words={})
    return replace(end, noted=end.noted or noted)


def _order(past: Sequence[PastEvent], first: HistoryEvent) -> str:
    """That somebody ended this replica by hand; empty if nobody did. Its process only exits then, with status 1."""
    until = _revision_of(past, first)
    about = [event for event, at in past if event.who == first.who and event.end_id != first.end_id and at <= until]
    return f"It was ended by hand: {about[-1].reason}." if about and about[-1].kind == "ordered" else ""


def _healing(quorum: QuorumStatus | None) -> str:
    """Which replicas are behind, and heal from another one."""
    behind = [one for one in quorum["replicas"] if one["behind"]] if quorum is not None else []
    told = [
        f"{one['replica_id']} is {counted(one['behind'], 'step')} behind"
        + (f", and heals from {one['heals_from']}" if one["heals_from"] else "")
        for one in behind[:MOST_BEHIND]
    ]
    return f"{'; '.join(told)}." if told else ""


# -- words ------------------------------------------------------------------------------------------------------

_ADVICE: Final = (
    ("^follows", "See which host of that round does not run, or reaches neither etcd nor the others."),
    ("^lost", "See whether the host of {who} runs, and whether it reaches etcd; replace it if not."),
    (f"^left .*{history.OBEYED}", "It was asked to stop: by the scheduler, or by hand."),
    ("^left", ""),
    ("^expired", "See in the log of {who} where the worker was in {timer!r}; give it longer if it was slow."),
    ("^died .*evicted by", "It was evicted by hand: it comes back unless its process or its host is stopped."),
    (r"^died .*\(OOM\)", "Give the host's job more memory, or have it use less."),
    (r"\(OOM\)|outofmemoryerror", "Give it more memory, or have it use less, such as smaller batches."),
    (
        "^failed raised",
        "See the traceback: `ftcoord history -o json` has its head, and the worker's log has all of it.",
    ),
    (r"^failed .*\(SIGKILL\)", "See who killed it on {who}: the kernel logs it if memory ran out (dmesg)."),
    (
        r"\((SIGUSR1|SIGUSR2|SIGTERM|SIGHUP|SIGINT)\)",  # a process gets these from others only
        "See who sent {signal} on {who}: schedulers announce so that they end or preempt a job (Slurm by --signal)."
        " Have the script handle it, or only the batch script get it.",
    ),
    ("^died", "See the log of {who}, and what its kernel logged (dmesg)."),
    ("signal", "See the worker's log on {who}: a library crashed, or aborted. A core dump shows where."),
    (
        "",
        "See the worker's log on {who}. With torch's `record` around its main function the exception is shown here:"
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
    if history.is_consequence(first):
        about = "follows"
    found = ((re.search(pattern, about, re.DOTALL), advice) for pattern, advice in _ADVICE)
    match, advice = next((match, advice) for match, advice in found if match)
    return advice.format(who=first.who, timer=timer, signal=match[match.lastindex or 0])


def _after_colon(reason: str) -> str:
    """The reason of a run's end, without its outcome."""
    return reason.partition(": ")[2] or reason
