"""What must hold of every decision, whatever happened before: S1, S2, S3 and S5 of `docs/protocol.md`.

S4, of a store's operations, is in `store_history`.

The functions know nothing of how `decide` comes to its verdict: they compare what it saw with what it wants to publish.
The simulator and the tests in memory call them before each decision is published, by `checked`; the model tests call
them after each step. Each costs O(members).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ftcoord.coordination import policy as quorums
from ftcoord.core.layout import Span, chunk_key, decided_key, fence_key
from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.rendezvous import RoundSituation
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Round, parse_decided, seated
from ftcoord.core.verdict import Publish
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
    old = situation.previous or Round.of(NO_ROUND)
    if new.name == old.name:
        _check_amendment(situation, old, new)
    else:
        _check_new_round(situation, old, new)


def check_succession(old: Round, new: Round) -> None:
    """Check S1 and S2 for two successive records, by any writer. Raises InvariantBroken."""
    require("S2 rounds only grow", new.number >= old.number)
    if new.name == old.name:
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


def _check_new_round(situation: RoundSituation, old: Round, new: Round) -> None:
    members = {member.id: member.ask for member in situation.members}
    known = max((max(ask.after, ask.seated) for ask in members.values()), default=0)
    chosen = [seat.member for seat in new.seats]
    require("S2 rounds only grow", new.number > max(old.number, known))
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


def check_fences(prefix: str, old: Round | None, new: Round, decision: Publish[bytes]) -> None:
    """Check S3 for a transaction that publishes the record of a round. Raises InvariantBroken.

    A new round opens its own fence, and deletes that of the last one: no two rounds' stores can be written to at once.
    Other records of a round do not touch its fence.
    """
    fence = fence_key(prefix, new.name)
    if new.name == (old or NO_ROUND).name:
        require("S3 only a new round changes fences", not decision.puts and not decision.deletes)
        return
    require("S3 a new round opens its fence", fence in dict(decision.puts))
    require("S3 a new round keeps its fence", all(fence not in span for span in decision.deletes))
    ended = old is None or not old.size or Span(fence_key(prefix, old.name)) in decision.deletes
    require("S3 the last round ends with the next one", ended)


def check_seats(prefix: str, old: Round | None, new: Round, decision: Publish[bytes]) -> None:
    """Check S1 for a transaction that publishes a round. Raises InvariantBroken; StateError if nobody could read it.

    A reader of the record and of the keys that it names must get the decided round; later records of a round do not
    touch its seats.
    """
    head = parse_decided(decided_key(prefix), decision.record)
    keys = [key for key, _ in decision.puts]
    if old is not None and old.name == head.name:
        require("S1 a round keeps its seats", not keys and not decision.deletes)
        return
    chunks = [chunk_key(prefix, head.name, chunk) for chunk in range(head.chunks)]
    require("S1 seats are written as a whole", keys[1:] == chunks if head.number else not keys)
    require("S1 seats are what was decided", seated(prefix, head, dict(decision.puts)) == in_order(new, head.by))


def in_order(round_: Round, by: str) -> Round:
    """The round as its readers get it: members that are away have no order of their own."""
    return replace(round_, away=tuple(sorted(round_.away, key=lambda one: one.member)), by=by)


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
    return one.asked > answered.get(one.member, 0)


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
        def publishing(self: Any, wanted: Publish[Round], previous: Round | None, me: str) -> Any:
            decision = publish(self, wanted, previous, me)
            check_seats(self._prefix, previous, wanted.record, decision)
            check_fences(self._prefix, previous, wanted.record, decision)
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
