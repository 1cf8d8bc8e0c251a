"""Changes of a run's record by others than its decider, in one transaction: nodes and operators that end the run, and
operators that drain nodes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftcoord import concurrency
from ftcoord.core import rendezvous, rendezvous_records
from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.layout import decided_key, round_key
from ftcoord.core.rendezvous_records import NO_ROUND, AnyRound, JoinRequest, parse_decided
from ftcoord.core.round_history import named
from ftcoord.etcd.api import Delete, EtcdCalls, Get, KeyValue, Op, Put, Span
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.event_log import EventLog
from ftcoord.primitives.write_once import WriteOutcome, write_once


@dataclass(frozen=True, slots=True)
class RecordChange:
    """The record that replaces the present one, the operations that go with it, and the events for the history."""

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
) -> RecordChange | None:
    """The change that ends a run; None to leave the run as it is.

    If the run did not finish, its round ends too: torch's agents wait in the round's store, in their exit barrier, for
    nodes that will not come.

    Args:
        prefix: the run's prefix.
        speaks: see `core.rendezvous.close`.
        by: who ends it, for people.
        ends: how parts in its last round ended; the history may not have them yet.
    """
    ended = rendezvous.close(now, reason, outcome, speaks=speaks)
    if ended is None:
        return None
    fence = Delete(Span(round_key(prefix, now.number)))
    value = rendezvous_records.encode(replace(ended, by=uuid.uuid4().hex))
    wall_ms = int(concurrency.wall() * 1000)
    told = [replace(end, by=by, wall_ms=wall_ms) for end in ends]
    event = HistoryEvent("closed", now.number, reason=f"{outcome}: {reason}", by=by, wall_ms=wall_ms)
    return RecordChange(value, () if outcome == rendezvous_records.FINISHED else (fence,), [*told, event])


def draining(now: AnyRound, leavers: Sequence[JoinRequest], reason: str, *, by: str) -> RecordChange | None:
    """The change that drains nodes of a run; None to leave the record as it is: see `core.rendezvous.drain`.

    Args:
        leavers: the requests of these nodes' members.
        reason: what is written about each, after the name of its host.
        by: who drains them, for people.
    """
    hosts = {ask.node: ask.host for ask in leavers}
    text = f"{named(sorted({*hosts.values()}))} {reason}"
    drained = rendezvous.drain(now, leavers, text)
    if drained is None:
        return None
    wall_ms = int(concurrency.wall() * 1000)
    told = [
        HistoryEvent("ordered", now.number, host, node, f"{host} {reason}", by=by, wall_ms=wall_ms)
        for node, host in hosts.items()
    ]
    if drained.recalled != now.recalled:
        told.append(HistoryEvent("recalled", now.number, reason=text, by=by, wall_ms=wall_ms))
    return RecordChange(rendezvous_records.encode(replace(drained, by=uuid.uuid4().hex)), (), told)


def change_record(
    etcd: EtcdCalls,
    prefix: str,
    run_ttl: int,
    history_ttl: int,
    change: Callable[[AnyRound], RecordChange | None],
    within: TimeLimit,
) -> None:
    """Replace a run's record by what `change` returns for it, under its lease, or else a new one of `run_ttl` seconds.

    `change` gets the present record, and is called again if somebody else changes it meanwhile. If it returns None, the
    record stays as it is. Raises StateError, and OutcomeUnknown and EtcdUnavailable when etcd does not answer in
    time.
    """
    key, done, now = decided_key(prefix), False, concurrency.now()
    half = now + (within.deadline - now) / 2  # the other half is for the record
    history = EventLog(etcd, prefix, history_ttl, uuid.uuid4().hex, keeps=False, until=half) if history_ttl else None
    while not done:
        kv = etcd.range(Get(Span(key)), timeout=within.left()).one
        changed = change(parse_decided(kv.key, kv.value) if kv else NO_ROUND)
        if changed is None:
            return
        lease = kv.lease if kv and kv.lease else etcd.grant(run_ttl, timeout=within.left()).id
        put, also = Put(key, changed.value, lease), changed.also

        def write(
            more: Sequence[Op], put: Put = put, kv: KeyValue | None = kv, also: Sequence[Op] = also
        ) -> WriteOutcome:
            return write_once(etcd, put, kv, also=[*also, *more], timeout=within.left())

        if history is None:
            done = write(()).done
        else:
            events = history.writes(changed.events, kv.mod_revision if kv else 0)
            done = history.send(events, changed.events, write).done
