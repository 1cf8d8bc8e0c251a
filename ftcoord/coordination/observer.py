"""Follows a job without taking part: its quorums and lost members."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from ftcoord import concurrency
from ftcoord.closing import weakly
from ftcoord.coordination import checks
from ftcoord.coordination.connection import connect, torchft_errors
from ftcoord.coordination.convert import quorum_reply
from ftcoord.coordination.types import Quorum as QuorumReply
from ftcoord.core.layout import decided_key, decided_span, member_key, members_span, roster_key
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.etcd.api import Get, KeyValue
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.deaths import causes_of
from ftcoord.primitives.mirror import Informer, Mirror

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
    ) -> None:
        limit = checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(checks.string("addr", addr), limit)
        prefix = self._job.prefix
        self._on_quorum, self._on_lost, self._prefix = on_quorum, on_lost, prefix
        # Only the informer's thread:
        self._current: QuorumRecord | None = None
        self._reported_lost: set[str] = set()  # members of the current quorum
        # Set once by the informer's thread, read by any:
        self._failure: BaseException | None = None
        self._informer: Informer | None = None
        if any((on_quorum, on_lost)):
            spans = [decided_span(prefix), members_span(prefix)]
            # Weak references: the informer's thread must not keep this object alive.
            with contextlib.ExitStack() as undo:
                undo.callback(self._etcd.close)  # where no thread can be started
                self._informer = Informer(
                    self._etcd,
                    spans,
                    weakly(self._report),
                    "ftcoord-observer",
                    failed=weakly(self._note_failure),
                )
                undo.pop_all()
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._informer, self._etcd, last=True)

    def quorum(self) -> QuorumReply | None:
        """The last quorum; None before the first. Costs one read. Raises RuntimeError when etcd does not answer."""
        with self._answering():
            found = self._etcd.range(Get(decided_span(self._prefix)))
            decided = _quorum_in({kv.key: kv for kv in found.kvs}, self._prefix)
            return quorum_reply(decided) if decided is not None else None

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

    def _report(self, quorum: Mirror, alive: Mirror) -> None:
        decided = _quorum_in(quorum.kvs, self._prefix)
        if decided is not None and decided != self._current:
            self._current, self._reported_lost = decided, set()
            if self._on_quorum is not None:
                _call(self._on_quorum, quorum_reply(decided))
        self._report_lost(alive.kvs)

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


def _quorum_in(kvs: Mapping[str, KeyValue], prefix: str) -> QuorumRecord | None:
    """The decided quorum; None if there is none. Raises StateError."""
    decided = kvs.get(decided_key(prefix))
    if decided is None:
        return None
    roster = kvs.get(roster_key(decided.key))
    return parse_quorum(decided.key, decided.value, roster.value if roster else None)


def _call(callback: Callable[..., object], *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:  # a user's: its failure must not end the thread that runs the other callbacks
        log.exception("an observer's callback failed")


def _end(informer: Informer | None, etcd: SharedClient) -> None:
    if informer is not None:
        informer.close()
    etcd.close()
