"""Operators' orders, from the command line or the dashboard: the target is found by name, the order is one guarded
transaction, and the result is reported.

`planned` finds the target of any of them, so that it can be shown before anything is done. `by` is who gives an order:
the job's history records it. `timeout` is in seconds, for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from ftcoord.primitives.group.decided_record import ordered
from ftcoord.rendezvous.record_change import RecordChange, change_record, draining, ending

CLOSED_TTL: Final = 3600
"""Seconds that the record of a run that never had one lives: the agents' default."""


class NothingThere(FtcoordError):
    """The order has no target, or was not carried out."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order.

    Args:
        what: evict, drain, close or kill.
        job: the job.
        name: the member, node or replica; empty to close the job.
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


Planned: TypeAlias = tuple[Sequence[str], Callable[[], Done]]
"""What an order does, each a line, and the function that does it, which raises what the functions below raise."""


def planned(etcd: Etcd, key_prefix: str, order: Order, timeout: float) -> Planned:
    """Find the target of an order. Raises NothingThere, ConfigError if the name matches several, StateError and
    EtcdError."""
    job, name, of = order.job, order.name, (etcd, key_prefix, order.job)
    if order.what == "evict":
        members, why = find_members(*of, name), order.why("evicted")
        about = [f"evict {one} from {job!r}" for one in members]
        return about, lambda: evict_members(etcd, job, members, why, order.who)
    if order.what == "drain":
        leaver, why = find_leavers(*of, name, force=order.force)[0], order.why("was drained")
        # By its node: others may have gone, and a round may have begun, while the user thought about it.
        by_node = partial(drain, *of, leaver.node, why, order.who, timeout, force=order.force)
        return [f"have {leaver.node} on {leaver.host} leave {job!r}"], by_node
    if order.what == "close":
        rounds, why = _known_job(*of).rounds, order.why("closed")
        if rounds.is_empty:
            raise NothingThere(f"{job!r} has no rendezvous to close; its replicas end one by one: `ftcoord kill`")
        about = [f"close {job!r} for its {len(rounds.members())} nodes: each ends with an error"]
        return about, lambda: close_job(*of, why, order.who, timeout)
    found = {one.owner for one in members_called(read_job(*of), name) if one.group == "quorums"}
    if len(found) > 1:
        raise ConfigError("REPLICA", name, f"it is the name of several: give one of {' or '.join(sorted(found)[:5])}")
    replica, why = next(iter(found - {""}), name), order.why("killed")
    about = [f"end the process of the manager of {replica!r} of {job!r}"]
    return about, lambda: kill_replica(*of, replica, why, order.wait, order.who)


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
        where = f" on {self.host}" if self.host else ""
        return f"{self.owner}{where} (member {self.id} of the {self.group})"


def members_called(keys: JobKeys, name: str) -> list[NamedMember]:
    """The members with this member id, node id, replica id or host, oldest first.

    A host may be named without the pid of its agent. A replica that has torchft's id, `name:uuid`, may be named without
    the uuid, or by its beginning; never by a part of the name, since `train_1` is not `train_10`.
    """
    members, begins = [*_named_members(keys)], name if ":" in name else f"{name}:"
    found = [one for one in members if name in (one.id, one.owner, one.host, one.host.partition(" (pid ")[0]) and name]
    return found or [one for one in members if one.group == "quorums" and one.owner.startswith(begins) and name]


def owners(members: Sequence[NamedMember]) -> set[tuple[str, str]]:
    """The owners of these members. An owner may have several leases; several owners may share a host's name."""
    return {(one.group, one.owner) for one in members}


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


def _find(etcd: Etcd, key_prefix: str, job: str, name: str) -> tuple[JobKeys, list[NamedMember]]:
    """A job, and its members that a name refers to, all of one owner."""
    keys = _known_job(etcd, key_prefix, job)
    members = members_called(keys, name)
    if not members:
        raise NothingThere(f"no live member of {job!r} is called {name!r}: `ftcoord status` lists the members")
    if len(owners(members)) > 1:
        listed = " or ".join(f"{one.id} ({one.owner})" for one in members[:5])
        raise ConfigError("NODE", name, f"it is the name of several: give the member id of {listed}")
    return keys, members


def _known_job(etcd: Etcd, key_prefix: str, job: str) -> JobKeys:
    keys = read_job(etcd, key_prefix, job)
    if not keys.exists:
        raise NothingThere(no_such_job(job))
    return keys


# -- evict ----------------------------------------------------------------------------------------------------------


def find_members(etcd: Etcd, key_prefix: str, job: str, name: str) -> list[NamedMember]:
    """The members that a name refers to, all of one owner. Raises NothingThere, ConfigError if the name matches several
    owners, and EtcdError."""
    return _find(etcd, key_prefix, job, name)[1]


def evict_members(etcd: Etcd, job: str, members: Sequence[NamedMember], cause: str, by: str) -> Done:
    """Revoke the leases of members of a job; `cause` is written about each, such as `evicted by ann@desk: too slow`.

    Raises EtcdError; OutcomeUnknown if a cause is written and the lease may live. It may be called again.
    """
    did, left = list[str](), list[str]()
    for one in members:
        if _evict(etcd, one, cause, by):
            did.append(f"evicted {one}: the others go on; a process that lives comes back as a new member")
        else:
            left.append(f"{one} was gone already")
    return Done(FORMAT, job, tuple(did), tuple(left))


def _evict(etcd: Etcd, member: NamedMember, cause: str, by: str) -> bool:
    """Returns whether the member was still there.

    The cause is written first: without it, the others would give the member time to come back to its seat.
    """
    grave, who = etcd.grant(death_records.REMEMBERED_FOR), member.host or member.owner
    cause = f"{who} was {cause}"
    death = death_records.encode(death_records.Death(cause, int(concurrency.wall() * 1000)))
    put = Put(layout.death_key(member.prefix, member.id), death, grave.id)
    is_there = Compare(member.kv.key, "lease", "=", member.kv.lease)
    if not etcd.txn([is_there], [put, *ordered(etcd, member.prefix, cause, target=who, by=by)]).succeeded:
        etcd.revoke(grave.id)
        return False
    try:
        etcd.revoke(member.kv.lease)
    except EtcdError as error:
        raise OutcomeUnknown(
            f"the cause of {member} is written, but its lease may still live: evict it again: {error}"
        ) from None
    return True


# -- drain and close ------------------------------------------------------------------------------------------------


def find_leavers(etcd: Etcd, key_prefix: str, job: str, name: str, *, force: bool) -> list[JoinRequest]:
    """The requests of the members of a node that is to leave a run, oldest first.

    Args:
        force: also if fewer nodes would stay than a round needs.

    Raises NothingThere, also if too few would stay; ConfigError if the name matches several nodes, or a replica;
    StateError and EtcdError.
    """
    keys, members = _find(etcd, key_prefix, job, name)
    if members[0].group != "rendezvous":
        raise ConfigError("NODE", name, "it is a replica of a quorum, which has no rounds to leave: `ftcoord kill` it")
    asks = [parse_join_request(one.kv.key, one.kv.value) for one in members]
    decided = keys.rounds.decided
    now = parse_decided(decided.key, decided.value) if decided is not None else NO_ROUND
    limits = now.limits if now.limits != NO_ROUND.limits else asks[0].limits
    live = [ask for ask in map(_ask_of, keys.rounds.members()) if ask is not None]
    stay = {ask.node for ask in live if ask.limits == limits}
    stay -= {*now.drained, *(ask.node for ask in asks)}
    if len(stay) < limits[0] and not force:
        raise NothingThere(
            f"{len(stay)} of at least {counted(limits[0], 'node')} would be left of {job!r}, too few for a round:"
            " start another node first, or force it (--force)"
        )
    return asks


def drain(
    etcd: Etcd, key_prefix: str, job: str, name: str, reason: str, by: str, timeout: float, *, force: bool
) -> Done:
    """Have a node leave a run; `reason` is written about it, after the name of its host. It and the others learn of it
    at once, with the record.

    Whether enough nodes stay is checked after the record to be replaced was read: so of two operators who drain at the
    same moment, the second one sees what the first one did.

    Raises what `find_leavers` raises.
    """
    node = why = ""

    def change(now: RoundHead) -> RecordChange | None:
        nonlocal node, why
        asks = find_leavers(etcd, key_prefix, job, name, force=force)
        node, why = f"{asks[0].node} on {asks[0].host}", rendezvous.why_not_drained(now, asks)
        return draining(now, asks, reason)

    change_record(etcd, layout.run_prefix(key_prefix, job), CLOSED_TTL, change, by=by, within=TimeLimit(timeout))
    if why:
        return Done(FORMAT, job, (), (f"{node}: {why}",))
    return Done(FORMAT, job, (f"drained {node}: it leaves as soon as its agent has stopped its workers",))


def close_job(etcd: Etcd, key_prefix: str, job: str, reason: str, by: str, timeout: float) -> Done:
    """End a run for all of its nodes. Raises StateError if the record is not ftcoord's, and EtcdError."""
    over, prefix = "", layout.run_prefix(key_prefix, job)

    def change(now: RoundHead) -> RecordChange | None:
        nonlocal over
        over = now.closed
        return ending(prefix, now, reason, rendezvous_records.CLOSED, speaks=True)

    change_record(etcd, prefix, CLOSED_TTL, change, by=by, within=TimeLimit(timeout))
    if over:
        return Done(FORMAT, job, (), (f"it was over already: {over}",))
    return Done(FORMAT, job, (f"closed {job!r}: {reason}",))


# -- kill -----------------------------------------------------------------------------------------------------------


def kill_replica(etcd: Etcd, key_prefix: str, job: str, replica: str, message: str, wait: float, by: str) -> Done:
    """End the process of a replica's manager, and wait at most `wait` seconds until its member is gone.

    Raises NothingThere and EtcdError.
    """
    from ftcoord.coordination.kills import order_kill  # only here: it brings what managers need

    prefix = layout.quorum_prefix(key_prefix, job)
    try:
        record = ordered(etcd, prefix, f"{replica}: {message}", target=replica, by=by)
        order_kill(etcd, prefix, replica, message, concurrency.now() + wait, also=record)
    except NotInQuorum:
        raise NothingThere(f"no live replica of {job!r} is called {replica!r}: `ftcoord status` lists them") from None
    except TimeoutError as error:
        raise NothingThere(f"{replica!r} was not killed in time: {error}") from None
    return Done(FORMAT, job, (f"killed the manager of {replica!r}: {message}",))
