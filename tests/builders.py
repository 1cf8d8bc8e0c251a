"""Records of rounds and quorums for tests: what a test names, and plain values for all else.

A new field of a record is given here, and in the tests that are about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftcoord.core.layout import decided_key
from ftcoord.core.quorum_records import IdleMember, QuorumRecord, QuorumRequest, QuorumSeat, ReplicaRecord
from ftcoord.core.rendezvous_records import Away, JoinRequest, Round, Seat, chunks_for, encode, encode_seats


def ask(
    node: str,
    *,
    address: str = "10.0.0.1",
    port: int = 1,
    after: int = 0,
    host: str = "",
    nonce: str = "n",
    limits: tuple[int, int] = (1, 2),
    **more: Any,
) -> JoinRequest:
    """What a node asks: a seat in any round later than `after`."""
    return JoinRequest(node, address, port, after, host or f"host{node}", nonce, *limits, **more)


def round_(
    number: int,
    seats: Sequence[Seat] = (),
    *,
    address: str = "10.0.0.1",
    port: int = 29500,
    away: Sequence[Away] = (),
    limits: tuple[int, int] = (0, 0),
    token: str = "",
    **more: Any,
) -> Round:
    """A round that was decided; its token follows from its number, if none is given."""
    return Round(
        number,
        token or (f"{number:016x}" if number else ""),
        len(seats),
        chunks_for(len(seats) + len(away)),
        address,
        port,
        *limits,
        seats=tuple(seats),
        away=tuple(away),
        **more,
    )


def round_keys(prefix: str, record: Round) -> dict[str, bytes]:
    """The keys of a run whose last round this is, but for its fence and its store, and their values."""
    return {decided_key(prefix): encode(record), **dict(encode_seats(prefix, record))}


def request(
    name: str,
    *,
    address: str = "",
    store_address: str = "",
    step: int = 0,
    world_size: int = 1,
    shrink_only: bool = False,
    data: str = "",
    commit_failures: int = 0,
    handles: Sequence[str] = (),
) -> QuorumRequest:
    """What a replica asks a quorum for."""
    return QuorumRequest(
        name, address, store_address, step, world_size, shrink_only, data, commit_failures, tuple(handles)
    )


def replica(asks: QuorumRequest, *, asked: int = 0, after: int = 0, beat: int = 0, **more: Any) -> ReplicaRecord:
    """A replica's key."""
    return ReplicaRecord(asks, asked, after, beat, **more)


def quorum(
    number: int,
    seats: Sequence[QuorumSeat] = (),
    *,
    id: int = 0,
    idle: Sequence[IdleMember] = (),
    created: float = 0.0,
    by: str = "",
) -> QuorumRecord:
    """A quorum that was decided; its id is its number, if none is given."""
    return QuorumRecord(number, id or number, tuple(seats), tuple(idle), created, by)
