"""The JSON records of a rendezvous and the keys they live under. `docs/protocol.md` is their description.

    <prefix>/members/<lease id>    JoinRequest    one per member, under its lease
    <prefix>/decided               RoundHead      the last decision, under the run's lease
    <prefix>/seats/<r>/<chunk>     Chunk          who sits where in that round, compressed, under the same lease
    <prefix>/rounds/<r>            -              the fence: exists as long as this round's store may be written to
    <prefix>/store/<r>/...         -              the store of the round

`<r>` is `<number>-<token>`, a round's name. The head has one size for any round: each member is sent it, and reads the
one chunk that it is in.

Parsing is strict: what does not fit raises StateError naming the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Annotated, Any, Final, TypeAlias

from ftcoord.core import layout, strict
from ftcoord.core.strict import V4, Count, Range, Raw, Size, build, build_each
from ftcoord.errors import StateError

_RECORDS: Final = 4
"""Decided records that a process keeps parsed: it may have many nodes."""
CHUNK: Final = 8
"""Members a chunk, on average: it costs a node less than a head does."""
MOST_CHUNKS: Final = 100
"""Chunks of a round: all are written with its head, in one transaction of at most 128 operations."""
TOKEN_DIGITS: Final = 16
_HEX: Final = frozenset("0123456789abcdef")
_Port = Annotated[int, Range(0, 2**16 - 1)]
LONGEST_LINE: Final = 400
"""Characters of a reason, an exception or a name."""
LONGEST_TRACEBACK: Final = 800
"""Characters of the head of a traceback."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker failed.

    Args:
        pid: the worker's pid.
        rank: its global rank; -1 if unknown.
        local_rank: its rank on its node; -1 if unknown.
        exit_code: -1 if a signal ended it, or it is unknown.
        signal: the number of the signal that ended it; 0 for none.
        fate: how it ended, in words, such as "exited with code 3".
        exception: its exception from torch's error file, such as "ValueError: no such file"; else empty.
        traceback: the head of that exception's traceback.
        timer: the expiration timer for which it was killed; empty for none.
    """

    pid: int
    rank: int = -1
    local_rank: int = -1
    exit_code: int = -1
    signal: int = 0
    fate: str = ""
    exception: str = ""
    traceback: str = ""
    timer: str = ""

    @property
    def line(self) -> str:
        """The failure in one line, for people."""
        ranks = f" (rank {self.rank}, local rank {self.local_rank})" if self.rank >= 0 else ""
        if self.timer:
            return f"worker {self.pid}{ranks} was killed, since its timer {self.timer!r} had expired"
        return f"worker {self.pid}{ranks} {f'raised {self.exception}' if self.exception else self.fate}"


def clipped(failure: WorkerFailure) -> WorkerFailure:
    """The same failure, with truncated texts."""
    fate, exception, timer = map(cut, (failure.fate, failure.exception, failure.timer))
    traceback = cut(failure.traceback, LONGEST_TRACEBACK)
    return replace(failure, fate=fate, exception=exception, timer=timer, traceback=traceback)


def cut(text: str, longest: int = LONGEST_LINE) -> str:
    """The head of a text that is too long."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def failures_from(key: str, raw: Raw, name: str) -> tuple[WorkerFailure, ...]:
    """The failures in the list field `name`. Raises StateError."""
    return build_each(WorkerFailure, key, raw, name) if raw.get(name) != [] else ()


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A member's ask: a seat in any round later than `after`.

    Args:
        node: the agent's id, the same in all of its incarnations.
        address: where the other nodes reach its host.
        port: a port that it holds open there for this request, in case it gets rank 0.
        after: the last round that it took part in or knows of; 0 for none.
        host: the machine's name, for people.
        nonce: makes each request of the member unique.
        min_nodes, max_nodes: how many nodes its user wants in a round (--nnodes).
        seated: the round in which it has taken its seat; 0 for none.
        reopens: the number of the closed round that it wants to continue from; -1 for none.
        holds: the member that it was when it took its seat in round `seated`, if it lost that member's lease since and
            its workers still run; else empty. Such a member asks for nothing.
        failed: the failure of its worker that failed in round `seated`, or, when it asks again, in round `after`; at
            most one. It holds its seat until it comes back.
    """

    node: str
    address: str
    port: _Port
    after: Count
    host: str
    nonce: str
    min_nodes: int
    max_nodes: int
    seated: Count = 0
    reopens: Annotated[int, Range(-1, strict.LARGEST_COUNT)] = -1
    holds: str = ""
    failed: tuple[WorkerFailure, ...] = ()

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round."""
        return self.min_nodes, self.max_nodes

    @property
    def highest(self) -> int:
        """The highest number that it names."""
        return max(self.after, self.seated, self.reopens)


@dataclass(frozen=True, slots=True)
class Seat:
    """One participant of a round. Its index in `Round.seats` is its rank."""

    member: str
    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Away:
    """A live member that a round was formed without: it last had a seat in `round`, and has not come back since."""

    member: str
    round: Count


Place: TypeAlias = tuple[int | None, int]
"""A member's rank in a round, None without a seat; and the last round in which it is known to have had a seat, 0 for
none."""


@dataclass(frozen=True)
class RoundHead:
    """The decided record: one round, and what happened to it. Its size does not depend on the round's.

    Args:
        number: 1, 2, ...; 0 for a run that never had a round.
        token: 16 hex digits, random: no other round of this number has the same, also where etcd lost that one.
        size: the number of participants; 0 for a record that is no round.
        chunks: in how many keys its seats are.
        address, port: the bootstrap address of the round (MASTER_ADDR and MASTER_PORT), at rank 0's host.
        min_nodes, max_nodes: the run's limits, which all of its members share; 0 while none were stated.
        ready: whether all participants have taken their seats. Nobody starts before that. It stays when the round is
            recalled: members that learn of it late must start too, since others rely on them.
        recalled: why the participants should come back for the next round; empty while they should not.
        waiting: how many members waited for a seat when the round was recalled.
        closed: why the run is over; empty while it is not.
        outcome: how it ended: FINISHED, FAILED or CLOSED; empty while it is not over.
        before: why the round before this one ended; empty for the first.
        by: the member that decided this.
        drained: the nodes that an operator wants to leave, and a few that did. They get no seat any more.
        stop: why all ranks are to leave their loops at one agreed step; empty while they are not. See `ftcoord.stop`.
    """

    number: Count
    token: str
    size: Size
    chunks: Annotated[int, Range(0, MOST_CHUNKS)]
    address: str
    port: _Port
    min_nodes: Size = 0
    max_nodes: Size = 0
    ready: bool = False
    recalled: str = ""
    waiting: Size = 0
    closed: str = ""
    outcome: str = ""
    before: str = ""
    by: str = ""
    drained: tuple[str, ...] = ()
    stop: str = ""

    @property
    def name(self) -> str:
        """What its keys are named after; unlike that of any other round of its number, which etcd may have lost."""
        return f"{self.number}-{self.token}"

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round; zeros while no limits were stated."""
        return self.min_nodes, self.max_nodes

    @property
    def known(self) -> Mapping[int, Seat]:
        """By rank: the seats that are known here. All of them where there is one chunk, once that was read."""
        return {}

    def place_of(self, member: str) -> Place | None:
        """Where a member sits; None if that is not known here."""
        return None if self.chunks else (None, 0)

    def rank_of(self, member: str) -> int | None:
        """The rank of a member; None if it has none, or that is not known here."""
        place = self.place_of(member)
        return None if place is None else place[0]


NO_ROUND: Final = RoundHead(0, "", 0, 0, "", 0)
"""The record of a run that never had a round, for closing it or stating its limits."""


@dataclass(frozen=True)
class Round(RoundHead):
    """A round with all of its seats, as its decider and operators know it.

    Args:
        seats: the participants in rank order.
        away: the live members that had not come back in time; their earlier asks do not count.
    """

    seats: tuple[Seat, ...] = ()
    away: tuple[Away, ...] = ()

    @classmethod
    def of(cls, head: RoundHead, seats: tuple[Seat, ...] = (), away: tuple[Away, ...] = ()) -> Round:
        """The round of this head, whose seats these are."""
        return cls(**_fields_of(head), seats=seats, away=away)

    @property
    def known(self) -> Mapping[int, Seat]:
        return dict(enumerate(self.seats))

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """The ranks, by member id."""
        return {seat.member: rank for rank, seat in enumerate(self.seats)}

    @cached_property
    def nodes(self) -> Mapping[str, int]:
        """The ranks, by node."""
        return {seat.node: rank for rank, seat in enumerate(self.seats)}

    def place_of(self, member: str) -> Place:
        return self.ranks.get(member), self.last_seats.get(member, 0)

    @cached_property
    def last_seats(self) -> Mapping[str, int]:
        """By member: the last round in which it is known to have had a seat."""
        return {away.member: away.round for away in self.away} | {seat.member: self.number for seat in self.seats}


@dataclass(frozen=True)
class KnownRound(RoundHead):
    """A round as one member knows it: with the one chunk that it is in.

    Args:
        chunk: None if its keys were deleted before it was read: another round was decided, and its record will follow.
        at: the number of the chunk.
    """

    chunk: Chunk | None = None
    at: int = 0

    @classmethod
    def of(cls, head: RoundHead, chunk: Chunk | None, at: int) -> KnownRound:
        """The round of this head, of which this chunk is known."""
        return cls(**_fields_of(head), chunk=chunk, at=at)

    @property
    def known(self) -> Mapping[int, Seat]:
        return dict(zip(self.chunk.ranks, self.chunk.seats, strict=True)) if self.chunk else {}

    def place_of(self, member: str) -> Place | None:
        if self.chunk is None or chunk_of(member, self.chunks) != self.at:
            return super().place_of(member)
        return self.chunk.place_of(member, self.number)


def _fields_of(head: RoundHead) -> dict[str, Any]:
    return {field.name: getattr(head, field.name) for field in fields(RoundHead)}


@dataclass(frozen=True)
class Chunk:
    """A part of who sits where: the `seats` with these `ranks`, and live members that the round was formed without."""

    ranks: tuple[int, ...] = ()
    seats: tuple[Seat, ...] = ()
    away: tuple[Away, ...] = ()

    def place_of(self, member: str, number: int) -> Place:
        """Where a member of this chunk sits in the round of this number."""
        rank = next((rank for rank, seat in zip(self.ranks, self.seats, strict=True) if seat.member == member), None)
        if rank is not None:
            return rank, number
        return None, next((one.round for one in self.away if one.member == member), 0)


def chunks_for(members: int) -> int:
    """In how many keys the places of so many members are written."""
    return min(-(-members // CHUNK), MOST_CHUNKS)


def chunk_of(member: str, chunks: int) -> int:
    """The chunk that a member is in, whether it has a rank or not: four bytes of BLAKE2b of its id, modulo their
    number."""
    return int.from_bytes(blake2b(member.encode(), digest_size=4).digest(), "big") % chunks if chunks else 0


def chunks_of(round_: Round) -> list[Chunk]:
    """Who sits where, in as many chunks as the head has."""
    seats: list[list[tuple[int, Seat]]] = [[] for _ in range(round_.chunks)]
    away: list[list[Away]] = [[] for _ in range(round_.chunks)]
    for rank, seat in enumerate(round_.seats):
        seats[chunk_of(seat.member, round_.chunks)].append((rank, seat))
    for one in round_.away:
        away[chunk_of(one.member, round_.chunks)].append(one)
    return [
        Chunk(tuple(rank for rank, _ in seated), tuple(seat for _, seat in seated), tuple(left))
        for seated, left in zip(seats, away, strict=True)
    ]


def seated(prefix: str, head: RoundHead, kvs: Mapping[str, bytes]) -> Round:
    """The round of this head. Raises StateError if its seats are not all among these keys and values."""
    seats: dict[int, Seat] = {}
    away: list[Away] = []
    for at in range(head.chunks):
        key = layout.chunk_key(prefix, head.name, at)
        if key not in kvs:
            decided = layout.decided_key(prefix)
            raise StateError(key, f"is gone, though {decided} names it: delete that, so that all decide anew")
        chunk = parse_chunk(key, kvs[key])
        seats.update(zip(chunk.ranks, chunk.seats, strict=True))
        away += chunk.away
    if seats.keys() != set(range(head.size)):
        raise StateError(layout.seats_span(prefix, head.name).start, f"has not the seats of {head.size} nodes")
    ordered = tuple(seats[rank] for rank in range(head.size))
    return Round.of(head, ordered, tuple(sorted(away, key=lambda one: one.member)))


FINISHED: Final = "finished"
"""The outcome of a run whose workers are done."""
FAILED: Final = "failed"
"""The outcome of a run in which a node has used up its restarts."""
STOPPED: Final = "stopped"
"""The outcome of a run whose ranks left their loops at an agreed step, as they were asked to."""
DONE: Final = FINISHED, STOPPED
"""The outcomes of runs whose last workers end by themselves."""
CLOSED: Final = "closed"
"""The outcome of a run that somebody closed by hand."""


def encode(record: JoinRequest | RoundHead) -> bytes:
    """The record as JSON, with its layout's version; of a Round only its head."""
    return strict.dump(RoundHead(**_fields_of(record)) if isinstance(record, RoundHead) else record, V4)


def encode_chunk(chunk: Chunk) -> bytes:
    """The chunk as compressed JSON."""
    return strict.dump_packed(chunk)


def encode_seats(prefix: str, round_: Round) -> list[tuple[str, bytes]]:
    """The keys with the seats of a round, and their values."""
    chunks = enumerate(chunks_of(round_))
    return [(layout.chunk_key(prefix, round_.name, at), encode_chunk(chunk)) for at, chunk in chunks]


def parse_join_request(key: str, value: bytes) -> JoinRequest:
    """Parse a request. Raises StateError."""
    raw = strict.load(key, value, V4)
    ask = build(JoinRequest, key, {**raw, "failed": failures_from(key, raw, "failed")})
    if not 1 <= ask.min_nodes <= ask.max_nodes:
        raise StateError(key, f"asks for rounds of {ask.min_nodes} to {ask.max_nodes} nodes, which cannot be")
    return ask


@lru_cache(_RECORDS)
def parse_decided(key: str, value: bytes) -> RoundHead:
    """The decided record. Raises StateError."""
    head = build(RoundHead, key, strict.load(key, value, V4))
    if head.token != "" if head.number == 0 else not _is_token(head.token):
        raise StateError(key, "has no token that a round may have, so it is not ftcoord's")
    if bool(head.size) != bool(head.chunks):
        raise StateError(key, f"has {head.size} seats in {head.chunks} chunks, so it is not ftcoord's")
    return head


def _is_token(token: str) -> bool:
    """Whether it may be part of a key."""
    return len(token) == TOKEN_DIGITS and not set(token) - _HEX


def parse_chunk(key: str, value: bytes) -> Chunk:
    """Parse a chunk. Raises StateError."""
    raw = strict.load_packed(key, value)
    lists = {"seats": build_each(Seat, key, raw, "seats"), "away": build_each(Away, key, raw, "away")}
    chunk = build(Chunk, key, {**raw, **lists})
    if len(chunk.ranks) != len(chunk.seats):
        raise StateError(key, "has seats that are not whole")
    return chunk
