"""A run's record as others than its decider read and change it: who sits in the last round; and, in one transaction
each, nodes and operators that end the run, and operators that drain nodes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftcoord import concurrency
from ftcoord.core import rendezvous, rendezvous_records
from ftcoord.core.history import HistoryEvent, round_events, signed
from ftcoord.core.layout import decided_key, fence_key, seats_span
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Round, RoundHead, parse_decided
from ftcoord.errors import StateError
from ftcoord.escaping import named
from ftcoord.etcd.api import Delete, Etcd, Get, KeyValue, Op, Put, RangeResult, Span
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.decided_record import event_puts, written_with
from ftcoord.primitives.write_once import WriteOutcome, write_once


class SeatsReplaced(Exception):
    """The seats of a round were deleted, because there is another one by now."""


def read_seats(read: Callable[[Get], RangeResult], prefix: str, head: RoundHead) -> Round:
    """The round of this head, as etcd has it. Raises SeatsReplaced, StateError and EtcdError."""
    span, decided = seats_span(prefix, head.name), decided_key(prefix)
    kvs = {kv.key: kv.value for kv in read(Get(span)).kvs}
    try:
        return rendezvous_records.seated(prefix, head, kvs)
    except StateError:
        now = read(Get(Span(decided))).one
        if now is None or parse_decided(now.key, now.value).name != head.name:
            raise SeatsReplaced from None
        raise


@dataclass(frozen=True, slots=True)
class RecordChange:
    """The record that replaces the present one, the operations that go with it, and the events for the history."""

    record: RoundHead
    events: Sequence[HistoryEvent]
    also: Sequence[Op] = ()


def ending(
    prefix: str, now: RoundHead, reason: str, outcome: str, *, speaks: bool, ends: Sequence[HistoryEvent] = ()
) -> RecordChange | None:
    """The change that ends a run; None to leave the run as it is.

    If the run did not finish, its round ends too: torch's agents wait in the round's store, in their exit barrier, for
    nodes that will not come.

    Args:
        prefix: the run's prefix.
        speaks: see `core.rendezvous.close`.
        ends: how parts in its last round ended; the history may not have them yet.
    """
    ended = rendezvous.close(now, reason, outcome, speaks=speaks)
    if ended is None:
        return None
    fence = Delete(Span(fence_key(prefix, now.name)))
    also = () if outcome == rendezvous_records.FINISHED else (fence,)
    return RecordChange(ended, round_events(now, ended, ends), also)


def draining(now: RoundHead, leavers: Sequence[JoinRequest], reason: str) -> RecordChange | None:
    """The change that drains nodes of a run; None to leave the record as it is: see `core.rendezvous.drain`.

    Args:
        leavers: the requests of these nodes' members.
        reason: what is written about each, after the name of its host.
    """
    hosts = {ask.node: ask.host for ask in leavers}
    drained = rendezvous.drain(now, leavers, f"{named(sorted({*hosts.values()}))} {reason}")
    if drained is None:
        return None
    told = [HistoryEvent("ordered", now.number, host, node, f"{host} {reason}") for node, host in hosts.items()]
    return RecordChange(drained, [*told, *round_events(now, drained, ())])


def change_record(
    etcd: Etcd,
    prefix: str,
    run_ttl: int,
    change: Callable[[RoundHead], RecordChange | None],
    *,
    by: str,
    within: TimeLimit,
) -> None:
    """Replace a run's record by what `change` returns for it, under its lease, or else a new one of `run_ttl` seconds.

    `change` gets the present record, and is called again if somebody else changes it meanwhile. If it returns None, the
    record stays as it is. Its events name `by` as their writer. Raises StateError, and OutcomeUnknown and
    EtcdUnavailable when etcd does not answer in time.
    """
    key, done = decided_key(prefix), False
    while not done:
        kv = etcd.range(Get(Span(key)), timeout=within.left()).one
        changed = change(parse_decided(kv.key, kv.value) if kv else NO_ROUND)
        if changed is None:
            return
        writer = uuid.uuid4().hex
        lease = kv.lease if kv and kv.lease else etcd.grant(run_ttl, timeout=within.left()).id
        put = Put(key, rendezvous_records.encode(replace(changed.record, by=writer)), lease)
        events = signed(changed.events, by, int(concurrency.wall() * 1000))
        more = event_puts(prefix, events, lease, revision=kv.mod_revision if kv else 0, writer=writer)

        def write(
            more: Sequence[Op], put: Put = put, kv: KeyValue | None = kv, also: Sequence[Op] = changed.also
        ) -> WriteOutcome:
            return write_once(etcd, put, kv, also=[*also, *more], timeout=within.left())

        done = written_with(more, write, prefix).done
