"""Findings about an etcd cluster, and what to do about them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ftcoord.etcd.api import MemberStatus, newer_wanted
from ftcoord.operator.told import FORMAT, Examination, Finding

OK, HINT, PROBLEM = "ok", "hint", "problem"
DEFAULT_QUOTA: Final = 2 * 1024**3
"""Bytes: etcd's default of `--quota-backend-bytes`, for versions that do not report it."""
ALMOST_FULL: Final = 0.8
"""The part of the quota above which a cluster counts as almost full."""
WASTE: Final = 256 * 1024**2
"""Bytes freed by compaction that defragmentation would give back."""
SLOW_READ, SLOW_WRITE = 0.1, 0.25
"""Seconds. A round takes some of each, one after the other."""
SLOW_FSYNC: Final = 0.016
"""Seconds: etcd wants 99 of 100 fsyncs within 10 ms; its buckets are 8 and 16 ms."""
CLOCKS_DIFFER: Final = 3.0
"""Seconds. HTTP reports whole ones."""
HOPELESS: Final = 1.0
"""Seconds. Writes that take as long count as lost, and are sent again."""


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """An endpoint, and the status that it reported, or why it reported none.

    Args:
        fsync_seconds: 99 of 100 fsyncs of its log took no longer; infinite if more than 1 of 100 exceeded its highest
            bucket; None if it does not report them.
        clock_ahead: seconds that its clock is ahead of this host's; None if it does not report it.
    """

    endpoint: str
    status: MemberStatus | None
    error: str = ""
    fsync_seconds: float | None = None
    clock_ahead: float | None = None


@dataclass(frozen=True, slots=True)
class EtcdFacts:
    """What was seen of an etcd cluster.

    Args:
        endpoints: the facts of each endpoint that the user gave.
        is_loopback: whether all of them are on this machine.
        has_tls, has_login: how the connection is made.
        is_login_off: whether there is a user, but etcd requires no login.
        is_full: whether etcd refused a write for want of space.
        key_prefix: the prefix of the jobs' keys.
        alarms: member ids and their alarms; None if the user may not see them.
        read_seconds, write_seconds: the latency of a linearizable read, and of a write through the log; None if there
            was none.
        cannot_read, cannot_write: why the user may not, below `key_prefix`; empty if it may.
        cannot_renew, cannot_watch: why no lease can be renewed, or no watch be opened; empty if that works, None if it
            was not tried.
    """

    endpoints: Sequence[EndpointFacts]
    is_loopback: bool
    has_tls: bool
    has_login: bool
    key_prefix: str
    alarms: Sequence[tuple[str, str]] | None = None
    read_seconds: float | None = None
    write_seconds: float | None = None
    cannot_read: str = ""
    cannot_write: str = ""
    is_login_off: bool = False
    is_full: bool = False
    cannot_renew: str | None = None
    cannot_watch: str | None = None


def findings(facts: EtcdFacts) -> Examination:
    """All findings, problems first."""
    found = [
        *_reached(facts),
        *_members(facts),
        *_releases(facts),
        *_alarms(facts),
        *_space(facts),
        *_speed(facts),
        *_security(facts),
        *_rights(facts),
        *_calls_of_agents(facts),
        *_fsync(facts),
        *_clocks(facts),
    ]
    found.sort(key=lambda one: (PROBLEM, HINT, OK).index(one.level))
    return Examination(FORMAT, all(one.level != PROBLEM for one in found), tuple(found))


_ALARM: Final = "look at `etcdctl alarm list`"
_NO_SPACE: Final = "NOSPACE"
_ALARMS: Final = {
    "CORRUPT": "replace that member by an empty one: its data differs from the others'",
}


def _alarms(facts: EtcdFacts) -> Iterator[Finding]:
    if facts.alarms is None and _answering(facts):
        do = "look with a user that may: `etcdctl --user root alarm list`"
        yield Finding(HINT, "alarms", "this user may not see them", do)
    for member, name in facts.alarms or ():
        if name == _NO_SPACE:  # see `_space`
            continue
        yield Finding(PROBLEM, "alarm", f"member {member} raises {name}", _ALARMS.get(name, _ALARM))


def _answering(facts: EtcdFacts) -> list[tuple[str, MemberStatus]]:
    return [(one.endpoint, one.status) for one in facts.endpoints if one.status is not None]


def _reached(facts: EtcdFacts) -> Iterator[Finding]:
    for one in facts.endpoints:
        if one.status is None:
            do = "start that member, or take it out of the list; see that TLS settings fit it"
            yield Finding(PROBLEM, f"endpoint {one.endpoint}", one.error, do)
        else:
            yield Finding(OK, f"endpoint {one.endpoint}", f"answers in {_ms(one.status.seconds)}")
    if len(facts.endpoints) == 1 and not facts.is_loopback:
        do = "give all members of the cluster, so that a job outlives the loss of this one"
        yield Finding(HINT, "endpoints", "only one is given", do)


def _members(facts: EtcdFacts) -> Iterator[Finding]:
    answering = _answering(facts)
    leaders = {status.leader_id for _, status in answering} - {""}
    for endpoint, status in answering:
        if not status.leader_id:
            do = "bring back a majority of the members: nothing can be read or written"
            yield Finding(PROBLEM, f"member {endpoint}", "knows no leader", do)
        if status.is_learner:
            yield Finding(HINT, f"member {endpoint}", "is a learner", "promote it, or do not give it as an endpoint")
        for error in status.errors:
            if _NO_SPACE in error:
                continue
            yield Finding(PROBLEM, f"member {endpoint}", error, "look into its log")
    if len(leaders) > 1:
        do = "give the endpoints of one cluster: a job that uses several has no one order of events"
        yield Finding(PROBLEM, "leader", f"the endpoints name several: {', '.join(sorted(leaders))}", do)
    elif leaders:
        yield Finding(OK, "leader", f"{min(leaders)}, term {max(status.raft_term for _, status in answering)}")


def _releases(facts: EtcdFacts) -> Iterator[Finding]:
    versions = {status.version for _, status in _answering(facts)}
    for version in sorted(versions):
        wanted = newer_wanted(version)
        if wanted is None:
            yield Finding(OK, "release", version)
        else:
            yield Finding(HINT, "release", f"{version} has known lease and watch bugs", f"use {wanted} or newer")
    if len(versions) > 1:
        yield Finding(HINT, "release", "the members have several", "finish the upgrade")


def _is_full(facts: EtcdFacts) -> bool:
    told = [error for _, status in _answering(facts) for error in status.errors]
    return facts.is_full or any(_NO_SPACE in one for one in (*told, *(name for _, name in facts.alarms or ())))


def _full(facts: EtcdFacts) -> Finding:
    """etcd before 3.6 does not report its quota; one that is full below the default has another."""
    sizes = [
        f"{endpoint} has {_mib(status.db_size)} of {_mib(status.db_quota) if status.db_quota else 'an unknown quota'}"
        for endpoint, status in _answering(facts)
    ]
    do = (
        "make room: `etcdctl compact REVISION`, `etcdctl defrag` for each member, then `etcdctl alarm disarm`; until"
        " then no job can write"
    )
    return Finding(PROBLEM, "space", f"is used up (NOSPACE): {', '.join(sizes)}", do)


def _space(facts: EtcdFacts) -> Iterator[Finding]:
    if _is_full(facts):
        yield _full(facts)
        return
    for endpoint, status in _answering(facts):
        quota, is_known = status.db_quota or DEFAULT_QUOTA, status.db_quota > 0
        said = f"{_mib(status.db_size)} of {_mib(quota)}{'' if is_known else ' (if the quota is the default)'}"
        if status.db_size > ALMOST_FULL * quota:
            do = "compact and defragment, or raise --quota-backend-bytes: a full etcd takes no writes"
            yield Finding(PROBLEM if is_known else HINT, f"database {endpoint}", said, do)
        elif status.db_size - status.db_size_in_use > WASTE:
            free = _mib(status.db_size - status.db_size_in_use)
            yield Finding(HINT, f"database {endpoint}", f"{said}, {free} of it free", "`etcdctl defrag`, one by one")
        else:
            yield Finding(OK, f"database {endpoint}", said)


def _speed(facts: EtcdFacts) -> Iterator[Finding]:
    measured = (
        ("read", facts.read_seconds, SLOW_READ, "look at the network between here and etcd, and at etcd's CPU"),
        ("write", facts.write_seconds, SLOW_WRITE, "give etcd's log a disk of its own: a write waits for its fsync"),
    )
    for what, seconds, slow, do in measured:
        if seconds is None:
            continue
        level = PROBLEM if seconds >= HOPELESS else HINT if seconds >= slow else OK
        yield Finding(level, f"{what} latency", _ms(seconds), do if level != OK else "")


def _fsync(facts: EtcdFacts) -> Iterator[Finding]:
    told = [(one.endpoint, one.fsync_seconds) for one in facts.endpoints if one.fsync_seconds is not None]
    if not told and _answering(facts):
        yield Finding(OK, "fsync latency", "not known: no endpoint tells its numbers at /metrics")
    for endpoint, seconds in told:
        if math.isinf(seconds):
            said = "more than 1 of 100 took longer than it counts (some seconds) since it was started"
        else:
            said = f"99 of 100 took at most {_ms(seconds)} since it was started"
        slow = seconds > SLOW_FSYNC
        do = "give etcd's log a fast disk of its own: each write waits for its fsync" if slow else ""
        yield Finding(HINT if slow else OK, f"fsync latency {endpoint}", said, do)


def _clocks(facts: EtcdFacts) -> Iterator[Finding]:
    """No decision depends on clocks; but the times that people read do."""
    told = [(one.endpoint, one.clock_ahead) for one in facts.endpoints if one.clock_ahead is not None]
    rests = "only times that people read rest on clocks"
    if not told:
        yield Finding(OK, "clocks", f"not compared: no endpoint tells its time; {rests}")
        return
    off = [(endpoint, ahead) for endpoint, ahead in told if abs(ahead) > CLOCKS_DIFFER]
    for endpoint, ahead in off:
        said = f"that of {endpoint} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's"
        do = "have both set by NTP: times in histories and logs are hard to compare, and certificates may not count"
        yield Finding(HINT, "clocks", said, do)
    if not off:
        those = ", ".join(endpoint for endpoint, _ in told)
        yield Finding(OK, "clocks", f"this host's agrees with {those} within {CLOCKS_DIFFER:.0f} s; {rests}")


def _security(facts: EtcdFacts) -> Iterator[Finding]:
    if facts.has_tls:
        yield Finding(OK, "TLS", "is on")
    elif facts.is_loopback:
        yield Finding(OK, "TLS", "is off, on this machine only")
    else:
        do = "use https:// endpoints and --ca-cert: whoever is on this network may read and change jobs"
        yield Finding(HINT, "TLS", "is off", do)
    if facts.is_login_off:
        do = "switch them on (`etcdctl auth enable`), or leave out the user"
        yield Finding(HINT, "login", "logins are off: anyone who reaches etcd may write; your user is ignored", do)
    elif not facts.has_login and not facts.is_loopback:
        do = "if etcd has no users, whoever reaches it may end jobs: give jobs a user and a role of their own"
        yield Finding(HINT, "login", "there is none", do)


def _rights(facts: EtcdFacts) -> Iterator[Finding]:
    role = f"grant it: `etcdctl role grant-permission ROLE --prefix readwrite {facts.key_prefix}/`"
    rights = (("read", facts.cannot_read, facts.read_seconds), ("write", facts.cannot_write, facts.write_seconds))
    for what, problem, seconds in rights:
        if problem:
            yield Finding(PROBLEM, f"right to {what}", f"not below {facts.key_prefix}: {problem}", role)
        elif seconds is not None:
            yield Finding(OK, f"right to {what}", f"below {facts.key_prefix}")


def _calls_of_agents(facts: EtcdFacts) -> Iterator[Finding]:
    do = "agents need it: if something stands between this host and etcd, name etcd's members themselves"
    tried = (("lease", "is renewed", facts.cannot_renew), ("watch", "is confirmed", facts.cannot_watch))
    for about, works, problem in tried:
        if problem:
            yield Finding(PROBLEM, about, f"not one {works}: {problem}", do)
        elif problem is not None:
            yield Finding(OK, about, works)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"
