"""Examines an etcd cluster: collects facts, which changes nothing in etcd but leases without keys, and judges them.

`examine` does the I/O, `findings` is pure. How fast etcd's disk is shows in the latency of a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import runs_span
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdNoSpace
from ftcoord.etcd.api import Compare, Get, MemberStatus, Put, WatchItem, newer_wanted
from ftcoord.etcd.client import EtcdClient
from ftcoord.operator.report import FORMAT, Examination, Finding

READS_TIMED, WRITES_TIMED = 5, 3
SHORT_TTL: Final = 10
"""Seconds of a lease that is granted to time a write, and revoked at once."""
OK, HINT, PROBLEM = LEVELS = "ok", "hint", "problem"
DEFAULT_QUOTA: Final = 2 * 1024**3
"""Bytes: etcd's default of `--quota-backend-bytes`, for versions that do not report it."""
ALMOST_FULL: Final = 0.8
"""The part of the quota above which a cluster counts as almost full."""
WASTE: Final = 256 * 1024**2
"""Bytes freed by compaction that defragmentation would give back."""
SLOW_READ, SLOW_WRITE = 0.1, 0.25
"""Seconds. A round takes some of each, one after the other."""
HOPELESS: Final = 1.0
"""Seconds. Writes that take as long count as lost, and are sent again."""
NO_SPACE: Final = "NOSPACE"


@dataclass(slots=True)
class EtcdFacts:
    """What was seen of an etcd cluster.

    Args:
        endpoints: of each endpoint that the user gave the status that it reported, or why it reported none.
        is_loopback: whether all of them are on this machine.
        has_tls, has_login: how the connection is made.
        key_prefix: the prefix of the jobs' keys.
        alarms: member ids and their alarms; None if the user may not see them.
        read_seconds, write_seconds: the latency of a linearizable read, and of a write through the log; None if there
            was none.
        cannot_read, cannot_write: why the user may not, below `key_prefix`; empty if it may.
        is_login_off: whether there is a user, but etcd requires no login.
        is_full: whether etcd refused a write for want of space.
        cannot_renew, cannot_watch: why no lease can be renewed, or no watch be opened; empty if that works, None if it
            was not tried.
    """

    endpoints: list[tuple[str, MemberStatus | str]]
    is_loopback: bool
    has_tls: bool
    has_login: bool
    key_prefix: str
    alarms: list[tuple[str, str]] | None = None
    read_seconds: float | None = None
    write_seconds: float | None = None
    cannot_read: str = ""
    cannot_write: str = ""
    is_login_off: bool = False
    is_full: bool = False
    cannot_renew: str | None = None
    cannot_watch: str | None = None

    @property
    def answering(self) -> list[tuple[str, MemberStatus]]:
        """The endpoints that answered, and their statuses."""
        return [(endpoint, status) for endpoint, status in self.endpoints if isinstance(status, MemberStatus)]


# -- collecting -----------------------------------------------------------------------------------------------------


def examine(config: EtcdConfig, key_prefix: str) -> EtcdFacts:
    """All facts that are available. Others are left out: a missing endpoint or permission is itself reported."""
    seen = [(str(at), _status(replace(config, endpoints=(at,)))) for at in config.endpoints]
    is_loopback = all(one.is_loopback for one in config.endpoints)
    facts = EtcdFacts(seen, is_loopback, config.tls is not None, config.credentials is not None, key_prefix)
    there = tuple(at for at, (_, found) in zip(config.endpoints, seen, strict=True) if isinstance(found, MemberStatus))
    if there:
        with EtcdClient(replace(config, endpoints=there)) as etcd:
            try:
                _call(etcd, facts)
            except EtcdError as error:
                facts.endpoints.append(("the cluster", str(error)))
    return facts


def _status(config: EtcdConfig) -> MemberStatus | str:
    with EtcdClient(config) as etcd:
        try:
            etcd.member_status()  # it connects, and logs in
            return etcd.member_status()
        except EtcdError as error:
            return str(error)


def _call(etcd: EtcdClient, facts: EtcdFacts) -> None:
    """What agents do: read, write, renew a lease, open a watch. Raises EtcdError."""
    facts.is_login_off = facts.has_login and not etcd.requires_login()
    with suppress(EtcdAuthError):
        facts.alarms = [*etcd.alarms()]
    jobs = runs_span(facts.key_prefix)
    try:
        facts.read_seconds = _timed(lambda: etcd.range(Get(jobs, limit=1, keys_only=True)), READS_TIMED)
    except EtcdAuthError as error:
        facts.cannot_read = str(error)
    try:
        # etcd checks the permission of a transaction whose guard fails, which writes nothing.
        etcd.txn([Compare(jobs.start, "version", "<", 0)], [Put(jobs.start, b"")])
        facts.write_seconds = _timed(lambda: etcd.revoke(etcd.grant(SHORT_TTL).id), WRITES_TIMED) / 2
    except EtcdNoSpace:
        facts.is_full = True
    except EtcdAuthError as error:
        facts.cannot_write = str(error)
    if facts.cannot_read:
        return
    # Renewals and watches are streams: what stands between a host and etcd may only pass calls.
    if facts.write_seconds is not None:
        lease, facts.cannot_renew = etcd.grant(SHORT_TTL).id, ""
        try:
            etcd.renew(lease)
        except EtcdError as error:
            facts.cannot_renew = str(error)
        etcd.revoke(lease)
    items: concurrency.Queue[WatchItem] = concurrency.inbox()
    watch = etcd.watch(jobs, 0, items.put)
    try:
        item = items.get(timeout=etcd.config.request_timeout)
        facts.cannot_watch = str(item) if isinstance(item, EtcdError) else ""
    except concurrency.Empty:
        facts.cannot_watch = f"etcd has not answered for {etcd.config.request_timeout:g} s"
    finally:
        watch.cancel()


def _timed(call: Callable[[], object], times: int) -> float:
    """The median of the seconds that a call takes; `times` is odd."""
    taken = []
    for _ in range(times):
        began = concurrency.now()
        call()
        taken.append(concurrency.now() - began)
    return sorted(taken)[times // 2]


# -- judging --------------------------------------------------------------------------------------------------------

_ok, _hint, _problem = (partial(Finding, level) for level in (OK, HINT, PROBLEM))


def findings(facts: EtcdFacts) -> Examination:
    """All findings, problems first."""
    checks = _reached, _members, _space, _speed, _security, _rights
    found = [one for check in checks for one in check(facts)]
    found.sort(key=lambda one: -LEVELS.index(one.level))
    return Examination(FORMAT, all(one.level != PROBLEM for one in found), tuple(found))


def _reached(facts: EtcdFacts) -> Iterator[Finding]:
    for endpoint, found in facts.endpoints:
        if isinstance(found, str):
            do = "start that member, or take it out of the list; check that the TLS settings fit it"
            yield _problem(f"endpoint {endpoint}", found, do)
        else:
            yield _ok(f"endpoint {endpoint}", f"answers in {_ms(found.seconds)}")
    if len(facts.endpoints) == 1 and not facts.is_loopback:
        do = "give all members of the cluster, so that a job outlives the loss of this one"
        yield _hint("endpoints", "only one is given", do)


def _members(facts: EtcdFacts) -> Iterator[Finding]:
    leaders = sorted({status.leader_id for _, status in facts.answering} - {""})
    for endpoint, status in facts.answering:
        about = f"member {endpoint}"
        if not status.leader_id:
            yield _problem(about, "has no leader", "restart a majority of the members: etcd neither reads nor writes")
        if status.is_learner:
            yield _hint(about, "is a learner", "promote it, or do not give it as an endpoint")
        yield from (_problem(about, error, "read its log") for error in status.errors if NO_SPACE not in error)
    if len(leaders) > 1:
        do = "give the endpoints of one cluster only: each cluster has its own order of events"
        yield _problem("leader", f"the endpoints have several: {', '.join(leaders)}", do)
    elif leaders:
        yield _ok("leader", f"{leaders[0]}, term {max(status.raft_term for _, status in facts.answering)}")
    versions = {status.version for _, status in facts.answering}
    for version in sorted(versions):
        bugs = f"{version} has known lease and watch bugs"
        wanted = newer_wanted(version)
        yield _hint("release", bugs, f"use {wanted} or newer") if wanted else _ok("release", version)
    if len(versions) > 1:
        yield _hint("release", "the members have several", "finish the upgrade")
    if facts.alarms is None and facts.answering:
        do = "look with a user that may: `etcdctl --user root alarm list`"
        yield _hint("alarms", "this user may not see them", do)
    replace_it = "replace that member by an empty one: its data differs from the others'"
    for member, name in facts.alarms or ():
        if name != NO_SPACE:  # see `_space`
            do = replace_it if name == "CORRUPT" else "look at `etcdctl alarm list`"
            yield _problem("alarm", f"member {member} raises {name}", do)


def _space(facts: EtcdFacts) -> Iterator[Finding]:
    reported = [error for _, status in facts.answering for error in status.errors]
    if facts.is_full or any(NO_SPACE in one for one in (*reported, *(name for _, name in facts.alarms or ()))):
        # etcd before 3.6 does not report its quota; one that is full below the default has another.
        sizes = [
            f"{endpoint} has {_mib(one.db_size)} of {_mib(one.db_quota) if one.db_quota else 'an unknown quota'}"
            for endpoint, one in facts.answering
        ]
        do = "make room: `etcdctl compact REVISION`, `etcdctl defrag` for each member, then `etcdctl alarm disarm`"
        yield _problem("space", f"is used up (NOSPACE): {', '.join(sizes)}", f"{do}; until then no job can write")
        return
    for endpoint, status in facts.answering:
        about, quota, is_known = f"database {endpoint}", status.db_quota or DEFAULT_QUOTA, status.db_quota > 0
        size = f"{_mib(status.db_size)} of {_mib(quota)}{'' if is_known else ' (if the quota is the default)'}"
        free = status.db_size - status.db_size_in_use
        if status.db_size > ALMOST_FULL * quota:
            do = "compact and defragment, or raise --quota-backend-bytes: a full etcd takes no writes"
            yield Finding(PROBLEM if is_known else HINT, about, size, do)
        elif free > WASTE:
            yield _hint(about, f"{size}, {_mib(free)} of it free", "`etcdctl defrag`, one by one")
        else:
            yield _ok(about, size)


def _speed(facts: EtcdFacts) -> Iterator[Finding]:
    slow_network = "check the network between here and etcd, and etcd's CPU"
    slow_disk = "give etcd's log a fast disk of its own: each write waits for its fsync"
    for what, seconds, slow, do in (
        ("read", facts.read_seconds, SLOW_READ, slow_network),
        ("write", facts.write_seconds, SLOW_WRITE, slow_disk),
    ):
        if seconds is not None:
            level = PROBLEM if seconds >= HOPELESS else HINT if seconds >= slow else OK
            yield Finding(level, f"{what} latency", _ms(seconds), do if level != OK else "")


def _security(facts: EtcdFacts) -> Iterator[Finding]:
    if facts.has_tls or facts.is_loopback:
        yield _ok("TLS", "is on" if facts.has_tls else "is off, on this machine only")
    else:
        do = "use https:// endpoints and --ca-cert: anyone on this network may read and change jobs"
        yield _hint("TLS", "is off", do)
    if facts.is_login_off:
        do = "switch them on (`etcdctl auth enable`), or leave out the user"
        yield _hint("login", "logins are off: anyone who reaches etcd may write; your user is ignored", do)
    elif not facts.has_login and not facts.is_loopback:
        do = "if etcd has no users, anyone who reaches it may end jobs: give jobs a user and a role of their own"
        yield _hint("login", "there is none", do)


def _rights(facts: EtcdFacts) -> Iterator[Finding]:
    role = f"grant it: `etcdctl role grant-permission ROLE --prefix readwrite {facts.key_prefix}/`"
    rights = ("read", facts.cannot_read, facts.read_seconds), ("write", facts.cannot_write, facts.write_seconds)
    for what, problem, seconds in rights:
        if problem:
            yield _problem(f"right to {what}", f"not below {facts.key_prefix}: {problem}", role)
        elif seconds is not None:
            yield _ok(f"right to {what}", f"below {facts.key_prefix}")
    do = "agents need it: if there is a proxy between this host and etcd, give the addresses of etcd's members"
    for about, works, fault in (
        ("lease", "was renewed", facts.cannot_renew),
        ("watch", "was confirmed", facts.cannot_watch),
    ):
        if fault is not None:
            yield _problem(about, f"none {works}: {fault}", do) if fault else _ok(about, works)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"
