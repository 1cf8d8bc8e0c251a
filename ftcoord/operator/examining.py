"""Examines an etcd cluster. It changes nothing there, except for leases without keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import runs_span
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdNoSpace
from ftcoord.etcd.api import Compare, Get, Put, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.operator.findings import EndpointFacts, EtcdFacts
from ftcoord.operator.member_http import quantile_bound, read_numbers

READS_TIMED: Final = 5
WRITES_TIMED: Final = 3
FSYNC: Final = "etcd_disk_wal_fsync_duration_seconds"
"""A member's histogram of fsyncs."""
SHORT_TTL: Final = 10
"""Seconds of a lease that is granted to time a write, and revoked at once."""


def examine(config: EtcdConfig, key_prefix: str) -> EtcdFacts:
    """All facts that are available. Others are left out: a missing endpoint or permission is itself reported."""
    endpoints = [_endpoint(config, at) for at in range(len(config.endpoints))]
    is_loopback = all(one.is_loopback for one in config.endpoints)
    facts = EtcdFacts(endpoints, is_loopback, config.tls is not None, config.credentials is not None, key_prefix)
    there = [at for at, one in zip(config.endpoints, endpoints, strict=True) if one.status is not None]
    if not there:
        return facts
    etcd = EtcdClient(replace(config, endpoints=tuple(there)))
    try:
        facts = replace(facts, is_login_off=facts.has_login and not etcd.requires_login())
        facts = _with_rights_to_write(etcd, _with_rights_to_read(etcd, _with_alarms(etcd, facts)))
        if facts.cannot_read:
            return facts
        return _with_calls_of_agents(etcd, facts)
    except EtcdError as error:
        lost = EndpointFacts("the cluster", None, str(error))
        return replace(facts, endpoints=[*endpoints, lost])
    finally:
        etcd.close()


def _endpoint(config: EtcdConfig, at: int) -> EndpointFacts:
    etcd, name = EtcdClient(replace(config, endpoints=(config.endpoints[at],))), str(config.endpoints[at])
    try:
        etcd.member_status()  # it connects, and logs in
        facts = EndpointFacts(name, etcd.member_status())
    except EtcdError as error:
        return EndpointFacts(name, None, str(error))
    finally:
        etcd.close()
    numbers = read_numbers(config.endpoints[at], config.tls, config.request_timeout)
    if numbers is None:
        return facts
    return replace(facts, fsync_seconds=quantile_bound(numbers.text, FSYNC, 0.99), clock_ahead=numbers.clock_ahead)


def _with_alarms(etcd: EtcdClient, facts: EtcdFacts) -> EtcdFacts:
    try:
        return replace(facts, alarms=etcd.alarms())
    except EtcdAuthError:
        return facts


def _with_rights_to_read(etcd: EtcdClient, facts: EtcdFacts) -> EtcdFacts:
    first = Get(runs_span(facts.key_prefix), limit=1, keys_only=True)
    try:
        return replace(facts, read_seconds=_timed(lambda: etcd.range(first), READS_TIMED))
    except EtcdAuthError as error:
        return replace(facts, cannot_read=str(error))


def _with_rights_to_write(etcd: EtcdClient, facts: EtcdFacts) -> EtcdFacts:
    """Have etcd check the permission to write in a transaction that writes nothing."""
    key = runs_span(facts.key_prefix).start
    never = Compare(key, "version", "<", 0)
    try:
        etcd.txn([never], [Put(key, b"")])
        granted_and_revoked = _timed(lambda: etcd.revoke(etcd.grant(SHORT_TTL).id), WRITES_TIMED)
    except EtcdNoSpace:
        return replace(facts, is_full=True)
    except EtcdAuthError as error:
        return replace(facts, cannot_write=str(error))
    return replace(facts, write_seconds=granted_and_revoked / 2)


def _with_calls_of_agents(etcd: EtcdClient, facts: EtcdFacts) -> EtcdFacts:
    """Renew a lease and open a watch, which use streams: what stands between a host and etcd may only pass calls."""
    if not (facts.is_full or facts.cannot_write):
        facts = replace(facts, cannot_renew=_cannot_renew(etcd))
    items: concurrency.Queue[WatchItem] = concurrency.inbox()
    watch = etcd.watch(runs_span(facts.key_prefix), 0, items.put)
    try:
        found = items.get(timeout=etcd.config.request_timeout)
    except concurrency.Empty:
        return replace(facts, cannot_watch=f"etcd has not answered for {etcd.config.request_timeout:g} s")
    finally:
        watch.cancel()
    return replace(facts, cannot_watch=str(found) if isinstance(found, EtcdError) else "")


def _cannot_renew(etcd: EtcdClient) -> str:
    lease = etcd.grant(SHORT_TTL).id
    try:
        etcd.renew(lease)
    except EtcdError as error:
        return str(error)
    finally:
        etcd.revoke(lease)
    return ""


def _timed(call: Callable[[], object], times: int) -> float:
    """The median of the seconds that a call takes; `times` is odd."""
    taken = []
    for _ in range(times):
        began = concurrency.now()
        call()
        taken.append(concurrency.now() - began)
    return sorted(taken)[times // 2]
