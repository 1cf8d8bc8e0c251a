"""Records in a job's history what somebody does by hand."""

from __future__ import annotations

import uuid

from ftcoord import concurrency
from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.event_records import encode as encode_event
from ftcoord.core.layout import event_key, events_span
from ftcoord.etcd.api import EtcdCalls, Get, Op, Put


def ordered(etcd: EtcdCalls, prefix: str, what: str, target: str, by: str) -> list[Op]:
    """The operations that record, in a transaction, what somebody did by hand, under the history's lease; none if there
    is no history, or etcd takes none.

    Args:
        prefix: the prefix of the group whose history it is.
        what: in one line, with the target's name and the reason.
        target: the node or replica that it is about; empty for all.
        by: who did it.
    """
    newest = etcd.range(Get(events_span(prefix), limit=1, keys_only=True, order="newest")).one
    if newest is None or not newest.lease:
        return []
    event = HistoryEvent("ordered", 0, target, "", what, by=by, wall_ms=int(concurrency.wall() * 1000))
    return [Put(event_key(prefix, newest.mod_revision, uuid.uuid4().hex, 0), encode_event(event), newest.lease)]
