"""Operators' orders, from the command line or the dashboard: the target is found by name, and the result reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ftcoord import concurrency
from ftcoord.core.layout import quorum_prefix, run_prefix
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, parse_decided, parse_join_request
from ftcoord.errors import ConfigError, FtcoordError, NotInQuorum, StateError
from ftcoord.escaping import counted
from ftcoord.etcd.api import Etcd, EtcdCalls
from ftcoord.operator.acting import close_run, drain_nodes, evict
from ftcoord.operator.job_keys import GroupKeys, JobKeys
from ftcoord.operator.naming import NamedMember, members_called, owners
from ftcoord.operator.reading import read_job
from ftcoord.operator.told import FORMAT, Done, no_such_job
from ftcoord.primitives.group.events import ordered


class NothingThere(FtcoordError):
    """The order has no target, or was not carried out."""


def because(what: str, reason: str | None) -> str:
    """What was done, with the given reason."""
    return f"{what}: {reason}" if reason else what


def find_members(etcd: EtcdCalls, key_prefix: str, job: str, name: str) -> list[NamedMember]:
    """The members that a name refers to, all of one owner. Raises NothingThere, ConfigError if the name matches several
    owners, and EtcdError."""
    return _find(_known_job(etcd, key_prefix, job), job, name)


def _find(keys: JobKeys, job: str, name: str) -> list[NamedMember]:
    members = members_called(keys, name)
    if not members:
        raise NothingThere(f"no live member of {job!r} is called {name!r}: `ftcoord status` shows who is there")
    if len(owners(members)) > 1:
        listed = " or ".join(f"{one.id} ({one.owner})" for one in members[:5])
        raise ConfigError("NODE", name, f"it is the name of several: give the member id of {listed}")
    return members


def evict_members(etcd: EtcdCalls, job: str, members: Sequence[NamedMember], cause: str, by: str) -> Done:
    """Revoke the leases of members of a job. Raises EtcdError."""
    did, left = list[str](), list[str]()
    for one in members:
        if evict(etcd, one, cause, by):
            did.append(f"evicted {one}: the others go on; a process that lives comes back as a new member")
        else:
            left.append(f"{one} was gone already")
    return Done(FORMAT, job, tuple(did), tuple(left))


def find_leavers(etcd: EtcdCalls, key_prefix: str, job: str, name: str, *, force: bool) -> list[JoinRequest]:
    """The requests of the members of a node that is to leave a run, oldest first.

    Args:
        force: also if fewer nodes would stay than a round needs.

    Raises NothingThere, also if too few would stay; ConfigError if the name matches several nodes, or a replica;
    StateError and EtcdError.
    """
    keys = _known_job(etcd, key_prefix, job)
    members, rounds = _find(keys, job, name), keys.rounds
    if members[0].group != "rendezvous":
        raise ConfigError("NODE", name, "it is a replica of a quorum, which has no rounds to leave: `ftcoord kill` it")
    asks = [parse_join_request(one.kv.key, one.kv.value) for one in members]
    now = parse_decided(rounds.decided.key, rounds.decided.value) if rounds.decided is not None else NO_ROUND
    limits = now.limits if now.limits != NO_ROUND.limits else asks[0].limits
    stay = {ask.node for ask in _asks(rounds) if ask.limits == limits and not ask.leaving}
    stay -= {*now.drained, *(ask.node for ask in asks)}
    if len(stay) < limits[0] and not force:
        raise NothingThere(
            f"{len(stay)} of at least {counted(limits[0], 'node')} would be left of {job!r}, which would stand still:"
            " start another node first, or force it (--force)"
        )
    return asks


def _asks(rounds: GroupKeys) -> Iterator[JoinRequest]:
    """The requests of all members whose keys can be read."""
    for kv in rounds.members():
        with contextlib.suppress(StateError):
            yield parse_join_request(kv.key, kv.value)


def drain(
    etcd: EtcdCalls, key_prefix: str, job: str, name: str, reason: str, by: str, timeout: float, *, force: bool
) -> Done:
    """Have a node leave a run, within `timeout` seconds for each request. Its history records `by` whom.

    Whether enough nodes stay is checked after the record to be replaced was read: so of two operators who drain at the
    same moment, the second one sees what the first one did.

    Raises what `find_leavers` raises.
    """
    node = ""

    def leavers() -> list[JoinRequest]:
        nonlocal node
        asks = find_leavers(etcd, key_prefix, job, name, force=force)
        node = f"{asks[0].node} on {asks[0].host}"
        return asks

    if why := drain_nodes(etcd, run_prefix(key_prefix, job), leavers, reason, by, timeout):
        return Done(FORMAT, job, (), (f"{node}: {why}",))
    return Done(FORMAT, job, (f"drained {node}: it leaves as soon as its agent has stopped its workers",))


def nodes_of_run(etcd: EtcdCalls, key_prefix: str, job: str) -> int:
    """How many nodes a run that may be closed has. Raises NothingThere and EtcdError."""
    keys = _known_job(etcd, key_prefix, job)
    if keys.rounds.is_empty:
        raise NothingThere(f"{job!r} has no rendezvous to close: replicas of quorums end one by one: `ftcoord kill`")
    return len(keys.rounds.members())


def close_job(etcd: EtcdCalls, key_prefix: str, job: str, reason: str, by: str, timeout: float) -> Done:
    """End a run for all of its nodes, within `timeout` seconds for each request. Its history records `by` whom.

    Raises StateError and EtcdError.
    """
    over = close_run(etcd, run_prefix(key_prefix, job), reason, by, timeout)
    if over:
        return Done(FORMAT, job, (), (f"it was over already: {over}",))
    return Done(FORMAT, job, (f"closed {job!r}: {reason}",))


def replica_called(etcd: EtcdCalls, key_prefix: str, job: str, name: str) -> str:
    """The id of the replica that a name refers to; the name itself if there is none. Raises ConfigError if the name
    matches several replicas, and EtcdError."""
    found = {one.owner for one in members_called(read_job(etcd, key_prefix, job), name) if one.group == "quorums"}
    if len(found) > 1:
        raise ConfigError("REPLICA", name, f"it is the name of several: give one of {' or '.join(sorted(found)[:5])}")
    return next(iter(found - {""}), name)


def kill_replica(etcd: Etcd, key_prefix: str, job: str, replica: str, message: str, wait: float, by: str) -> Done:
    """End the process of a replica's manager, and wait at most `wait` seconds until its member is gone.

    Raises NothingThere and EtcdError.
    """
    from ftcoord.coordination.kills import order_kill  # only here: it brings what managers need

    try:
        prefix = quorum_prefix(key_prefix, job)
        told = ordered(etcd, prefix, f"{replica}: {message}", target=replica, by=by)
        order_kill(etcd, prefix, replica, message, concurrency.now() + wait, also=told)
    except NotInQuorum:
        raise NothingThere(f"no live replica of {job!r} is called {replica!r}: `ftcoord status` shows them") from None
    except TimeoutError as error:
        raise NothingThere(f"{replica!r} was not killed in time: {error}") from None
    return Done(FORMAT, job, (f"killed the manager of {replica!r}: {message}",))


def _known_job(etcd: EtcdCalls, key_prefix: str, job: str) -> JobKeys:
    keys = read_job(etcd, key_prefix, job)
    if not keys.exists:
        raise NothingThere(no_such_job(job))
    return keys
