"""The status of one job, from its keys at one revision of etcd: who is there, who is missing, and why nothing is
decided. Pure.

Why there is no next round or quorum is what the deciders' own functions return for these keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, TypeVar

from ftcoord.core import (
    death_records,
    layout,
    manager_address,
    quorum as quorum_rules,
    recovery,
    rendezvous,
    rendezvous_records as records,
    strict,
)
from ftcoord.core.elastic import Arrangement, arranged
from ftcoord.core.history import HistoryEvent
from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation, attendance, failing
from ftcoord.core.quorum_records import QuorumRecord, QuorumSeat, ReplicaRecord, parse_quorum, parse_replica
from ftcoord.core.rendezvous import RoundCandidate, RoundOptions, RoundSituation, ends_of
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Round
from ftcoord.core.timers import Timer, Worker, parse_timers
from ftcoord.core.verdict import Publish, Standing, Verdict
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue, is_member
from ftcoord.operator import report
from ftcoord.operator.report import made_of

Member = TypeVar("Member", report.NodeStatus, report.ReplicaStatus)
R = TypeVar("R", JoinRequest, ReplicaRecord)

NOW: Final = 0.0
"""The time of a look: everything counts as first seen now, since keys do not record when they were written."""


# -- keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of a group of members in etcd.

    Args:
        prefix: the group's prefix.
        decided: its decided record; None without one.
        seats: who sits where in its rounds, by key.
        below_members: all keys there, oldest first, including those that are not members'.
        deaths: the keys with members' causes of death.
        events: its history, on which no status depends; empty if it was not asked for.
        stop, over: of a run of `ftcoord.elastic`: why it is to stop, and how it ended last.
    """

    prefix: str
    decided: KeyValue | None = None
    seats: Mapping[str, KeyValue] = field(default_factory=dict)
    below_members: tuple[KeyValue, ...] = ()
    deaths: tuple[KeyValue, ...] = ()
    events: tuple[KeyValue, ...] = ()
    stop: KeyValue | None = None
    over: KeyValue | None = None

    @classmethod
    def of(cls, prefix: str, kvs: Mapping[str, KeyValue]) -> GroupKeys:
        """Those of these keys that are the group's."""

        def below(span: layout.Span) -> list[KeyValue]:
            return [kv for key, kv in kvs.items() if key in span]

        return cls(
            prefix,
            decided=kvs.get(layout.decided_key(prefix)),
            seats={kv.key: kv for kv in below(layout.all_seats_span(prefix))},
            below_members=tuple(sorted(below(layout.members_span(prefix)), key=attrgetter("create_revision"))),
            deaths=tuple(below(layout.deaths_span(prefix))),
            events=tuple(below(layout.events_span(prefix))),
            stop=kvs.get(layout.elastic_stop_key(prefix)),
            over=kvs.get(layout.elastic_over_key(prefix)),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no such group, and was none in the last hour."""
        return self.decided is None and not self.below_members and not self.deaths

    def arrangement(self) -> Arrangement | None:
        """The group of `ftcoord.elastic` that its last quorum is; None if it is none, or cannot be read."""
        try:
            return arranged(0, parse_quorum(self.decided.key, self.decided.value).seats) if self.decided else None
        except (StateError, ValueError):
            return None

    def members(self) -> list[KeyValue]:
        """The members' keys, oldest first."""
        return [kv for kv in self.below_members if is_member(kv)]

    def causes(self) -> dict[str, str]:
        """Why members died, by id, if a cause is known; the one that was written last is the last one."""
        deaths = sorted(self.deaths, key=attrgetter("mod_revision"))
        known = death_records.causes_in((kv.key, kv.value, kv.create_revision) for kv in deaths)
        return {member: one.cause for member, one in known.items()}


_NO_MEMBER: Final = "is not under the lease of its name, so it is no member's key"


class Members(Generic[R]):
    """The records of a group's members.

    Attributes:
        live: the keys and records that count, oldest first.
        odd: the keys that do not count, and why.
        unread: the ids of the live members among those.
    """

    def __init__(self, keys: GroupKeys, parse: Callable[[str, bytes], R]) -> None:
        self.live: list[tuple[KeyValue, R]] = []
        self.odd, self.unread = list[report.Unreadable](), set[str]()
        for kv in keys.below_members:
            try:
                if is_member(kv):
                    self.live.append((kv, parse(kv.key, kv.value)))
                else:
                    self.odd.append({"key": kv.key, "problem": _NO_MEMBER})
            except StateError as error:
                self._refuse(kv, error)

    def check_numbers(self, decided: KeyValue | None, number: int) -> None:
        """Exclude members that name a number to which nobody has counted.

        Raises StateError if the members do not count on from the decided `number`. The lowest number that they name is
        compared: a stranger's record may name any.
        """
        known = min((record.highest for _, record in self.live), default=number)
        if decided is not None:
            strict.check_step(decided.key, number, known, strict.LARGEST_DECIDED_STEP)
        found, self.live = self.live, []
        for kv, record in found:
            try:
                strict.check_step(kv.key, record.highest, max(number, known), strict.LARGEST_STEP)
                self.live.append((kv, record))
            except StateError as error:
                self._refuse(kv, error)

    def _refuse(self, kv: KeyValue, error: StateError) -> None:
        self.odd.append({"key": kv.key, "problem": str(error)})
        self.unread.add(layout.member_of(kv.key))


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Everything that the status of a job depends on.

    Args:
        job: its id.
        revision: etcd's revision at which all of it was read.
        rounds, quorum: its two groups.
        exists: whether etcd has keys of the job.
        timers: the keys of its expiration timers; empty if they were not asked for.
    """

    job: str
    revision: int
    rounds: GroupKeys
    quorum: GroupKeys
    exists: bool
    timers: tuple[KeyValue, ...] = ()

    @classmethod
    def of(
        cls, key_prefix: str, job: str, found: Iterable[KeyValue], *, revision: int, exists: bool = False
    ) -> JobKeys:
        """Those of these keys that are the job's; `exists` if it may have others too, such as a store's."""
        prefix, quorum = layout.run_prefix(key_prefix, job), layout.quorum_prefix(key_prefix, job)
        kvs, span = {kv.key: kv for kv in found}, layout.timers_span(prefix)
        groups = GroupKeys.of(prefix, kvs), GroupKeys.of(quorum, kvs)
        timers = tuple(kv for key, kv in kvs.items() if key in span)
        return cls(job, revision, *groups, exists or not all(group.is_empty for group in groups), timers)


def spans_of(key_prefix: str, job: str, *, with_history: bool) -> tuple[layout.Span, ...]:
    """The keys that a job's status depends on, but for its timers; and those of its history."""
    prefix, quorum = layout.run_prefix(key_prefix, job), layout.quorum_prefix(key_prefix, job)
    kinds = [layout.record_span, layout.members_span, layout.deaths_span, *[layout.events_span] * with_history]
    of_runs = layout.all_seats_span(prefix), layout.elastic_run_span(prefix)
    return (*of_runs, *(kind(group) for group in (prefix, quorum) for kind in kinds))


# -- the status -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a job's users that are in no key: the next decision is judged by them."""

    rounds: RoundOptions = field(default_factory=lambda: RoundOptions(return_to_seat=10.0))
    quorum: QuorumOptions = field(default_factory=lambda: QuorumOptions(1, 60.0))


def status_of(keys: JobKeys, rules: Rules) -> report.JobStatus:
    """The status of a job, but for its leases. It depends on the keys alone."""
    unreadable = list[report.Unreadable]()
    rounds = None if keys.rounds.is_empty else _rounds(keys.rounds, rules.rounds, unreadable)
    quorum = None if keys.quorum.is_empty else _quorums(keys.quorum, rules.quorum, unreadable)
    timers = _timers(keys.timers, unreadable)
    healthy = keys.exists and not unreadable and all(one is None or one["healthy"] for one in (rounds, quorum))
    parts = {"rounds": rounds, "quorum": quorum, "unreadable": unreadable, "timers": timers}
    return made_of(keys, report.JobStatus, format=report.FORMAT, healthy=healthy, **parts)


def line_of(status: report.JobStatus) -> report.JobLine:
    """The line about a job that has rounds or quorums."""
    rounds, quorum, state, note = status["rounds"], status["quorum"], "other", ""
    standings = [one["standing"] for one in rounds["members"]] if rounds else []
    standings += [one["standing"] for one in quorum["replicas"]] if quorum else []
    if rounds is not None:
        state = "degraded" if rounds["missing"] and rounds["state"] in ("running", "seating") else rounds["state"]
        note = rounds["closed"] or rounds["stop"] or rounds["recalled"] or rounds["before"]
        note = note or ("" if rounds["healthy"] else rounds["next"]["reason"])
    elif quorum is not None:
        state, note = quorum["state"], quorum["stop"] or ("" if quorum["healthy"] else quorum["next"]["reason"])
        if quorum["id"] and state in ("training", "forming"):  # between two steps of a healthy job some replicas ask
            state = "training" if quorum["healthy"] else "degraded"
    return {
        "job": status["job"],
        "state": state,
        "round": rounds["number"] if rounds else None,
        "nodes": rounds["size"] if rounds else None,
        "quorum": quorum["id"] if quorum else None,
        "replicas": quorum["size"] if quorum else None,
        "members": sum(standing not in report.UNCOUNTED for standing in standings),
        "note": note,
    }


def foremost(members: list[Member], most: int | None) -> list[Member]:
    """The first `most` members; None for all. If not all can be shown, those in another standing than the majority come
    first: among ten thousand, an operator looks for these."""
    if most is None or len(members) <= most:
        return members
    usual = Counter(one["standing"] for one in members).most_common(1)[0][0]
    return sorted(members, key=lambda one: one["standing"] == usual)[:most]


def _next(verdict: Verdict[Any]) -> report.NextDecision:
    decision: report.Decision = "publish" if isinstance(verdict, Publish) else "wait"
    return {"decision": decision, "reason": verdict.reason, "rule": verdict.rule}


def _withheld(error: StateError, odd: list[report.Unreadable]) -> report.NextDecision:
    """What is decided where the decided record, or its seats, cannot be read, which is added."""
    odd.append({"key": error.key, "problem": str(error)})
    return {"decision": "withheld", "reason": str(error), "rule": ""}


def _last_death(keys: GroupKeys) -> str:
    """Why nothing is decided if all members died before the first decision; else empty."""
    causes = [*keys.causes().values()]
    if keys.decided is not None or keys.below_members or not causes:
        return ""
    return f"no member is left; the last one ended before the first decision: {causes[-1]}"


def _ranked(members: Iterable[Member]) -> list[Member]:
    """Those with a rank first."""
    return sorted(members, key=lambda one: (one["rank"] is None, one["rank"] or 0))


# -- rounds ---------------------------------------------------------------------------------------------------------

_STANDINGS: Final = {
    Standing.SEATED: "seating",
    Standing.ANSWERED: "running",
    Standing.MISSED: "away",
    Standing.SPARE: "spare",
    Standing.CLOSED: "over",
    Standing.REFUSED: "refused",
    Standing.DRAINED: "draining",
}


def _rounds(keys: GroupKeys, options: RoundOptions, unreadable: list[report.Unreadable]) -> report.RoundsStatus:
    """The state of a run's rounds. Adds the keys that are not counted in it.

    Args:
        options: the nodes' `rdzv_conf`, which etcd does not have.
    """
    members, previous, limits, causes = Members(keys, records.parse_join_request), None, (0, 0), keys.causes()
    try:
        previous = _last_round(keys)
        members.check_numbers(keys.decided, previous.number if previous else 0)
    except StateError as error:
        state, previous, next_ = "unreadable", None, _withheld(error, members.odd)
    else:
        candidates = [RoundCandidate(layout.member_of(kv.key), ask, NOW) for kv, ask in members.live]
        seen = RoundSituation(candidates, NOW, previous, NOW, deaths=causes, gone_since=NOW, unreadable=members.unread)
        limits, state = seen.limits, _state_of_rounds(previous, [ask for _, ask in members.live])
        next_ = _next(rendezvous.decide(seen, options, NOW))
    unreadable += members.odd
    newest, live = {ask.node: kv for kv, ask in members.live}, {_holder(kv, ask) for kv, ask in members.live}
    round_ = previous or Round.of(NO_ROUND)
    # Nobody is missing from a round that is over or recalled: live nodes join the next one.
    seats = () if round_.closed or round_.recalled else round_.seats
    gone = ((rank, seat) for rank, seat in enumerate(seats) if seat.member not in live)
    missing = [made_of(one, report.MissingNode, rank=rank, cause=causes.get(one.member, "")) for rank, one in gone]
    fewest, most = limits if limits != (0, 0) else round_.limits
    is_running = state in ("running", "stopping") and not missing and next_["decision"] == "wait"
    return made_of(
        round_,
        report.RoundsStatus,
        state=state,
        healthy=state in records.DONE or is_running,
        min_nodes=fewest,
        max_nodes=most,
        next={**next_, "reason": _last_death(keys) or next_["reason"]},
        members=_ranked(_node(previous, kv, ask, limits, kv is newest[ask.node]) for kv, ask in members.live),
        missing=missing,
    )


def _last_round(keys: GroupKeys) -> Round | None:
    """With all of its seats; None before the first. Raises StateError."""
    if keys.decided is None:
        return None
    record = records.parse_decided(keys.decided.key, keys.decided.value)
    return records.seated(keys.prefix, record, {key: kv.value for key, kv in keys.seats.items()})


def late_ends(keys: GroupKeys) -> list[HistoryEvent]:
    """How parts in a run's last round ended, as the members wrote it themselves: no decision has what was written after
    the last one. Who is gone without a reason is lost."""
    try:
        round_ = _last_round(keys)
    except StateError:
        return []
    if round_ is None:
        return []
    members = Members(keys, records.parse_join_request)
    live = [RoundCandidate(layout.member_of(kv.key), ask, NOW, kv.mod_revision) for kv, ask in members.live]
    deaths = death_records.causes_in((kv.key, kv.value, kv.create_revision) for kv in keys.deaths)
    known = max(kv.mod_revision for kv in (*keys.below_members, *keys.deaths, *keys.events, keys.decided) if kv)
    ends = [replace(end, noted=min(end.noted, known)) for end in ends_of(round_, live, deaths, members.unread)]
    return [end for end in ends if end.kind != "left" or not round_.closed]  # all leave a run that is over


def _state_of_rounds(previous: Round | None, asks: Sequence[JoinRequest]) -> str:
    if previous is not None and previous.closed and not any(ask.reopens == previous.number for ask in asks):
        return previous.outcome or "closed"
    if previous is None or previous.closed or previous.recalled or not previous.size or not asks:
        return "forming" if asks else "empty"
    return "stopping" if previous.stop and previous.ready else "running" if previous.ready else "seating"


def _holder(kv: KeyValue, ask: JoinRequest) -> str:
    """The member that a node has its seat as."""
    return ask.holds or layout.member_of(kv.key)


def _node(
    previous: Round | None, kv: KeyValue, ask: JoinRequest, limits: tuple[int, int], is_newest: bool
) -> report.NodeStatus:
    return made_of(
        ask,
        report.NodeStatus,
        rank=previous.ranks.get(_holder(kv, ask)) if previous else None,
        member=layout.member_of(kv.key),
        standing=_standing_of_node(previous, _holder(kv, ask), ask, limits) if is_newest else "replaced",
        said="; ".join(one.line for one in ask.failed),
        since_revision=kv.create_revision,
        lease_left=None,
        lease_ttl=None,
    )


def _standing_of_node(previous: Round | None, holder: str, ask: JoinRequest, limits: tuple[int, int]) -> str:
    if previous is None:
        return "waiting" if ask.limits == limits or limits == (0, 0) else "refused"
    if ask.node in previous.drained and not previous.closed:
        return _STANDINGS[Standing.DRAINED]
    # Who holds a seat has asked for that round, though its key names no earlier one any more.
    asked = replace(ask, after=min(ask.after, ask.seated - 1)) if ask.holds else ask
    found = rendezvous.outlook(previous, holder, asked).standing
    if found is Standing.PENDING:
        takes_seat = not previous.recalled and ask.seated == previous.number > 0
        return "seated" if takes_seat and previous.rank_of(holder) is not None else "waiting"
    return "called back" if found is Standing.ANSWERED and previous.recalled else _STANDINGS[found]


# -- quorums --------------------------------------------------------------------------------------------------------


NO_QUORUM: Final = QuorumRecord(number=0, id=0, seats=(), idle=(), created=0.0)


def _quorums(keys: GroupKeys, options: QuorumOptions, unreadable: list[report.Unreadable]) -> report.QuorumStatus:
    """The state of a job's quorums. Adds the keys that are not counted in it.

    Args:
        options: the options of the job's address. The replicas' records have its min_replicas: the largest one counts,
            also against this one.
    """
    members, previous, next_, state = Members(keys, parse_replica), None, None, ""
    try:
        if keys.decided is not None:
            previous = parse_quorum(keys.decided.key, keys.decided.value)
        members.check_numbers(keys.decided, max(previous.number, previous.id) if previous else 0)
    except StateError as error:
        previous, next_, state = None, _withheld(error, members.odd), "unreadable"
    else:
        fewest = max([options.min_replicas, *(one.min_replicas for _, one in members.live)])
        options = replace(options, min_replicas=fewest)
    unreadable += members.odd
    quorum = previous or NO_QUORUM
    group = keys.arrangement() if previous is not None else None
    replicas = [_candidate(kv, record) for kv, record in members.live]
    statuses, fewest = _replicas(quorum, replicas, group), options.min_replicas
    live = {_name(one) for one in replicas}
    asking = {one["replica_id"] for one in statuses if one["standing"] == "asking"}
    if next_ is None:
        seen = QuorumSituation(replicas, previous, NOW, unreadable=len(members.unread))
        next_ = _next(quorum_rules.decide(seen, options, NOW))
        if next_["decision"] == "wait" and (len(live) < fewest or not asking):
            more = f"; start {fewest - len(live)} more" if len(live) < fewest else ""
            next_ = {**next_, "reason": f"{attendance([*asking], len(live), fewest)}{more}"}
        state = "empty" if not statuses else "forming" if asking else "training" if previous else "idle"
        if keys.stop is not None and state == "training":
            state = "stopping"
    over = keys.over.value.decode(errors="replace") if keys.over is not None and not statuses else ""
    if over and keys.decided is not None:
        state = over.partition(":")[0]
    trouble, causes = failing(quorum, fewest), keys.causes()
    missing: list[report.MissingReplica] = [
        {"rank": rank, "replica_id": _name(one), "member": one.member, "cause": causes.get(one.member, "")}
        for rank, one in enumerate(quorum.seats)
        if _name(one) not in live
    ]
    is_served = next_["decision"] != "withheld" and len(live) >= max(fewest, 1)
    return made_of(
        quorum,
        report.QuorumStatus,
        state=state,
        healthy=state in records.DONE or (is_served and not trouble and not missing),
        size=len(quorum.seats),
        max_step=group.step if group else max((seat.request.step for seat in quorum.seats), default=0),
        stop=keys.stop.value.decode(errors="replace") if keys.stop is not None else "",
        min_replicas=fewest,
        next={**next_, "reason": _last_death(keys) or "; ".join(filter(None, (next_["reason"], trouble)))},
        replicas=statuses,
        missing=missing if state not in records.DONE else [],
    )


def _candidate(kv: KeyValue, record: ReplicaRecord) -> QuorumCandidate:
    when = {"came_at": kv.create_revision, "asked_at": kv.mod_revision, "wrote_at": kv.mod_revision}
    return QuorumCandidate.of(layout.member_of(kv.key), record, joined=NOW, **when)


def _name(one: QuorumCandidate | QuorumSeat) -> str:
    """A replica's name: it may have another lease since it got a seat."""
    return one.request.replica_id


def _replicas(
    quorum: QuorumRecord, replicas: Sequence[QuorumCandidate], group: Arrangement | None
) -> list[report.ReplicaStatus]:
    """Members of an elastic run have their ranks there, and all have the state with which their group began."""
    seats = {_name(seat): (rank, seat.request) for rank, seat in enumerate(quorum.seats)}
    sources, newest = recovery.heals_from(quorum.requests, 0), {_name(one): one.member for one in replicas}
    top, found = max((request.step for _, request in seats.values()), default=0), list[report.ReplicaStatus]()
    if group is not None:
        seats = {name: (rank, replace(seats[name][1], step=group.step)) for rank, name in enumerate(group.names)}
        sources, top = {}, group.step
    for one in replicas:
        is_newest = newest[_name(one)] == one.member
        rank, shown = seats.get(_name(one), (None, one.request)) if is_newest else (None, one.request)
        if one.asked and (group is None or rank is None):
            shown = one.request  # its key has its last request only if it asked through etcd
        has_asked = one.asked > quorum.answered.get(one.member, 0)
        standing = "asking" if has_asked else "idle" if rank is None else "training"
        status = made_of(
            shown,
            report.ReplicaStatus,
            rank=rank,
            member=one.member,
            standing=standing if is_newest else "replaced",
            behind=top - shown.step if rank is not None else 0,
            address=manager_address.parted(shown.address)[0],
            since_revision=one.came_at,
            heals_from=sources.get(_name(one), "") if rank is not None else "",
            lease_left=None,
            lease_ttl=None,
        )
        found.append(status)
    return _ranked(found)


# -- timers ---------------------------------------------------------------------------------------------------------


def _timers(kvs: Iterable[KeyValue], unreadable: list[report.Unreadable]) -> list[report.TimerStatus]:
    """The expiration timers that are held, the one that expires first before the others. Adds the keys that are not
    counted.

    A timer runs on the monotonic clock of its worker's host, which no other host can read. The times here are on that
    host's wall clock: they are for people, and no decision depends on them.
    """
    held, expired = list[tuple[Worker, Timer]](), set[int]()
    for kv in kvs:
        try:
            record = parse_timers(kv.key, kv.value)
        except StateError as error:
            unreadable.append({"key": kv.key, "problem": str(error)})
            continue
        if layout.is_expired_key(kv.key):
            expired.update(timer.token for timer in record.timers)
        else:
            held += [(record.worker, timer) for timer in record.timers]
    found: list[report.TimerStatus] = [
        {
            "host": worker.node,
            "pid": worker.pid,
            "rank": worker.rank if worker.rank >= 0 else None,
            "scope": timer.scope,
            "standing": "expired" if timer.token in expired else "running",
            "after": timer.after_ms / 1000,
            "until": timer.wall_ms / 1000,
        }
        for worker, timer in held
    ]
    return sorted(found, key=itemgetter("until", "host", "pid", "scope"))
