"""Follows the keys of a job."""

from __future__ import annotations

from collections.abc import Callable

from ftcoord.core.layout import (
    events_span,
    quorum_prefix,
    run_prefix,
)
from ftcoord.etcd.api import Etcd
from ftcoord.operator.job_keys import JobKeys, keys_of, spans_of
from ftcoord.primitives.mirror import Informer, Mirror


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
    spans = list(spans_of(key_prefix, job))
    status = len(spans)
    if with_history:
        spans += [events_span(run_prefix(key_prefix, job)), events_span(quorum_prefix(key_prefix, job))]

    def look(*mirrors: Mirror) -> None:
        found = [mirror.kvs.values() for mirror in mirrors[:status]]
        events = [tuple(mirror.kvs.values()) for mirror in mirrors[status:]]
        keys = keys_of(
            key_prefix,
            job,
            found,
            revision=max(mirror.revision for mirror in mirrors),
            others=sum(map(len, found)),
            events=(events[0], events[1]) if events else (None, None),
        )
        report(keys)

    return Informer(etcd, spans, look, "ftcoord-follower", failed, gathers=True)
