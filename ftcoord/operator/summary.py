"""The summary of each job in a list, without its members. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftcoord.core.layout import decided_key, quorum_prefix, roster_key
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.rendezvous_records import parse_decided
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.told import JobLine


@dataclass(frozen=True, slots=True)
class JobSummaryKeys:
    """What a line of a list depends on.

    Args:
        decided: the record of the rounds.
        nodes: how many keys there are among the nodes.
        quorum: the decided record of the quorums and its roster, by key.
        replicas: how many keys there are among the replicas.
    """

    decided: KeyValue | None
    nodes: int
    quorum: Mapping[str, KeyValue]
    replicas: int


def tell_line(key_prefix: str, job: str, keys: JobSummaryKeys) -> JobLine:
    """One job of a list."""
    round_ = nodes = quorum = replicas = None
    states, note = list[str](), ""
    if keys.decided is not None or keys.nodes:
        state, round_, nodes, note = _rounds_line(keys.decided, keys.nodes)
        states.append(state)
    if keys.quorum or keys.replicas:
        state, quorum, replicas = _quorum_line(quorum_prefix(key_prefix, job), keys)
        states.append(state)
    state = states[0] if states else "other"
    return JobLine(job, state, round_, nodes, quorum, replicas, keys.nodes + keys.replicas, note)


def _rounds_line(decided: KeyValue | None, members: int) -> tuple[str, int, int, str]:
    waiting = "forming" if members else "empty"
    if decided is None:
        return waiting, 0, 0, ""
    try:
        record = parse_decided(decided.key, decided.value)
    except StateError as error:
        return "unreadable", 0, 0, str(error)
    state = waiting
    if record.closed:
        state = record.outcome or "closed"
    elif record.size and not record.recalled:
        state = "running" if record.ready else "seating"
        state = state if members >= record.size else "degraded"
    return state, record.number, record.size, record.closed or record.recalled or record.before


def _quorum_line(prefix: str, keys: JobSummaryKeys) -> tuple[str, int, int]:
    decided = keys.quorum.get(decided_key(prefix))
    if decided is None:
        return ("forming" if keys.replicas else "empty"), 0, 0
    roster = keys.quorum.get(roster_key(decided.key))
    try:
        quorum = parse_quorum(decided.key, decided.value, roster.value if roster else None)
    except StateError:
        return "unreadable", 0, 0
    size = len(quorum.seats)
    state = "empty" if not keys.replicas else "degraded" if keys.replicas < size else "training"
    return state, quorum.id, size
