"""Follows the keys of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from ftcoord.core.layout import (
    Span,
    deaths_span,
    decided_key,
    decided_span,
    events_span,
    members_span,
    quorum_prefix,
    roll_span,
    rolls_span,
    roster_key,
    run_prefix,
)
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.operator.job_keys import GroupKeys, JobKeys
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror


def follow_job(
    etcd: Etcd,
    key_prefix: str,
    job: str,
    report: Callable[[JobKeys], None],
    failed: Callable[[BaseException], None],
    *,
    with_history: bool = False,
) -> Informer:
    """Calls `report` with a job's keys, as soon as they were read and after changes, on a thread of its own.

    With `with_history` the keys of its history are included.

    The keys of each of the two groups are in the order of etcd's events, but the groups have separate watches: for a
    moment one may be ahead of the other. `failed` is called if it ends with an error.
    """
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    spans = [
        Span(decided_key(prefix)),
        rolls_span(prefix),
        members_span(prefix),
        deaths_span(prefix),
        decided_span(quorum),
        members_span(quorum),
        deaths_span(quorum),
    ]
    status = len(spans)
    if with_history:
        spans += [events_span(prefix), events_span(quorum)]

    def look(*mirrors: Mirror) -> None:
        decided, rolls, members, deaths, heads, replicas, replica_deaths = (mirror.kvs for mirror in mirrors[:status])
        events: list[tuple[KeyValue, ...] | None] = [tuple(mirror.kvs.values()) for mirror in mirrors[status:]]
        events = events or [None, None]
        head = decided_key(quorum)
        rounds = GroupKeys(
            prefix,
            decided.get(decided_key(prefix)),
            None,
            {},
            _by_age(members),
            tuple(deaths.values()),
            events[0],
        )
        if (roll := rounds.roll_name) is not None:
            chunks = roll_span(prefix, roll)
            kvs = {key: kv for key, kv in rolls.items() if key in chunks}
            rounds = replace(rounds, roll=kvs)
        quorums = GroupKeys(
            quorum,
            heads.get(head),
            heads.get(roster_key(head)),
            {},
            _by_age(replicas),
            tuple(replica_deaths.values()),
            events[1],
        )
        keys = sum(len(mirror.kvs) for mirror in mirrors[:status])
        report(JobKeys(job, max(mirror.revision for mirror in mirrors), rounds, quorums, keys))

    return Informer(etcd, spans, look, "ftcoord-follower", failed, gathers=True)


def _by_age(kvs: dict[str, KeyValue]) -> tuple[KeyValue, ...]:
    return tuple(sorted(kvs.values(), key=attrgetter("create_revision")))
