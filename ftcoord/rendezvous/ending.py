"""What ends a run, in one transaction: for its nodes, and for whoever ends it by hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftcoord import concurrency
from ftcoord.core import rendezvous, rendezvous_records
from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.layout import decided_key, round_key
from ftcoord.core.rendezvous_records import NO_ROUND, AnyRound, parse_decided
from ftcoord.etcd.api import Delete, EtcdCalls, Get, Op, Put, Span
from ftcoord.primitives.group.event_log import EventLog
from ftcoord.primitives.write_once import WriteOutcome, write_once


@dataclass(frozen=True, slots=True)
class RunEnding:
    """The record that ends a run, what goes with it, and what its history has to say."""

    value: bytes
    also: Sequence[Op]
    events: Sequence[HistoryEvent]


def ending(
    prefix: str,
    now: AnyRound,
    reason: str,
    outcome: str,
    *,
    speaks: bool,
    by: str = "",
    ends: Sequence[HistoryEvent] = (),
) -> RunEnding | None:
    """What ends a run; None to leave the run as it is.

    If the run did not finish, its round ends too: torch's agents wait in the round's store, in their exit barrier, for
    nodes that will not come.

    Args:
        prefix: the run's.
        speaks: see `core.rendezvous.close`.
        by: who ends it, for people.
        ends: how parts in its last round ended, of which the history may not know yet.
    """
    ended = rendezvous.close(now, reason, outcome, speaks=speaks)
    if ended is None:
        return None
    fence = Delete(Span(round_key(prefix, now.number)))
    value = rendezvous_records.encode(replace(ended, by=uuid.uuid4().hex))
    wall_ms = int(concurrency.wall() * 1000)
    told = [replace(end, by=by, wall_ms=wall_ms) for end in ends]
    event = HistoryEvent("closed", now.number, reason=f"{outcome}: {reason}", by=by, wall_ms=wall_ms)
    return RunEnding(value, () if outcome == rendezvous_records.FINISHED else (fence,), [*told, event])


def end_run(
    etcd: EtcdCalls,
    prefix: str,
    run_ttl: int,
    history_ttl: int,
    end: Callable[[AnyRound], RunEnding | None],
    timeout: float,
) -> None:
    """Replace a run's record by what `end` makes of it, under its lease, or else a new one of `run_ttl` seconds.

    `end` gets the record as it is, and is called again when somebody else changed it meanwhile. If it returns None the
    record stays as it is. Raises StateError, and OutcomeUnknown and EtcdUnavailable when etcd cannot be reached; each
    of the requests of a try may take `timeout` seconds.
    """
    key, done = decided_key(prefix), False
    history = EventLog(etcd, prefix, history_ttl, uuid.uuid4().hex, keeps=False) if history_ttl else None
    while not done:
        kv = etcd.range(Get(Span(key)), timeout=timeout).one
        ended = end(parse_decided(kv.key, kv.value) if kv else NO_ROUND)
        if ended is None:
            return
        expected = kv.mod_revision if kv else 0
        put = Put(key, ended.value, kv.lease if kv and kv.lease else etcd.grant(run_ttl).id)
        also = ended.also

        def write(
            more: Sequence[Op], put: Put = put, expected: int = expected, also: Sequence[Op] = also
        ) -> WriteOutcome:
            return write_once(etcd, put, expected, also=[*also, *more], timeout=timeout)

        if history is None:
            done = write(()).done
        else:
            done = history.send(history.writes(ended.events, expected), ended.events, write).done
