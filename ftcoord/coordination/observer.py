"""Sees what happens in a job without taking part: its quorums, who of them is lost, and the configuration it shares."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from ftcoord.coordination import checks
from ftcoord.coordination.connection import connect, torchft_errors, when_forgotten
from ftcoord.coordination.convert import quorum_reply
from ftcoord.coordination.replica import RECORD_TTL
from ftcoord.coordination.types import Quorum as QuorumReply
from ftcoord.core.layout import config_key, configs_span, decided_key, member_key, members_span
from ftcoord.core.quorum_records import QuorumRecord, parse_quorum
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Get, KeyValue, RangeResult, Span
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror

log = logging.getLogger(__name__)


class Observer:
    """A view of one job.

    Args:
        addr: the job's address, see `LighthouseClient`.
        connect_timeout: how long etcd is looked for.
        on_quorum: called with each quorum that is decided; of several at once perhaps only with the last.
        on_lost: called with the replica id when a member of the current quorum has left, or its heartbeat timed out:
            long before its peers' collectives do. Once for each quorum and member.
        on_config: called with a name, and its value or None, whenever the shared configuration changes.

    Callbacks run one at a time on a thread of the observer's; what they raise is logged, and the next one comes all the
    same. An observer that nobody holds any more ends as with `close()`. Raises RuntimeError when etcd is not found in
    time.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta,
        *,
        on_quorum: Callable[[QuorumReply], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_config: Callable[[str, bytes | None], None] | None = None,
    ) -> None:
        patience = checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(checks.string("addr", addr), patience)
        prefix = self._job.prefix
        self._on_quorum, self._on_lost, self._on_config = on_quorum, on_lost, on_config
        self._prefix, self._decided_key, self._configs = prefix, decided_key(prefix), configs_span(prefix).start
        self._current: QuorumRecord | None = None
        self._told_lost: set[str] = set()
        self._told_config: dict[str, int] = {}
        self._informer: Informer | None = None
        if any((on_quorum, on_lost, on_config)):
            spans = [Span(self._decided_key), members_span(prefix), configs_span(prefix)]
            self._informer = Informer(self._etcd, spans, _weakly(self._tell), "ftcoord-observer")
        when_forgotten(self, _end, self._informer, self._etcd)

    def quorum(self) -> QuorumReply | None:
        """The last quorum, None before the first. Raises RuntimeError."""
        return next(self.history(1), None)

    def history(self, limit: int = 100) -> Iterator[QuorumReply]:
        """The quorums that were decided, the last one first, as far back as etcd's history goes (until compaction).

        Costs one read each. Raises RuntimeError.
        """
        revision = 0
        for _ in range(limit):
            with torchft_errors():
                kv = self._read_decided(revision)
                if kv is None:
                    return
                decided = parse_quorum(kv.key, kv.value)
            yield quorum_reply(decided)
            revision = kv.mod_revision - 1

    def get_config(self, name: str) -> bytes | None:
        """What a name is set to in the job's shared configuration. Raises RuntimeError."""
        with torchft_errors():
            found = self._etcd.get(config_key(self._prefix, checks.string("name", name))).one
        return found.value if found else None

    def set_config(self, name: str, value: bytes | None) -> None:
        """Set a name for all replicas of the job, or delete it with None. It lives as long as the job's last quorum.

        Raises RuntimeError; whether it was set is then not known.
        """
        key = config_key(self._prefix, checks.string("name", name))
        with torchft_errors():
            if value is None:
                self._etcd.delete(Span(key))
                return
            decided = self._etcd.get(self._decided_key).one
            lease = decided.lease if decided else self._etcd.grant(RECORD_TTL).id
            self._etcd.put(key, value, lease)

    def close(self) -> None:
        """End it; no callback comes after that. Idempotent."""
        _end(self._informer, self._etcd)

    # -- how ----------------------------------------------------------------------------------------------------

    def _read_decided(self, revision: int) -> KeyValue | None:
        try:
            found: RangeResult = self._etcd.range(Get(Span(self._decided_key), revision=revision))
        except RequestRefused as error:
            log.debug("etcd's history ends: %s", error)
            return None
        return found.one

    def _tell(self, quorum: Mirror, alive: Mirror, config: Mirror) -> None:
        kv = quorum.one
        if kv is not None:
            decided = parse_quorum(kv.key, kv.value)
            if decided != self._current:
                self._current, self._told_lost = decided, set()
                if self._on_quorum is not None:
                    _call(self._on_quorum, quorum_reply(decided))
        self._tell_lost(alive.kvs)
        self._tell_config(config.kvs)

    def _tell_lost(self, alive: Mapping[str, KeyValue]) -> None:
        if self._on_lost is None or self._current is None:
            return
        for seat in self._current.seats:
            key = member_key(self._prefix, seat.member)
            if key in alive or seat.member in self._told_lost:
                continue
            if self._etcd.get(key).one is None:  # else it is so new that its own watch has not told of it yet
                self._told_lost.add(seat.member)
                _call(self._on_lost, seat.request.replica_id)

    def _tell_config(self, config: Mapping[str, KeyValue]) -> None:
        if self._on_config is None:
            return
        now = {kv.key: kv.mod_revision for kv in config.values()}
        changed = [key for key in {**self._told_config, **now} if self._told_config.get(key) != now.get(key)]
        self._told_config = now
        for key in changed:
            kv = config.get(key)
            _call(self._on_config, key.removeprefix(self._configs), kv.value if kv else None)


def _weakly(tell: Callable[..., None]) -> Callable[..., None]:
    """The same method, for a thread that shall not keep its object alive."""
    method = weakref.WeakMethod(tell)

    def tell_if_there(*mirrors: Mirror) -> None:
        bound = method()
        if bound is not None:
            bound(*mirrors)

    return tell_if_there


def _call(callback: Callable[..., object], *news: Any) -> None:
    try:
        callback(*news)
    except Exception:  # a user's: its failure must not end the thread that others are told by
        log.exception("an observer's callback failed")


def _end(informer: Informer | None, etcd: SharedClient) -> None:
    if informer is not None:
        informer.close()
    etcd.close()
