"""What must hold of every decision, whatever happened before: S1, S2, S3 and S5 of `docs/protocol.md`.

S4, of a store's operations, is in `store_history`.

The functions know nothing of how `decide` comes to its verdict: they compare what it saw with what it wants to publish.
The simulator and the tests in memory call them before each decision is published, by `checked`; the model tests call
them after each step. Each costs O(members).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftcoord.coordination import policy as quorums
from ftcoord.core.layout import Span, decided_key, roll_key, round_key, round_store_prefix
from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.rendezvous_records import (
    NO_ROUND,
    JoinRequest,
    Round,
    RoundHead,
    in_order,
    parse_chunk,
    parse_decided,
    round_of,
)
from ftcoord.core.round_situation import RoundSituation
from ftcoord.core.verdict import Publish
from ftcoord.errors import StateError
from ftcoord.rendezvous import policy as rounds


class InvariantBroken(Exception):
    """A decision breaks the protocol: a bug in ftcoord. The text begins with the invariant (S1, S2, ...)."""


def require(rule: str, holds: bool) -> None:
    """Raises InvariantBroken, with the rule, unless it holds."""
    if not holds:
        raise InvariantBroken(rule)


# -- rounds -----------------------------------------------------------------------------------------------------


def check_round(situation: RoundSituation, new: Round) -> None:
    """Check S1 and S2 for a record that `core.rendezvous.decide` wants to publish. Raises InvariantBroken."""
    old = situation.previous or NO_ROUND
    if new.number == old.number:
        _check_amendment(situation, old, new)
    elif new.recalled:
        _check_lost_round(situation, old, new)
    else:
        _check_new_round(situation, old, new)


def check_succession(old: Round, new: Round) -> None:
    """Check S1 and S2 for two successive records, by any writer. Raises InvariantBroken."""
    require("S2 rounds only grow", new.number >= old.number)
    if new.number == old.number:
        same = (new.seats, new.address, new.port) == (old.seats, old.address, old.port)
        require("S1 one membership a round", same)
        require("S1 a recall changes no start", new.ready or not old.ready)


def _check_amendment(situation: RoundSituation, old: Round, new: Round) -> None:
    """A later record of a round may say that the round is ready or recalled, and which limits apply; nothing else."""
    said = replace(old, ready=new.ready, recalled=new.recalled, waiting=new.waiting, by=new.by)
    stated = replace(said, min_nodes=new.min_nodes, max_nodes=new.max_nodes)
    require("S1 a recall changes no membership", new == stated)
    check_succession(old, new)
    require("S1 a recall is not taken back", bool(new.recalled) or not old.recalled)
    if new.ready and not old.ready:
        seated = {member.id: member.ask.seated for member in situation.members}
        taken = all(seated.get(seat.member) == new.number for seat in new.seats)
        require("S1 nobody starts before all have taken their seats", taken)
        require("S1 a recalled round does not start", not new.recalled)


def _check_lost_round(situation: RoundSituation, old: Round, new: Round) -> None:
    """A round whose record etcd has lost may only be recalled: the last one in which nodes run, or that is known."""
    known = [max(member.ask.after, member.ask.seated) for member in situation.members]
    require("S2 rounds only grow", new.number > old.number)
    require("S2 no number is given again", new.number == max([*known, situation.highest]))
    require("S1 one membership a round", not (new.seats or new.ready or new.away))
    require("S1 who is drained stays drained", new.drained == old.drained)


def _check_new_round(situation: RoundSituation, old: Round, new: Round) -> None:
    members = {member.id: member.ask for member in situation.members}
    known = max((max(ask.after, ask.seated) for ask in members.values()), default=0)
    chosen = [seat.member for seat in new.seats]
    require("S2 rounds only grow", new.number > max(old.number, known, situation.highest))
    require("S1 one seat for each", len(set(chosen)) == len(chosen) == len({seat.node for seat in new.seats}))
    require("S1 only live members are seated", members.keys() >= set(chosen))
    require("S1 min <= n <= max", new.min_nodes <= len(chosen) <= new.max_nodes)
    require("S1 nobody that is drained is seated", not {seat.node for seat in new.seats} & {*old.drained})
    require("S1 only those that ask are seated", all(_asks(members[one], old, one) for one in chosen))
    require("S1 nobody starts before all have taken their seats", not new.ready)
    require("S1 a new round is neither recalled nor closed", not (new.recalled or new.closed or new.outcome))
    require("S1 a running round is recalled before it is replaced", bool(old.recalled or old.closed or not old.seats))
    reopening = all(members[one].reopens == old.number for one in chosen)
    require("S1 a closed run goes on only among those that saw its end", reopening or not old.closed)
    first = members[chosen[0]]
    served = (new.address, new.port) == (first.address, first.port)
    require("S1 rank 0 serves the bootstrap address", served)


def _asks(ask: JoinRequest, old: Round, member: str) -> bool:
    """Whether it wants another round than the last one in which it took a seat, as far as it or the record knows."""
    return not ask.holds and ask.after >= max(ask.seated, old.last_seats.get(member, 0))


def check_fences(prefix: str, old: Round | None, number: int, decision: Publish[bytes]) -> None:
    """Check S3 for a transaction that publishes the record of round `number`. Raises InvariantBroken.

    A new round opens its own fence, and deletes that of the last one: no two rounds' stores can be written to at once.
    Other records of a round do not touch its fence.
    """
    before = old.number if old else 0
    opened = {key for key, _ in decision.puts}
    if number == before:
        require("S3 only a new round changes fences", not opened and not decision.deletes)
        return
    require("S3 a new round opens its fence", opened == {round_key(prefix, number)})
    require("S3 a new round keeps its fence", all(round_key(prefix, number) not in span for span in decision.deletes))
    store = Span(round_store_prefix(prefix, number), is_prefix=True)
    require("S3 a new store is empty", store in decision.deletes)
    ended = before == 0 or Span(round_key(prefix, before)) in decision.deletes
    require("S3 the last round ends with the next one", ended)


def check_roll(prefix: str, old: RoundHead | None, new: Round, decision: Publish[bytes]) -> None:
    """Check S1 for a transaction that publishes a round whose roll may be stored beside it. Raises InvariantBroken, and
    StateError if nobody could read the record.

    `old` is the head that it replaces, None for a record with an inline roll. A reader of the record and of the keys
    that it names must get the decided round; later records of a round do not touch its roll.
    """
    head = parse_decided(decided_key(prefix), decision.record)
    if not isinstance(head, RoundHead):
        require("S1 one membership a round", head == replace(new, by=head.by) and not decision.beside)
        return
    if decision.beside:
        decided = replace(new, away=in_order(new.away), by=head.by)
        keys = [roll_key(prefix, head.roll, chunk) for chunk in range(head.chunks)]
        require("S1 a roll is written as a whole", [key for key, _ in decision.beside] == keys)
        require("S1 a roll says what was decided", _read(head, decision.beside) == decided)
    else:
        require("S1 a new round has a new roll", old is not None and old.number == head.number)
    kept = old is None or old.number != head.number or (old.roll, old.chunks) == (head.roll, head.chunks)
    require("S1 one membership a round", kept)
    ends = [roll_key(prefix, head.roll, chunk) for chunk in (0, head.chunks - 1)]
    require("S1 a round keeps its roll", not any(key in span for span in decision.deletes for key in ends))


def _read(head: RoundHead, roll: Sequence[tuple[str, bytes]]) -> Round | None:
    """The round that a reader gets; None for none."""
    try:
        return round_of("", head, (parse_chunk(key, value) for key, value in roll))
    except StateError:
        return None


# -- quorums ----------------------------------------------------------------------------------------------------


def check_quorum(situation: QuorumSituation, options: QuorumOptions, new: QuorumRecord) -> None:
    """Check S1, S2 and S5 for a record that `core.quorum.decide` wants to publish. Raises InvariantBroken."""
    old = situation.previous
    answered: Mapping[str, int] = old.answered if old else {}
    _check_seats(situation, answered, new)
    heard = max((one.heard for one in situation.members), default=0)
    known = max(old.number if old else 0, situation.highest.number, heard)
    require("S2 quorums only grow", new.number > known)
    _check_id(situation, new)
    _check_majority(situation, options, answered, new)


def _check_seats(situation: QuorumSituation, answered: Mapping[str, int], new: QuorumRecord) -> None:
    """Every member with a seat has asked for it, and an answered request stays answered."""
    members = {one.member: one for one in situation.members}
    require("S1 one seat for each", len(new.names) == len(new.seated) == len(new.seats))
    require("S1 only live members are seated", members.keys() >= new.seated.keys())
    require("S1 only known requests are answered", all(members[seat.member].is_whole for seat in new.seats))
    asked = all(
        (members[seat.member].asked, members[seat.member].request) == (seat.asked, seat.request) for seat in new.seats
    )
    require("S1 a seat answers what its member asks", asked)
    open_ = all(seat.asked > answered.get(seat.member, 0) for seat in new.seats)
    require("S1 no request is answered twice", open_)
    _check_namesakes(situation, answered, new)
    there = situation.members
    kept = all(new.answered.get(one.member, 0) >= answered[one.member] for one in there if _was_answered(one, answered))
    require("S1 no answer is forgotten", kept)


def _check_namesakes(situation: QuorumSituation, answered: Mapping[str, int], new: QuorumRecord) -> None:
    """Of several members with one replica id the last request counts, and all of them are answered."""
    seats = {seat.request.replica_id: seat.member for seat in new.seats}
    asked_at = {one.member: one.asked_at for one in situation.members}
    wrote_at: dict[str, int] = {}
    for one in situation.members:
        if _asks_now(one, answered):
            wrote_at[one.request.replica_id] = max(wrote_at.get(one.request.replica_id, 0), one.wrote_at)
    for one in situation.members:
        if one.request.replica_id not in seats:
            continue
        if not _asks_now(one, answered):
            require("S1 a newcomer hides what was asked before", one.came_at <= wrote_at[one.request.replica_id])
            continue
        require("S1 the last request counts", one.asked_at <= asked_at[seats[one.request.replica_id]])
        require("S1 members of one name are answered together", new.answered.get(one.member, 0) >= one.asked)


def _asks_now(one: QuorumCandidate, answered: Mapping[str, int]) -> bool:
    return one.is_whole and one.asked > answered.get(one.member, 0)


def _was_answered(one: QuorumCandidate, answered: Mapping[str, int]) -> bool:
    return 0 < one.asked <= answered.get(one.member, 0)


def _check_id(situation: QuorumSituation, new: QuorumRecord) -> None:
    """An id belongs to one membership: the last quorum's id for the same replicas, else one above all known."""
    old, there = situation.previous, situation.members
    known = max((one.after for one in there), default=0)
    if old is not None and new.id == old.id:
        require("S2 an id is of one membership", new.names == old.names)
        require(
            "S2 process groups are built again after failed commits",
            all(one.commit_failures <= 0 for one in new.requests),
        )
        require("S2 ids only grow", new.id >= max(known, situation.highest.id))
    else:
        require("S2 ids only grow", new.id > max(known, situation.highest.id, old.id if old else 0))


def _check_majority(
    situation: QuorumSituation, options: QuorumOptions, answered: Mapping[str, int], new: QuorumRecord
) -> None:
    """All of the last quorum are in again; or enough are, and more than half of the live replicas ask."""
    require("S5 no quorum is empty", bool(new.seats))
    before = situation.previous.names if situation.previous else frozenset()
    if before and before <= new.names:
        return
    alive = {one.request.replica_id for one in situation.members}
    asking = {one.request.replica_id for one in situation.members if _asks_now(one, answered)}
    require("S5 min_replicas are in", len(new.seats) >= options.min_replicas)
    require("S5 more than half of the live replicas ask", 2 * len(asking) > len(alive) + situation.unreadable)


# -- in every decision of this process --------------------------------------------------------------------------


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Check each decision before it is published: one that breaks an invariant raises InvariantBroken in its decider,
    whose thread ends, and logs that as an error. May be nested."""
    if hasattr(rounds.RendezvousPolicy._publish, "__wrapped__"):
        yield
        return
    places = (
        (rounds, lambda situation, record, *_: check_round(situation, record)),
        (quorums, lambda situation, record, options, _: check_quorum(situation, options, record)),
    )
    with contextlib.ExitStack() as undo:
        for module, check in places:
            undo.callback(setattr, module, "decide", module.decide)
            module.decide = _checked(module.decide, check)  # type: ignore[attr-defined]
        publish = rounds.RendezvousPolicy._publish
        undo.callback(setattr, rounds.RendezvousPolicy, "_publish", publish)

        @functools.wraps(publish)
        def publishing(
            self: Any, wanted: Publish[Round], previous: Round | None, head: RoundHead | None, *more: Any, **flags: bool
        ) -> Any:
            decision = publish(self, wanted, previous, head, *more, **flags)
            check_roll(self._prefix, head, wanted.record, decision)
            check_fences(self._prefix, previous, wanted.record.number, decision)
            return decision

        rounds.RendezvousPolicy._publish = publishing  # type: ignore[method-assign]
        yield


def _checked(decide: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The same `decide`, whose records are checked."""

    @functools.wraps(decide)
    def deciding(situation: Any, *more: Any) -> Any:
        verdict = decide(situation, *more)
        if isinstance(verdict, Publish):
            check(situation, verdict.record, *more)
        return verdict

    return deciding
