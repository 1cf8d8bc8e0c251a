"""Examines an etcd cluster. This changes nothing in etcd but leases without keys.

Each check yields what it finds, at once: a missing endpoint or permission is itself a finding. How fast etcd's disk is
shows in the latency of a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import runs_span
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdNoSpace
from ftcoord.etcd.api import Compare, Get, MemberStatus, Put, Span, WatchItem, newer_wanted
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


def _finding(level: str, about: str, found: str, do: str = "") -> Finding:
    return {"level": level, "about": about, "found": found, "do": do}


_ok, _hint, _problem = (partial(_finding, level) for level in LEVELS)
Answering = Mapping[str, MemberStatus]
"""What the endpoints that answer report of their members."""


def examine(config: EtcdConfig, key_prefix: str) -> tuple[Examination, bool]:
    """All findings, problems first; and whether any endpoint answers."""
    found, answering, there = list[Finding](), dict[str, MemberStatus](), []
    for at in config.endpoints:
        try:
            with EtcdClient(replace(config, endpoints=(at,))) as etcd:
                etcd.member_status()  # it connects, and logs in
                status = answering[str(at)] = etcd.member_status()
            there.append(at)
            found.append(_ok(f"endpoint {at}", f"answers in {_ms(status.seconds)}"))
        except EtcdError as error:
            do = "start that member, or take it out of the list; check that the TLS settings fit it"
            found.append(_problem(f"endpoint {at}", str(error), do))
    found += _connection(config)
    if there:
        with EtcdClient(replace(config, endpoints=tuple(there))) as etcd:
            try:
                found += _cluster(etcd, answering, key_prefix, has_login=config.credentials is not None)
            except EtcdError as error:
                found.append(_problem("the cluster", str(error), "check that it has a leader, and try again"))
    found.sort(key=lambda one: -LEVELS.index(one["level"]))
    healthy = all(one["level"] != PROBLEM for one in found)
    return {"format": FORMAT, "healthy": healthy, "findings": found}, bool(there)


def _connection(config: EtcdConfig) -> Iterator[Finding]:
    is_local = all(one.is_loopback for one in config.endpoints)
    if len(config.endpoints) == 1 and not is_local:
        do = "give all members of the cluster, so that a job outlives the loss of this one"
        yield _hint("endpoints", "only one is given", do)
    if config.tls is not None or is_local:
        yield _ok("TLS", "is on" if config.tls is not None else "is off, on this machine only")
    else:
        do = "use https:// endpoints and --ca-cert: anyone on this network may read and change jobs"
        yield _hint("TLS", "is off", do)
    if config.credentials is None and not is_local:
        do = "if etcd has no users, anyone who reaches it may end jobs: give jobs a user and a role of their own"
        yield _hint("login", "there is none", do)


def _cluster(etcd: EtcdClient, answering: Answering, key_prefix: str, *, has_login: bool) -> Iterator[Finding]:
    """Raises EtcdError."""
    yield from _members(answering)
    if has_login and not etcd.requires_login():
        do = "switch them on (`etcdctl auth enable`), or leave out the user"
        yield _hint("login", "logins are off: anyone who reaches etcd may write; your user is ignored", do)
    alarms: Sequence[tuple[str, str]] = ()
    try:
        alarms = etcd.alarms()
    except EtcdAuthError:
        do = "look with a user that may: `etcdctl --user root alarm list`"
        yield _hint("alarms", "this user may not see them", do)
    for member, name in alarms:
        if name != NO_SPACE:  # see `_space`
            replace_it = "replace that member by an empty one: its data differs from the others'"
            do = replace_it if name == "CORRUPT" else "look at `etcdctl alarm list`"
            yield _problem("alarm", f"member {member} raises {name}", do)
    yield from _reads(etcd, runs_span(key_prefix), key_prefix)
    reported = [*(error for one in answering.values() for error in one.errors), *(name for _, name in alarms)]
    is_full = any(NO_SPACE in one for one in reported)
    try:
        yield from _writes(etcd, runs_span(key_prefix).start, key_prefix)
    except EtcdNoSpace:
        is_full = True
    yield from [_full(answering)] if is_full else map(_space, answering, answering.values())


def _members(answering: Answering) -> Iterator[Finding]:
    leaders = sorted({status.leader_id for status in answering.values()} - {""})
    for endpoint, status in answering.items():
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
        yield _ok("leader", f"{leaders[0]}, term {max(status.raft_term for status in answering.values())}")
    versions = sorted({status.version for status in answering.values()})
    for version in versions:
        bugs = f"{version} has known lease and watch bugs"
        wanted = newer_wanted(version)
        yield _hint("release", bugs, f"use {wanted} or newer") if wanted else _ok("release", version)
    if len(versions) > 1:
        yield _hint("release", "the members have several", "finish the upgrade")


# -- what agents do: read, write, renew a lease, open a watch ---------------------------------------------------------

_ROLE: Final = "grant it: `etcdctl role grant-permission ROLE --prefix readwrite {}/`"
_STREAMS: Final = "agents need it: if there is a proxy between this host and etcd, give the addresses of etcd's members"
"""Renewals and watches are streams: what stands between a host and etcd may only pass calls."""


def _reads(etcd: EtcdClient, jobs: Span, key_prefix: str) -> Iterator[Finding]:
    try:
        seconds = _timed(lambda: etcd.range(Get(jobs, limit=1, keys_only=True)), READS_TIMED)
    except EtcdAuthError as error:
        yield _problem("right to read", f"not below {key_prefix}: {error}", _ROLE.format(key_prefix))
        return
    yield _ok("right to read", f"below {key_prefix}")
    yield _latency("read", seconds, SLOW_READ, "check the network between here and etcd, and etcd's CPU")
    items: concurrency.Queue[WatchItem] = concurrency.inbox()
    watch = etcd.watch(jobs, 0, items.put)
    try:
        item = items.get(timeout=etcd.config.request_timeout)
        fault = str(item) if isinstance(item, EtcdError) else ""
    except concurrency.Empty:
        fault = f"etcd has not answered for {etcd.config.request_timeout:g} s"
    finally:
        watch.cancel()
    yield _problem("watch", f"none was confirmed: {fault}", _STREAMS) if fault else _ok("watch", "was confirmed")


def _writes(etcd: EtcdClient, key: str, key_prefix: str) -> Iterator[Finding]:
    """Raises EtcdNoSpace."""
    try:
        # etcd checks the permission of a transaction whose guard fails, which writes nothing.
        etcd.txn([Compare(key, "version", "<", 0)], [Put(key, b"")])
        seconds = _timed(lambda: etcd.revoke(etcd.grant(SHORT_TTL).id), WRITES_TIMED) / 2
    except EtcdAuthError as error:
        yield _problem("right to write", f"not below {key_prefix}: {error}", _ROLE.format(key_prefix))
        return
    yield _ok("right to write", f"below {key_prefix}")
    yield _latency(
        "write", seconds, SLOW_WRITE, "give etcd's log a fast disk of its own: each write waits for its fsync"
    )
    lease = etcd.grant(SHORT_TTL).id
    try:
        etcd.renew(lease)
        yield _ok("lease", "was renewed")
    except EtcdError as error:
        yield _problem("lease", f"none was renewed: {error}", _STREAMS)
    etcd.revoke(lease)


def _timed(call: Callable[[], object], times: int) -> float:
    """The median of the seconds that a call takes; `times` is odd."""
    taken = []
    for _ in range(times):
        began = concurrency.now()
        call()
        taken.append(concurrency.now() - began)
    return sorted(taken)[times // 2]


def _latency(what: str, seconds: float, slow: float, do: str) -> Finding:
    level = PROBLEM if seconds >= HOPELESS else HINT if seconds >= slow else OK
    return _finding(level, f"{what} latency", _ms(seconds), do if level != OK else "")


# -- space ------------------------------------------------------------------------------------------------------------


def _full(answering: Answering) -> Finding:
    # etcd before 3.6 does not report its quota; one that is full below the default has another.
    sizes = [
        f"{endpoint} has {_mib(one.db_size)} of {_mib(one.db_quota) if one.db_quota else 'an unknown quota'}"
        for endpoint, one in answering.items()
    ]
    do = "make room: `etcdctl compact REVISION`, `etcdctl defrag` for each member, then `etcdctl alarm disarm`"
    return _problem("space", f"is used up (NOSPACE): {', '.join(sizes)}", f"{do}; until then no job can write")


def _space(endpoint: str, status: MemberStatus) -> Finding:
    about, quota, is_known = f"database {endpoint}", status.db_quota or DEFAULT_QUOTA, status.db_quota > 0
    size = f"{_mib(status.db_size)} of {_mib(quota)}{'' if is_known else ' (if the quota is the default)'}"
    free = status.db_size - status.db_size_in_use
    if status.db_size > ALMOST_FULL * quota:
        do = "compact and defragment, or raise --quota-backend-bytes: a full etcd takes no writes"
        return _finding(PROBLEM if is_known else HINT, about, size, do)
    if free > WASTE:
        return _hint(about, f"{size}, {_mib(free)} of it free", "`etcdctl defrag`, one by one")
    return _ok(about, size)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"
