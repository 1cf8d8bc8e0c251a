"""The JSON records of a rendezvous and the keys they live under. `docs/protocol.md` is their description.

    <prefix>/members/<lease id>       JoinRequest          one per member, under its lease
    <prefix>/decided                  Round, RoundHead     the last decision, under the run's lease
    <prefix>/rolls/<roll id>/<chunk>  RollChunk            who sits where in a RoundHead's round, under the same lease
    <prefix>/rounds/<number>          -                    exists as long as this round may be written to
    <prefix>/store/<number>/...       -                    the store of the round

A small round is one record, the Round. A large one is a head of constant size and a roll in chunks: each member is sent
the head, and reads its own chunk. All of them are layout v4.

Parsing is strict: what does not fit raises StateError naming the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple, TypeAlias

from ftcoord.core.strict import LARGEST_COUNT, V4, Count, Range, Raw, Size, build, build_each, dump, load
from ftcoord.errors import StateError

_DIGEST_BYTES: Final = 8
_RECORDS: Final = 4
"""Decided records that a process keeps parsed: it may have many nodes."""
_MOST_CHUNKS: Final = 2**20
"""The most chunks of a roll, which anybody may have written: nobody has so many nodes."""
_LONGEST_ROLL_ID: Final = 128
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
        failed_at: etcd's revision at which it first wrote that, if it writes it again; else 0.
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
    reopens: Annotated[int, Range(-1, LARGEST_COUNT)] = -1
    holds: str = ""
    failed: tuple[WorkerFailure, ...] = ()
    failed_at: Size = 0

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


@dataclass(frozen=True)
class Round:
    """The decided record: one membership, and what happened to it.

    Args:
        number: 1, 2, ...; never used twice in a run.
        seats: the participants in rank order.
        address, port: the bootstrap address of the round (MASTER_ADDR and MASTER_PORT), at rank 0's host.
        away: the live members that had not come back in time; their earlier asks do not count.
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
    """

    number: Count
    seats: tuple[Seat, ...]
    address: str
    port: _Port
    away: tuple[Away, ...] = ()
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

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round; zeros while no limits were stated."""
        return self.min_nodes, self.max_nodes

    @property
    def size(self) -> int:
        """The number of participants; 0 for a record that is no round."""
        return len(self.seats)

    @cached_property
    def roll(self) -> str:
        """The name that tells this roll from others with the same number, as `RoundHead.roll` does."""
        return _digest(self, 0)

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """The ranks, by member id."""
        return {seat.member: rank for rank, seat in enumerate(self.seats)}

    @cached_property
    def nodes(self) -> Mapping[str, int]:
        """The ranks, by node."""
        return {seat.node: rank for rank, seat in enumerate(self.seats)}

    def rank_of(self, member: str) -> int | None:
        """The rank of a member, by its member id."""
        return self.ranks.get(member)

    def place_of(self, member: str) -> Place | None:
        """Where a member sits."""
        return Place(self.ranks.get(member), self.last_seats.get(member, 0))

    @cached_property
    def last_seats(self) -> Mapping[str, int]:
        """By member: the last round in which it is known to have had a seat."""
        return {away.member: away.round for away in self.away} | {seat.member: self.number for seat in self.seats}


NO_ROUND: Final = Round(0, (), "", 0)
"""The record of a run that never had a round, for closing it or stating its limits."""


@dataclass(frozen=True)
class RoundHead:
    """The part of a large round's record that everybody is sent. Its size does not depend on the round's.

    Args:
        size: the number of participants.
        roll: the name of the roll. No other decider and no other decision ever has the same, unless its roll is the
            same.
        chunks: in how many keys the roll is stored.

    The other fields are those of a Round.
    """

    number: Count
    size: Annotated[int, Range(1, LARGEST_COUNT)]
    roll: str
    chunks: Annotated[int, Range(1, _MOST_CHUNKS)]
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

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round; zeros while no limits were stated."""
        return self.min_nodes, self.max_nodes

    def chunk_of(self, member: str) -> int:
        """The chunk that would contain a member's place."""
        return chunk_of(member, self.chunks)

    def place_of(self, member: str) -> Place | None:
        """Where a member sits; None if that is not known here."""
        return None

    def rank_of(self, member: str) -> int | None:
        """The rank of a member; None if it has none, or that is not known here."""
        place = self.place_of(member)
        return None if place is None else place.rank


@dataclass(frozen=True)
class HeardRound(RoundHead):
    """A head as one member knows it: with the chunk of the roll about that member, once it has read that.

    Args:
        chunk: None while none was read.
        at: the number of the chunk.
        gone: the roll was deleted before it was read, because another round was decided: its record will follow.
    """

    chunk: RollChunk | None = None
    at: int = 0
    gone: bool = False

    @classmethod
    def of(cls, head: RoundHead, chunk: RollChunk | None = None, at: int = 0, *, gone: bool = False) -> HeardRound:
        """What is known of this head now, regardless of what was known before."""
        said = {field.name: getattr(head, field.name) for field in fields(RoundHead)}
        return cls(**said, chunk=chunk, at=at, gone=gone)

    def place_of(self, member: str) -> Place | None:
        if self.chunk is None or self.chunk_of(member) != self.at:
            return None
        return self.chunk.place_of(member, self.number)


AnyRound: TypeAlias = Round | RoundHead
"""The decided record, in either form."""


class Place(NamedTuple):
    """A member's place, by a roll.

    Args:
        rank: its rank in this round; None without a seat.
        last: the last round in which it is known to have had a seat; 0 for none.
    """

    rank: int | None
    last: int


class WholeRoll(NamedTuple):
    """Who sits where in a round: what a head does not say of it."""

    seats: tuple[Seat, ...]
    away: tuple[Away, ...]


@dataclass(frozen=True)
class RollChunk:
    """One part of a roll, column by column: the seats (`members`, `nodes`, `hosts`, `ranks`), and the live members that
    the round was formed without (`away`, and the `rounds` in which they last had a seat)."""

    members: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    away: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()

    def place_of(self, member: str, number: int) -> Place:
        """Where a member of this chunk sits in the round of this number."""
        if member in self.members:
            return Place(self.ranks[self.members.index(member)], number)
        return Place(None, self.rounds[self.away.index(member)] if member in self.away else 0)


@dataclass(frozen=True, slots=True)
class RollSizes:
    """When a roll is stored beside its head, and in how many chunks.

    Args:
        inline: with at most so many members, it is in the record itself.
        chunk: members per chunk, on average.
    """

    inline: int
    chunk: int

    def is_inline(self, round_: Round) -> bool:
        """Whether this round is one record."""
        return len(round_.seats) + len(round_.away) <= self.inline

    def chunks_for(self, round_: Round) -> int:
        """In how many chunks its roll is stored."""
        return -(-(len(round_.seats) + len(round_.away)) // self.chunk)


ROLLS: Final = RollSizes(inline=32, chunk=8)
"""A round of 32 nodes takes as long in either form. Beyond that a head and a chunk cost each node less: a chunk of 8
has 0.8 kB, as much as two heads."""


def chunk_of(member: str, chunks: int) -> int:
    """The chunk that a member is in: four bytes of BLAKE2b of its id, modulo their number."""
    return int.from_bytes(blake2b(member.encode(), digest_size=4).digest(), "big") % chunks


def roll_id(round_: Round, chunks: int, decider: str) -> str:
    """The name of the roll of a new round. It contains the decider and a digest of the contents: so nobody ever writes
    or deletes what another decider has written, or another decision of the same one."""
    return f"{round_.number}-{decider}-{_digest(round_, chunks)}"


def head_of(round_: Round, roll: str, chunks: int, by: str) -> RoundHead:
    """The head of a round whose roll has this name."""
    same = {field.name: getattr(round_, field.name) for field in fields(RoundHead) if field.name not in _ROLL_FIELDS}
    return RoundHead(**{**same, "size": len(round_.seats), "roll": roll, "chunks": chunks, "by": by})


def chunks_of(round_: Round, chunks: int) -> list[RollChunk]:
    """Its roll, in so many chunks."""
    seats: list[list[tuple[int, Seat]]] = [[] for _ in range(chunks)]
    away: list[list[Away]] = [[] for _ in range(chunks)]
    for rank, seat in enumerate(round_.seats):
        seats[chunk_of(seat.member, chunks)].append((rank, seat))
    for one in round_.away:
        away[chunk_of(one.member, chunks)].append(one)
    return [
        RollChunk(
            tuple(seat.member for _, seat in seated),
            tuple(seat.node for _, seat in seated),
            tuple(seat.host for _, seat in seated),
            tuple(rank for rank, _ in seated),
            tuple(one.member for one in left),
            tuple(one.round for one in left),
        )
        for seated, left in zip(seats, away, strict=True)
    ]


def round_of(key: str, head: RoundHead, chunks: Iterable[RollChunk]) -> Round:
    """The round of a head and its whole roll. Raises StateError, for the roll's key, if they do not fit together."""
    return with_roll(head, *roll_of(key, head, chunks))


def roll_of(key: str, head: RoundHead, chunks: Iterable[RollChunk]) -> WholeRoll:
    """The whole roll of a head's round. Raises StateError, for the roll's key, if they do not fit together."""
    seats: dict[int, Seat] = {}
    away: list[Away] = []
    for chunk in chunks:
        rows = zip(chunk.ranks, chunk.members, chunk.nodes, chunk.hosts, strict=True)
        seats.update((rank, Seat(*who)) for rank, *who in rows)
        away += map(Away, chunk.away, chunk.rounds)
    if seats.keys() != set(range(head.size)):
        raise StateError(key, f"is no roll of {head.size} nodes")
    return WholeRoll(tuple(seats[rank] for rank in range(head.size)), in_order(away))


def in_order(away: Iterable[Away]) -> tuple[Away, ...]:
    """In the order of a roll that was read: members that are away have no order of their own."""
    return tuple(sorted(away, key=lambda one: one.member))


def with_roll(head: RoundHead, seats: tuple[Seat, ...], away: tuple[Away, ...]) -> Round:
    """The round of a head and its roll's contents."""
    same = {field.name: getattr(head, field.name) for field in fields(RoundHead) if field.name not in _ROLL_FIELDS}
    return Round(**same, seats=seats, away=away)


_ROLL_FIELDS: Final = frozenset({"size", "roll", "chunks"})
"""The fields of a head that replace the seats."""


def _digest(round_: Round, chunks: int) -> str:
    text = repr((round_.number, chunks, round_.seats, round_.away))
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


FINISHED: Final = "finished"
"""The outcome of a run whose workers are done."""
FAILED: Final = "failed"
"""The outcome of a run in which a node has used up its restarts."""
CLOSED: Final = "closed"
"""The outcome of a run that somebody closed by hand."""


def encode(record: JoinRequest | Round | RoundHead | RollChunk) -> bytes:
    """The record as JSON, with its layout's version."""
    return dump(record, V4)


def parse_join_request(key: str, value: bytes) -> JoinRequest:
    """Parse a request. Raises StateError."""
    raw = load(key, value, V4)
    ask = build(JoinRequest, key, {**raw, "failed": failures_from(key, raw, "failed")})
    if not 1 <= ask.min_nodes <= ask.max_nodes:
        raise StateError(key, f"asks for rounds of {ask.min_nodes} to {ask.max_nodes} nodes, which cannot be")
    return ask


@lru_cache(_RECORDS)
def parse_decided(key: str, value: bytes) -> Round | RoundHead:
    """The decided record, in either form. Raises StateError."""
    raw = load(key, value, V4)
    if "seats" in raw:
        return _round(key, raw)
    head = build(RoundHead, key, raw)
    if not _is_roll_id(head.roll):
        raise StateError(key, "names no roll that a round may have, so it is not ftcoord's")
    return head


def _is_roll_id(name: str) -> bool:
    """Whether a name may be part of a key."""
    return len(name) <= _LONGEST_ROLL_ID and name.isascii() and name.replace("-", "").isalnum()


def parse_round(key: str, value: bytes) -> Round:
    """A round that is one record. Raises StateError."""
    return _round(key, load(key, value, V4))


def _round(key: str, raw: Raw) -> Round:
    lists = {"seats": build_each(Seat, key, raw, "seats"), "away": build_each(Away, key, raw, "away")}
    return build(Round, key, {**raw, **lists})


def parse_chunk(key: str, value: bytes) -> RollChunk:
    """Parse a chunk. Raises StateError."""
    raw = load(key, value, V4)
    chunk = build(RollChunk, key, raw)
    if len({len(chunk.members), len(chunk.nodes), len(chunk.hosts), len(chunk.ranks)}) > 1:
        raise StateError(key, "has seats that are not whole")
    if len(chunk.away) != len(chunk.rounds):
        raise StateError(key, "does not say of all who are away since when")
    return chunk
