"""Sees what happens in a job without taking part: its quorums, who of them is lost, and the configuration it shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from ftcoord.coordination import checks
from ftcoord.coordination.connection import connect, torchft_errors
from ftcoord.coordination.convert import quorum_reply
from ftcoord.coordination.replica import RECORD_TTL
from ftcoord.coordination.types import Quorum as QuorumReply
from ftcoord.core.quorum import Quorum
from ftcoord.core.quorum_records import parse_quorum
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Get, KeyValue, RangeResult, Span
from ftcoord.etcd.follower import Follower
from ftcoord.etcd.mirror import Mirror

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

    Callbacks run one at a time on a thread of the observer's. Raises RuntimeError when etcd is not found in time.
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
        self._decided_key, self._members, self._configs = f"{prefix}/decided", f"{prefix}/members/", f"{prefix}/config/"
        self._current: Quorum | None = None
        self._told_lost: set[str] = set()
        self._told_config: dict[str, int] = {}
        self._follower: Follower | None = None
        if any((on_quorum, on_lost, on_config)):
            prefixes = [Span(start, is_prefix=True) for start in (self._members, self._configs)]
            spans = [Span(self._decided_key), *prefixes]
            self._follower = Follower(self._etcd, spans, self._tell, "ftcoord-observer")

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
            found = self._etcd.get(self._configs + checks.string("name", name)).one
        return found.value if found else None

    def set_config(self, name: str, value: bytes | None) -> None:
        """Set a name for all replicas of the job, or delete it with None. It lives as long as the job's last quorum.

        Raises RuntimeError; whether it was set is then not known.
        """
        key = self._configs + checks.string("name", name)
        with torchft_errors():
            if value is None:
                self._etcd.delete(Span(key))
                return
            decided = self._etcd.get(self._decided_key).one
            lease = decided.lease if decided else self._etcd.grant(RECORD_TTL).id
            self._etcd.put(key, value, lease)

    def close(self) -> None:
        """End it; no callback comes after that. Idempotent."""
        if self._follower is not None:
            self._follower.close()
        self._etcd.close()

    # -- how ----------------------------------------------------------------------------------------------------

    def _read_decided(self, revision: int) -> KeyValue | None:
        try:
            found: RangeResult = self._etcd.range(Get(Span(self._decided_key), revision=revision))
        except RequestRefused as error:
            log.debug("etcd's history ends: %s", error)
            return None
        return found.one

    def _tell(self, decided_key: Mirror, alive: Mirror, config: Mirror) -> None:
        kv = decided_key.one
        if kv is not None:
            decided = parse_quorum(kv.key, kv.value)
            if decided != self._current:
                self._current, self._told_lost = decided, set()
                if self._on_quorum is not None:
                    self._on_quorum(quorum_reply(decided))
        self._tell_lost(alive.kvs)
        self._tell_config(config.kvs)

    def _tell_lost(self, alive: Mapping[str, KeyValue]) -> None:
        if self._on_lost is None or self._current is None:
            return
        for seat in self._current.seats:
            key = self._members + seat.member
            if key in alive or seat.member in self._told_lost:
                continue
            if self._etcd.get(key).one is None:  # else it is so new that its own watch has not told of it yet
                self._told_lost.add(seat.member)
                self._on_lost(seat.request.replica_id)

    def _tell_config(self, config: Mapping[str, KeyValue]) -> None:
        if self._on_config is None:
            return
        now = {kv.key: kv.mod_revision for kv in config.values()}
        changed = [key for key in {**self._told_config, **now} if self._told_config.get(key) != now.get(key)]
        self._told_config = now
        for key in changed:
            kv = config.get(key)
            self._on_config(key.removeprefix(self._configs), kv.value if kv else None)
