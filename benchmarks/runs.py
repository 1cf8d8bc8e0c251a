"""Runs of any size in an etcd, written in ftcoord's own encoding: what operators look at, without agents."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from ftcoord.core import history, rendezvous_records
from ftcoord.core.history import HistoryEvent, failure_event, round_events, signed
from ftcoord.core.layout import (
    KEY_PREFIX,
    decided_key,
    decider_key,
    event_key,
    fence_key,
    member_id,
    member_key,
    run_prefix,
)
from ftcoord.core.office import OfficeRecord, encode_office
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat, WorkerFailure, chunks_for
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient

LEASE_TTL: Final = 3600
"""Seconds: nobody renews these leases while it is measured."""
EVENTS_A_ROUND: Final = 4
"""Events of a round that ends: it was decided, it started, a worker failed, it was recalled."""
_GRANTED_TOGETHER: Final = 4
_PUT_TOGETHER: Final = 100
_TRACEBACK: Final = (
    "Traceback (most recent call last):\n" + '  File "train.py", line 41, in main\n    step(batch)\n' * 12
)


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """A run that lies in etcd.

    Args:
        asks: what its members say, by their keys and leases.
    """

    asks: Sequence[tuple[str, int, JoinRequest]]

    def told_again(self, client: EtcdClient, at: int, text: str) -> None:
        """Have one member report that a worker failed in this way."""
        key, lease, ask = self.asks[at]
        client.put(key, rendezvous_records.encode(replace(ask, failed=(WorkerFailure(4711, fate=text),))), lease)


def write_run(client: EtcdClient, job: str, nodes: int, rounds: int) -> WrittenRun:
    """A run whose nodes, each under a lease of its own, are in round number `rounds`; a worker's failure has ended each
    round before it."""
    prefix = run_prefix(KEY_PREFIX, job)
    with ThreadPoolExecutor(_GRANTED_TOGETHER) as pool:
        leases = [lease.id for lease in pool.map(lambda _: client.grant(LEASE_TTL), range(nodes))]
    seats = tuple(Seat(member_id(lease), f"{at:032x}", f"host{at}") for at, lease in enumerate(leases))
    record = Round(
        number=rounds,
        token=secrets.token_hex(8),
        size=nodes,
        chunks=chunks_for(nodes),
        address="10.0.0.1",
        port=29500,
        min_nodes=1,
        max_nodes=nodes,
        ready=True,
        by=seats[0].member,
        seats=seats,
    )
    asks = [(member_key(prefix, member_id(lease)), lease, _ask(at, record)) for at, lease in enumerate(leases)]
    puts = [Put(key, rendezvous_records.encode(ask), lease) for key, lease, ask in asks]
    office = OfficeRecord(seats[0].member, "", "0" * 32)
    puts.append(Put(decider_key(prefix), encode_office(office), leases[0]))
    puts += _record_puts(prefix, record, leases[0])
    puts += _history_puts(prefix, record, leases[0])
    for at in range(0, len(puts), _PUT_TOGETHER):
        client.txn((), puts[at : at + _PUT_TOGETHER])
    return WrittenRun(asks)


def _ask(at: int, record: Round) -> JoinRequest:
    seat, limits = record.seats[at], record.limits
    return JoinRequest(
        seat.node, "10.0.0.1", 29500, record.number - 1, seat.host, f"n{at}", *limits, seated=record.number
    )


def _record_puts(prefix: str, record: Round, lease: int) -> Iterator[Put]:
    yield Put(fence_key(prefix, record.name), b"", lease)
    yield Put(decided_key(prefix), rendezvous_records.encode(record), lease)
    for key, value in rendezvous_records.encode_seats(prefix, record):
        yield Put(key, value, lease)


def _history_puts(prefix: str, last: Round, lease: int) -> Iterator[Put]:
    """Each under a revision of its own, as if so many decisions had been made."""
    for written, event in zip(count(), _history(last), strict=False):
        yield Put(event_key(prefix, written + 1, last.by, written), history.encode(event), lease)


def _history(last: Round) -> Iterator[HistoryEvent]:
    before: Round | None = None
    for number in range(1, last.number + 1):
        deciding = replace(last, number=number, ready=False)
        started = replace(deciding, ready=True)
        events = [*round_events(before, deciding, ()), *round_events(deciding, started, ())]
        if number < last.number:
            seat = last.seats[number % last.size]
            failure = WorkerFailure(4711, 1, 1, 1, 0, "exited with code 1", "ValueError: loss is nan", _TRACEBACK)
            before = replace(started, recalled=f"{seat.host}: {failure.line}")
            events += round_events(started, before, [failure_event(number, seat.host, seat.node, failure)])
        yield from signed(events, last.by, int(1000 * time.time()))
