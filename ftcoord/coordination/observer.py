"""Follows a job without taking part: its quorums, lost members, and shared configuration."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from ftcoord import concurrency
from ftcoord.coordination import checks
from ftcoord.coordination.connection import connect, torchft_errors
from ftcoord.coordination.convert import quorum_reply
from ftcoord.coordination.history import quorum_in, quorums
from ftcoord.coordination.replica import RECORD_TTL
from ftcoord.coordination.types import Quorum as QuorumReply
from ftcoord.core.layout import (
    config_key,
    configs_span,
    decided_span,
    member_key,
    members_span,
)
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.etcd.api import KeyValue, Span
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.deaths import causes_of
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror

log = logging.getLogger(__name__)


class Observer:
    """Follows one job. Thread-safe.

        def abort(replica_id: str, cause: str) -> None:
            print(replica_id, "is lost:", cause)
            process_group.abort()  # collectives that wait for it end now, not when NCCL times out

        observer = Observer("etcd://h1:2379,h2:2379/job1", timedelta(seconds=10), on_lost=abort)

    With callbacks, etcd sends it every request and every quorum of the job, so use one per job, or per host.

    Args:
        addr: the job's address, see `LighthouseClient`.
        connect_timeout: how long to wait for etcd, a timedelta.
        on_quorum: called with the last quorum, if there is one, and then with every new one. After an interruption it
            may be called only with the last of several.
        on_lost: called with the replica id and the cause when a member of the current quorum dies, leaves or misses its
            heartbeat timeout: long before its peers' collectives time out. Once per quorum and member. The cause is one
            line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)", or empty if none is known.
        on_config: called with a name and its value (None if deleted) when a name of the shared configuration changes.
            At the start it is called for every name, in no particular order.

    Callbacks run one at a time, on the observer's thread. Their exceptions are logged, and do not stop later callbacks.
    While etcd is unreachable nothing is reported; changes are reported when it is back. An observer that nobody refers
    to is closed. If its thread fails with an unexpected error, the error is logged, callbacks end, and each method
    raises RuntimeError.

    Raises TypeError and ValueError for bad arguments, and RuntimeError when etcd does not answer within
    `connect_timeout`.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta,
        *,
        on_quorum: Callable[[QuorumReply], object] | None = None,
        on_lost: Callable[[str, str], object] | None = None,
        on_config: Callable[[str, bytes | None], object] | None = None,
    ) -> None:
        limit = checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(checks.string("addr", addr), limit)
        prefix = self._job.prefix
        self._on_quorum, self._on_lost, self._on_config = on_quorum, on_lost, on_config
        self._prefix, self._configs = prefix, configs_span(prefix).start
        # Only the informer's thread:
        self._current: QuorumRecord | None = None
        self._reported_lost: set[str] = set()  # members of the current quorum
        self._reported_config: dict[str, int] = {}  # the revision that was reported, by key
        # Set once by the informer's thread, read by any:
        self._failure: BaseException | None = None
        self._informer: Informer | None = None
        if any((on_quorum, on_lost, on_config)):
            spans = [decided_span(prefix), members_span(prefix), configs_span(prefix)]
            # Weak references: the informer's thread must not keep this object alive.
            with contextlib.ExitStack() as undo:
                undo.callback(self._etcd.close)  # where no thread can be started
                self._informer = Informer(
                    self._etcd,
                    spans,
                    _weakly(self._report),
                    "ftcoord-observer",
                    failed=_weakly(self._note_failure),
                )
                undo.pop_all()
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._informer, self._etcd, last=True)

    def quorum(self) -> QuorumReply | None:
        """The last quorum; None before the first. Costs one read. Raises RuntimeError when etcd does not answer."""
        return next(self.history(1), None)

    def history(self, limit: int = 100) -> Iterator[QuorumReply]:
        """At most `limit` of the decided quorums, the last one first, as far back as etcd has not compacted them.

        Costs one read for each. Iterating raises RuntimeError when etcd does not answer.
        """
        decided = quorums(self._etcd, self._prefix)
        for _ in range(limit):
            with self._answering():
                quorum = next(decided, None)
            if quorum is None:
                return
            yield quorum_reply(quorum)

    def get_config(self, name: str) -> bytes | None:
        """The value of a name in the job's shared configuration; None if it has none.

        Raises RuntimeError when etcd does not answer.
        """
        key = config_key(self._prefix, checks.string("name", name))
        with self._answering():
            found = self._etcd.get(key).one
        return found.value if found else None

    def set_config(self, name: str, value: bytes | None) -> None:
        """Set a name in the job's shared configuration; None deletes it.

        The value is kept as long as the job's last quorum; if it is set before the first quorum, for seven days. etcd
        takes at most 1.5 MiB on default settings. Raises TypeError for other values, and RuntimeError when etcd refuses
        or does not answer; the value may then have been set.
        """
        key = config_key(self._prefix, checks.string("name", name))
        if value is not None and not isinstance(value, bytes):
            raise TypeError(f"argument 'value': give bytes or None, not {type(value).__name__!r}")
        with self._answering():
            if value is None:
                self._etcd.delete(Span(key))
                return
            decided = self._etcd.get(decided_span(self._prefix).start).one
            lease = decided.lease if decided else self._etcd.grant(RECORD_TTL).id
            self._etcd.put(key, value, lease)

    def close(self) -> None:
        """Stop following the job. No callback begins after this returns. Idempotent.

        It waits for a running callback, unless that callback calls it.
        """
        self._cancel_finalizer()
        _end(self._informer, self._etcd)

    # -- how ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Translates errors into torchft's. Raises RuntimeError if the observer's thread has failed."""
        if self._failure is not None:
            problem = f"{type(self._failure).__name__}: {self._failure}"
            raise checks.failed("Internal", f"this observer has failed ({problem}); close it and make a new one")
        with torchft_errors():
            yield

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error

    def _report(self, quorum: Mirror, alive: Mirror, config: Mirror) -> None:
        kv = quorum.one
        if kv is not None:
            decided = quorum_in(quorum.kvs, kv)
            if decided != self._current:
                self._current, self._reported_lost = decided, set()
                if self._on_quorum is not None:
                    _call(self._on_quorum, quorum_reply(decided))
        self._report_lost(alive.kvs)
        self._report_config(config.kvs)

    def _report_lost(self, alive: Mapping[str, KeyValue]) -> None:
        if self._on_lost is None or self._current is None:
            return
        for seat in self._current.seats:
            key = member_key(self._prefix, seat.member)
            if key in alive or seat.member in self._reported_lost:
                continue
            # The watch of the decision may be ahead of that of the members, so a new member may only seem to be lost.
            if self._etcd.get(key).one is None:
                cause = causes_of(self._etcd, self._prefix, [seat.member]).get(seat.member, "")
                self._reported_lost.add(seat.member)  # only now: where etcd does not answer, this is called again
                _call(self._on_lost, seat.request.replica_id, cause)

    def _report_config(self, config: Mapping[str, KeyValue]) -> None:
        if self._on_config is None:
            return
        now = {kv.key: kv.mod_revision for kv in config.values()}
        changed = [key for key in {**self._reported_config, **now} if self._reported_config.get(key) != now.get(key)]
        self._reported_config = now
        for key in changed:
            kv = config.get(key)
            _call(self._on_config, key.removeprefix(self._configs), kv.value if kv else None)


def _call(callback: Callable[..., object], *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:  # a user's: its failure must not end the thread that runs the other callbacks
        log.exception("an observer's callback failed")


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The same bound method, for a thread that must not keep its object alive: does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call_if_there(*arguments: object) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return call_if_there


def _end(informer: Informer | None, etcd: SharedClient) -> None:
    if informer is not None:
        informer.close()
    etcd.close()
