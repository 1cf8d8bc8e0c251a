"""Operators' orders, from the command line or the dashboard: the target is found by name, the order is one guarded
transaction, and the result is reported. The job's history records who gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core import death_records, layout, quorum_records, rendezvous, rendezvous_records
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, RoundHead, parse_decided, parse_join_request
from ftcoord.errors import ConfigError, EtcdError, FtcoordError, NotInQuorum, OutcomeUnknown, StateError
from ftcoord.escaping import counted
from ftcoord.etcd.api import Compare, Etcd, KeyValue, Put
from ftcoord.etcd.retry import TimeLimit
from ftcoord.operator.reading import read_job
from ftcoord.operator.report import FORMAT, Done, no_such_job
from ftcoord.operator.status import JobKeys
from ftcoord.primitives.group.record import ordered
from ftcoord.rendezvous.run_record import RecordChange, change_record, draining, ending, stopping

CLOSED_TTL: Final = 3600
"""Seconds that the record of a run that never had one lives: the agents' default."""


class NothingThere(FtcoordError):
    """The order has no target, or was not carried out."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order.

    Args:
        what: evict, drain, close, stop or kill.
        job: the job.
        name: the member, node or replica; empty to close or stop the job.
        who: who gives the order.
        reason: why; empty for no reason.
        through: where it was given, as `the page of ops@h1, from 10.0.0.7`; empty for a command.
        force: for drain: also if fewer nodes would stay than a round needs.
        wait: for kill: seconds to wait until the member is gone.
    """

    what: str
    job: str
    name: str
    who: str
    reason: str
    through: str = ""
    force: bool = False
    wait: float = 10.0

    def why(self, done: str) -> str:
        """What was done, by whom, and why."""
        through, reason = self.through and f" through {self.through}", self.reason and f": {self.reason}"
        return f"{done} by {self.who}{through}{reason}"


Act: TypeAlias = Callable[[], Done]
"""Carries out an order. Raises NothingThere, ConfigError, StateError and EtcdError; OutcomeUnknown if a part of it is
done. It may be called again."""
Planned: TypeAlias = tuple[Sequence[str], Act]
"""What an order does, each a line, and what does it."""


def planned(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """Find the target of an order, so that it can be shown before anything is done.

    Args:
        timeout: in seconds, for each request.

    Raises NothingThere, ConfigError if the name matches several, StateError and EtcdError.
    """
    plan = {"evict": _evict, "drain": _drain, "close": _close, "stop": _stop, "kill": _kill}[order.what]
    return plan(etcd, key_prefix, order, timeout)


def _done(order: Order, did: Sequence[str] = (), left: Sequence[str] = ()) -> Done:
    return {"format": FORMAT, "job": order.job, "did": [*did], "left": [*left]}


# -- whom a name means ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedMember:
    """A live member of a job.

    Args:
        prefix: its group's prefix.
        kv: its key.
        owner: the owner of its leases: the node's id, or the replica's name.
        host: its machine, usually with the pid of its agent, as `host7 (pid 4711)`; empty if its key has none.
        group: rendezvous or quorums.
    """

    prefix: str
    kv: KeyValue
    owner: str
    host: str
    group: str

    @property
    def id(self) -> str:
        return layout.member_of(self.kv.key)

    def __str__(self) -> str:
        return f"{self.owner}{self.host and f' on {self.host}'} (member {self.id} of the {self.group})"


def members_called(keys: JobKeys, name: str) -> list[NamedMember]:
    """The members with this member id, node id, replica id or host, oldest first.

    A host may be named without the pid of its agent. A replica that has torchft's id, `name:uuid`, may be named without
    the uuid, or by its beginning; never by a part of the name, since `train_1` is not `train_10`.
    """
    members, begins = [*_named_members(keys)], name if ":" in name else f"{name}:"
    found = [one for one in members if name in (one.id, one.owner, one.host, one.host.partition(" (pid ")[0]) and name]
    return found or [one for one in members if one.group == "quorums" and one.owner.startswith(begins) and name]


def _named_members(keys: JobKeys) -> Iterator[NamedMember]:
    for kv in keys.rounds.members():
        ask = _ask_of(kv)  # a member whose record cannot be read has an id all the same
        yield NamedMember(keys.rounds.prefix, kv, ask.node if ask else "", ask.host if ask else "", "rendezvous")
    for kv in keys.quorum.members():
        owner = ""
        with suppress(StateError):
            owner = quorum_records.parse_replica(kv.key, kv.value).request.replica_id
        yield NamedMember(keys.quorum.prefix, kv, owner, "", "quorums")


def _ask_of(kv: KeyValue) -> JoinRequest | None:
    with suppress(StateError):
        return parse_join_request(kv.key, kv.value)
    return None


def _find(etcd: Etcd, key_prefix: str, order: Order) -> tuple[JobKeys, list[NamedMember]]:
    """The job of an order, and the members that its name refers to, all of one owner."""
    keys = _known_job(etcd, key_prefix, order.job)
    members = members_called(keys, order.name)
    if not members:
        who = f"no live member of {order.job!r} is called {order.name!r}"
        raise NothingThere(f"{who}: `ftcoord status` lists the members")
    # An owner may have several leases; several owners may share a host's name.
    if len({(one.group, one.owner) for one in members}) > 1:
        listed = " or ".join(f"{one.id} ({one.owner})" for one in members[:5])
        raise ConfigError("NODE", order.name, f"it is the name of several: give the member id of {listed}")
    return keys, members


def _known_job(etcd: Etcd, key_prefix: str, job: str) -> JobKeys:
    keys = read_job(etcd, key_prefix, job)
    if not keys.exists:
        raise NothingThere(no_such_job(job))
    return keys


# -- evict ----------------------------------------------------------------------------------------------------------


def _evict(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """Revoke the leases of members of a job."""
    _, members = _find(etcd, key_prefix, order)

    def act() -> Done:
        did = [one for one in members if _end_lease(etcd, one, order)]
        told = [f"evicted {one}: the others go on; a process that lives comes back as a new member" for one in did]
        return _done(order, told, [f"{one} was gone already" for one in members if one not in did])

    return [f"evict {one} from {order.job!r}" for one in members], act


def _end_lease(etcd: Etcd, member: NamedMember, order: Order) -> bool:
    """Returns whether the member was still there.

    The cause is written first: without it, the others would give the member time to come back to its seat.
    """
    grave, who = etcd.grant(death_records.REMEMBERED_FOR), member.host or member.owner
    cause = f"{who} was {order.why('evicted')}"
    death = death_records.encode(death_records.Death(cause, int(concurrency.wall() * 1000)))
    put = Put(layout.death_key(member.prefix, member.id), death, grave.id)
    is_there = Compare(member.kv.key, "lease", "=", member.kv.lease)
    if not etcd.txn([is_there], [put, *ordered(etcd, member.prefix, cause, target=who, by=order.who)]).succeeded:
        etcd.revoke(grave.id)
        return False
    try:
        etcd.revoke(member.kv.lease)
    except EtcdError as error:
        half = f"the cause of {member} is written, but its lease may still live"
        raise OutcomeUnknown(f"{half}: evict it again: {error}") from None
    return True


# -- drain and close ------------------------------------------------------------------------------------------------


def _drain(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """Have a node leave a run. It and the others learn of it at once, with the record."""
    leaver = _leavers(etcd, key_prefix, order)[0]
    # By its node: others may have gone, and a round may have begun, while the user thought about it.
    by_node, told = replace(order, name=leaver.node), f"{leaver.node} on {leaver.host}"

    def act() -> Done:
        why = ""

        def change(now: RoundHead) -> RecordChange | None:
            # Looked for after the record was read: of two operators who drain at the same moment, the second one sees
            # what the first one did.
            nonlocal why
            leavers = _leavers(etcd, key_prefix, by_node)
            why = rendezvous.why_not_drained(now, leavers)
            return draining(now, leavers, order.why("was drained"))

        prefix = layout.run_prefix(key_prefix, order.job)
        change_record(etcd, prefix, CLOSED_TTL, change, by=order.who, within=TimeLimit(timeout))
        drained = f"drained {told}: it leaves as soon as its agent has stopped its workers"
        return _done(order, left=[f"{told}: {why}"]) if why else _done(order, [drained])

    return [f"have {told} leave {order.job!r}"], act


def _leavers(etcd: Etcd, key_prefix: str, order: Order) -> list[JoinRequest]:
    """The requests of the members of a node that is to leave a run, oldest first. Raises NothingThere if too few would
    stay, unless that is forced."""
    keys, members = _find(etcd, key_prefix, order)
    if members[0].group != "rendezvous":
        instead = "it is a replica of a quorum, which has no rounds to leave: `ftcoord kill` it"
        raise ConfigError("NODE", order.name, instead)
    asks = [parse_join_request(one.kv.key, one.kv.value) for one in members]
    decided = keys.rounds.decided
    now = parse_decided(decided.key, decided.value) if decided is not None else NO_ROUND
    limits = now.limits if now.limits != NO_ROUND.limits else asks[0].limits
    live = [ask for ask in map(_ask_of, keys.rounds.members()) if ask is not None]
    stay = {ask.node for ask in live if ask.limits == limits}
    stay -= {*now.drained, *(ask.node for ask in asks)}
    if len(stay) < limits[0] and not order.force:
        left = f"{len(stay)} of at least {counted(limits[0], 'node')} would be left of {order.job!r}"
        raise NothingThere(f"{left}, too few for a round: start another node first, or force it (--force)")
    return asks


def _close(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """End a run for all of its nodes."""
    rounds, prefix = _known_job(etcd, key_prefix, order.job).rounds, layout.run_prefix(key_prefix, order.job)
    if rounds.is_empty:
        raise NothingThere(f"{order.job!r} has no rendezvous to close; its replicas end one by one: `ftcoord kill`")

    def act() -> Done:
        over, why = "", order.why("closed")

        def change(now: RoundHead) -> RecordChange | None:
            nonlocal over
            over = now.closed
            return ending(prefix, now, why, rendezvous_records.CLOSED)

        change_record(etcd, prefix, CLOSED_TTL, change, by=order.who, within=TimeLimit(timeout))
        if over:
            return _done(order, left=[f"it was over already: {over}"])
        return _done(order, [f"closed {order.job!r}: {why}"])

    return [f"close {order.job!r} for its {len(rounds.members())} nodes: each ends with an error"], act


def _stop(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """Have all ranks of a run stop at an agreed step: see `ftcoord.stop`."""
    prefix, keys = layout.run_prefix(key_prefix, order.job), _known_job(etcd, key_prefix, order.job)
    is_elastic = keys.quorum.arrangement() is not None
    if keys.rounds.is_empty and not is_elastic:
        raise NothingThere(f"{order.job!r} has no rendezvous or ftcoord.elastic, whose ranks could stop together")

    def act() -> Done:
        left, why = "", order.why("stop asked")
        if is_elastic:
            from ftcoord.coordination.replica import order_stop  # only here, as in `_kill`

            left = order_stop(etcd, keys.quorum.prefix, why, by=order.who, timeout=timeout)

        def change(now: RoundHead) -> RecordChange | None:
            nonlocal left
            left = rendezvous.why_not_stopped(now)
            return stopping(now, why)

        if not is_elastic:
            change_record(etcd, prefix, CLOSED_TTL, change, by=order.who, within=TimeLimit(timeout))
        if left:
            return _done(order, left=[left])
        return _done(order, [f"asked all ranks of {order.job!r} to stop at one agreed step: {why}"])

    return [f"have all ranks of {order.job!r} stop at one agreed step"], act


# -- kill -----------------------------------------------------------------------------------------------------------


def _kill(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """End the process of a replica's manager, and wait until its member is gone."""
    job, name, prefix = order.job, order.name, layout.quorum_prefix(key_prefix, order.job)
    found = {one.owner for one in members_called(read_job(etcd, key_prefix, job), name) if one.group == "quorums"}
    if len(found) > 1:
        raise ConfigError("REPLICA", name, f"it is the name of several: give one of {' or '.join(sorted(found)[:5])}")
    replica, why = next(iter(found - {""}), name), order.why("killed")

    def act() -> Done:
        from ftcoord.coordination.replica import order_kill  # only here: it brings what managers need

        try:
            record = ordered(etcd, prefix, f"{replica}: {why}", target=replica, by=order.who)
            order_kill(etcd, prefix, replica, why, concurrency.now() + order.wait, also=record)
        except NotInQuorum:
            raise NothingThere(
                f"no live replica of {job!r} is called {replica!r}: `ftcoord status` lists them"
            ) from None
        except TimeoutError as error:
            raise NothingThere(f"{replica!r} was not killed in time: {error}") from None
        return _done(order, [f"killed the manager of {replica!r}: {why}"])

    return [f"end the process of the manager of {replica!r} of {job!r}"], act
