"""The decided quorums of a job in etcd, the last one first."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from ftcoord.core.layout import decided_key, decided_span, roster_key
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Etcd, Get, KeyValue

log = logging.getLogger(__name__)


def quorum_in(kvs: Mapping[str, KeyValue], decided: KeyValue) -> QuorumRecord:
    """The quorum of a decided record and its roster, which is among `kvs`. Raises StateError."""
    roster = kvs.get(roster_key(decided.key))
    return parse_quorum(decided.key, decided.value, roster.value if roster else None)


def quorums(etcd: Etcd, prefix: str) -> Iterator[QuorumRecord]:
    """The decided quorums, the last one first, as far back as etcd has not compacted them.

    Costs one read for each. Raises EtcdError and StateError.
    """
    revision = 0  # the newest
    while True:
        try:
            found = etcd.range(Get(decided_span(prefix), revision=revision))
        except RequestRefused as error:
            log.debug("etcd's history ends: %s", error)
            return
        kvs = {kv.key: kv for kv in found.kvs}
        decided = kvs.get(decided_key(prefix))
        if decided is None:
            return
        yield quorum_in(kvs, decided)
        revision = decided.mod_revision - 1
