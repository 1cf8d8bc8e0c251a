"""What jobs leave behind, and what may be deleted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.rendezvous_records import parse_decided
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue


@dataclass(frozen=True, slots=True)
class JobRemains:
    """Everything that decides whether a job's keys may be deleted.

    Args:
        job: its id.
        revision: etcd's revision at which this was read.
        decided: the record of its rounds.
        has_quorum: whether it has a record of its quorums.
        live: how many members, timers and heartbeats it has.
        keys: how many keys it has in all, except its history.
    """

    job: str
    revision: int
    decided: KeyValue | None
    has_quorum: bool
    live: int
    keys: int


def why_kept(remains: JobRemains, *, idle: bool) -> str:
    """Why the keys of a job must stay; empty if they may be deleted.

    Args:
        idle: whether to delete jobs that are not over, but have no members left.
    """
    if remains.live:
        return f"{remains.live} members, timers or heartbeats of it live"
    if remains.decided is None and not remains.has_quorum:
        return "it has neither a rendezvous nor quorums, so nobody can tell whether its store is in use"
    try:
        over = parse_decided(remains.decided.key, remains.decided.value).closed if remains.decided else ""
    except StateError as error:
        return str(error)
    if not over and not idle:
        return "nobody is there, but it is not over: its nodes or replicas may come back (--idle removes it)"
    return ""
