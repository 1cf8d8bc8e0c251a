"""All watches of a client on one gRPC stream. When the stream breaks, another one is opened at a reachable member.

Each watch remembers the revision that it needs next, so a new stream continues exactly where the last one ended: no
change is missed, and none comes twice. Revisions come from events only, never from progress responses, which servers
before 3.5.8 may send too early (etcd issue 15220). Watchers of the same span from now on share one etcd watch.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.errors import (
    ClientClosed,
    Compacted,
    EtcdAuthError,
    EtcdError,
    EtcdUnavailable,
    FtcoordError,
    Rewound,
    ThreadNotStarted,
)
from ftcoord.etcd import messages
from ftcoord.etcd.api import Batch, Began, Event, Span, WatchItem, encode_key
from ftcoord.etcd.messages import key_value
from ftcoord.etcd.quiet_grpc import grpc
from ftcoord.etcd.retry import backoff
from ftcoord.etcd.transport import CLIENT_CLOSED, Transport, failure_of

log = logging.getLogger(__name__)

STREAM_CHECK_INTERVAL: Final = 1.0
"""Seconds between two checks of the stream's health."""
PROBE_AFTER: Final = 4.0
"""Seconds without any answer from the member until the stream probes it."""
PROBE_TIMEOUT: Final = 4.0
"""Seconds that the member has to answer a probe."""
PROBE_ID: Final = 1
"""The id of the watch that a stream creates as a probe."""
UNKNOWN_ID: Final = 0
"""The id of no watch."""


@dataclass(slots=True, eq=False)
class Watcher:
    """One running watch; see `ftcoord.etcd.api.Watch`."""

    hub: WatchHub
    source: _Source
    user: object
    deliver: Callable[[WatchItem], None]

    def tell(self, item: WatchItem) -> None:
        """Deliver an item. An error of the watcher's code must neither lose events of others, nor end the hub's
        thread."""
        try:
            self.deliver(item)
        except Exception:  # a user's callback, as far as the hub knows: its thread serves every watcher of this client
            log.exception("a watcher of %r failed, and missed what was delivered", self.source.span.start)

    def cancel(self) -> None:
        self.hub.remove(self)


@dataclass(slots=True, eq=False)
class _Source:
    """One etcd watch, and its watchers."""

    # Never change:
    id: int
    span: Span
    next_revision: int  # guarded by WatchHub._lock; only the hub's thread writes it
    deletes_only: bool
    stood: bool = False  # guarded by WatchHub._lock: whether etcd has ever confirmed it
    denied: bool = False  # only the hub's thread: whether etcd refused it with the token in use
    watchers: tuple[Watcher, ...] = ()  # written with WatchHub._lock held, as a whole; read without it

    def deliver(self, item: WatchItem) -> None:
        for watcher in self.watchers:
            watcher.tell(item)


class WatchHub:
    """The watches of one client, and the thread that reads their stream. Thread-safe.

    The thread ends a moment after its last watcher. If it fails with an unexpected error, each watcher gets an
    EtcdError, and the next one starts another thread.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport  # never changes
        # Guards all below, and what `_Source` says. Never held while something is delivered, or during a call.
        self._lock = concurrency.lock("WatchHub._lock")
        self._sources: dict[int, _Source] = {}
        self._shared: dict[tuple[Span, bool], _Source] = {}  # those that began with their first watcher
        self._last_id = PROBE_ID
        self._stream: _Stream | None = None  # the one that is open
        self._thread: concurrency.Thread | None = None

    def add(
        self,
        span: Span,
        start_revision: int,
        deliver: Callable[[WatchItem], None],
        deletes_only: bool = False,
        *,
        user: object = None,
    ) -> Watcher:
        """Start watching for `user`. `deliver` is called on the hub's thread. If etcd has already confirmed the same
        watch, the confirmation is delivered on the caller's thread.

        Raises ClientClosed, and EtcdUnavailable when no thread can be started.
        """
        self._transport.current()  # raises ClientClosed
        with self._lock:
            if self._transport.closed.is_set():
                raise ClientClosed(CLIENT_CLOSED)
            self._start()  # first: if that fails, nothing may be left that the next thread would watch for nobody
            source = self._source(span, start_revision, deletes_only)
            watcher = Watcher(self, source, user, deliver)
            source.watchers += (watcher,)
            stands_since = source.next_revision - 1 if source.stood else None
        if stands_since is not None:
            watcher.tell(Began(stands_since))
        return watcher

    def end(self, user: object) -> None:
        """End all watches of a user with ClientClosed."""
        with self._lock:
            watchers = [one for source in self._sources.values() for one in source.watchers if one.user is user]
        for watcher in watchers:
            watcher.cancel()
            watcher.tell(ClientClosed(CLIENT_CLOSED))

    def _start(self) -> None:
        """With the lock held: make sure that the thread runs. It waits for the lock before it looks for sources."""
        if self._thread is not None:
            return
        thread = concurrency.thread(self._run, "ftcoord-watch")
        try:
            thread.start()
        except ThreadNotStarted as error:
            raise EtcdUnavailable(f"etcd cannot be watched: {error}") from None
        self._thread = thread

    def _source(self, span: Span, start_revision: int, deletes_only: bool) -> _Source:
        """With the lock held: a new source, unless there already is one from now on."""
        known = self._shared.get((span, deletes_only)) if start_revision == 0 else None
        if known is not None:
            return known
        self._last_id += 1
        source = _Source(self._last_id, span, start_revision, deletes_only)
        self._sources[source.id] = source
        if start_revision == 0:
            self._shared[span, deletes_only] = source
        if self._stream is not None:
            self._stream.send(_create(source))
        return source

    def remove(self, watcher: Watcher) -> None:
        if not self._transport.is_owner():
            return
        with self._lock:
            source = watcher.source
            source.watchers = tuple(one for one in source.watchers if one is not watcher)
            if not source.watchers and self._drop(source) and self._stream is not None:
                self._stream.send(_cancel(source.id))

    def _drop(self, source: _Source) -> bool:
        """With the lock held: remove a source; returns whether it was known."""
        if self._shared.get((source.span, source.deletes_only)) is source:
            del self._shared[source.span, source.deletes_only]
        return self._sources.pop(source.id, None) is not None

    def close(self) -> None:
        """End every watch. Close the transport before. Does nothing in a forked child."""
        if not self._transport.is_owner():
            return
        self._fail_all(ClientClosed(CLIENT_CLOSED))
        with self._lock:
            stream, thread = self._stream, self._thread
        if stream is not None:
            stream.cancel()
        if thread is not None and thread is not concurrency.current_thread():
            thread.join(timeout=2 * STREAM_CHECK_INTERVAL)

    def _run(self) -> None:
        try:
            self._read_streams()
        finally:
            failure = sys.exc_info()[1]
            with self._lock:
                if self._thread is concurrency.current_thread():
                    self._thread = None  # so that the next watcher starts another
            if failure is not None:
                log.exception("the thread that reads watches failed, and all of them end")
                self._fail_all(
                    EtcdError(f"the thread that reads this client's watches failed: {failure!r}; watch again")
                )

    def _read_streams(self) -> None:
        closed = self._transport.closed
        failures = 0
        while self._wanted():
            try:
                heard = self._read_stream()
            except EtcdAuthError as error:
                self._fail_all(error)
                heard = False
            except FtcoordError as error:
                log.debug("cannot open a watch stream: %s", error)
                heard = False
            failures = 1 if heard else failures + 1
            closed.wait(backoff(failures))

    def _wanted(self) -> bool:
        """Whether a stream is needed. If not, the thread must end: the next watcher starts another."""
        with self._lock:
            if self._sources and not self._transport.closed.is_set():
                return True
            self._thread = None
            return False

    def _read_stream(self) -> bool:
        """Read one stream until it ends; returns whether it brought anything."""
        stream = _Stream(self._transport, idle=lambda: not self._sources)
        with self._lock:
            self._stream = stream
            for source in self._sources.values():
                stream.send(_create(source))
        try:
            for response in stream.open():
                self._handle(stream, response)
        except grpc.RpcError as error:
            self._explain_end(stream, error)
        finally:
            with self._lock:
                self._stream = None
            stream.cancel()
        return stream.heard

    def _explain_end(self, stream: _Stream, error: grpc.RpcError) -> None:
        if stream.ended:  # by us, for a reason that was dealt with
            return
        member = stream.member
        code, details = failure_of(error)
        if messages.blames_member(code, details):
            self._transport.blame(member)
        if messages.is_stale_token(details):
            self._transport.forget_token(stream.token)
        log.debug("watch stream of %s ended: %s (%s)", member.name, details, code)

    def _handle(self, stream: _Stream, response: Any) -> None:
        watch_id = stream.note_answer(response)
        with self._lock:
            source = self._sources.get(watch_id)
        if response.canceled and stream.token is not None and messages.is_stale_token(response.cancel_reason):
            self._log_in_again(stream)
        elif source is None:
            return
        elif response.canceled:
            self._handle_cancel(stream, source, response)
        elif response.created:
            self._note_created(stream, source, response.header.revision)
        elif response.events:
            self._hand_over(source, response.events)

    def _note_created(self, stream: _Stream, source: _Source, revision: int) -> None:
        source.denied = False
        if revision + 1 < source.next_revision:  # perhaps only a member that lags: reading the keys again shows
            stream.send(_cancel(source.id))
            self._fail(source, Rewound(revision, source.next_revision - 1))
            return
        with self._lock:
            source.next_revision = source.next_revision or revision + 1
            source.stood = True
        source.deliver(Began(revision))

    def _log_in_again(self, stream: _Stream) -> None:
        self._transport.forget_token(stream.token)
        stream.reject()

    def _hand_over(self, source: _Source, raw: Any) -> None:
        events = tuple(_event(one) for one in raw if one.kv.mod_revision >= source.next_revision)
        if not events:
            return
        with self._lock:  # a watcher that joins from now on begins after these events
            source.next_revision = events[-1].kv.mod_revision + 1
            watchers = source.watchers
        batch = Batch(events)
        for watcher in watchers:
            watcher.tell(batch)

    def _handle_cancel(self, stream: _Stream, source: _Source, response: Any) -> None:
        reason = response.cancel_reason
        if response.compact_revision:
            self._fail(source, Compacted(response.compact_revision))
        elif "permission denied" in reason and stream.token is not None and not source.denied:
            source.denied = True  # etcd before 3.5.5 says the same if a token has expired
            self._log_in_again(stream)
        elif messages.is_stale_token(reason) or "permission denied" in reason:
            self._fail(source, EtcdAuthError(f"watching {source.span.start!r}: {reason}; {self._advice()}"))
        else:
            log.debug("watch on %r cancelled by etcd (%s); opening it again", source.span.start, reason or "no reason")
            stream.reject()

    def _advice(self) -> str:
        if self._transport.config.credentials is None:
            return "etcd wants a login: set FTCOORD_USER and FTCOORD_PASSWORD"
        return "let the user's role read and write what begins with the key prefix"

    def _fail(self, source: _Source, error: EtcdError) -> None:
        with self._lock:
            known = self._drop(source)
        if known:
            source.deliver(error)

    def _fail_all(self, error: EtcdError) -> None:
        with self._lock:
            sources = list(self._sources.values())
        for source in sources:
            self._fail(source, error)


class _Stream:
    """One gRPC stream: what is sent on it, and whether its member still answers.

    Three threads use it: the hub's, which reads; gRPC's, which sends; and any that adds a watch or closes.
    """

    def __init__(self, transport: Transport, idle: Callable[[], bool]) -> None:
        # Never change:
        self._transport, self._idle = transport, idle
        self.member = transport.member()
        self.token = transport.token()
        self._outbox: concurrency.Queue[Any] = concurrency.inbox()  # None ends it
        self._creating: deque[int] = deque()  # gRPC's thread appends, the hub's takes: the ids that etcd will confirm
        # Our ids by etcd's and etcd's by ours; gRPC's thread adds, the hub's takes, one step of a dict at a time.
        self._ours: dict[int, int] = {}
        self._theirs: dict[int, int] = {}
        self._created = 0  # only gRPC's thread: watches created so far
        self.ended = False  # any thread; becomes True once
        self._answered_at = concurrency.now()  # the hub's thread writes, gRPC's reads
        self._asked_at: float | None = None  # only gRPC's thread: when a probe was sent
        self._call: Any = None  # the hub's thread, before gRPC's begins; `cancel` looks at `ended` on both sides
        self.heard = False  # only the hub's thread

    def send(self, request: Any) -> None:
        self._outbox.put(request)

    def open(self) -> Iterator[Any]:
        self._call = self._transport.stream(messages.WATCH, self._requests(), self.member, self.token)
        if self.ended:
            self._call.cancel()
        return iter(self._call)

    def cancel(self) -> None:
        self.ended = True
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()

    def reject(self) -> None:
        """End a stream that did not work: the next one is opened after a pause."""
        self.heard = False
        self.cancel()

    def note_answer(self, response: Any) -> int:
        """The id of the watch that `response` belongs to. A refused watch has none, but etcd answers in order."""
        self.heard = True
        self._answered_at = concurrency.now()
        self.member.seen()
        if response.watch_id < 0:
            return self._creating.popleft() if response.created and self._creating else UNKNOWN_ID
        ours = self._ours.get(response.watch_id, UNKNOWN_ID)
        if response.created:
            with contextlib.suppress(ValueError):
                self._creating.remove(ours)
        if response.canceled:
            self._ours.pop(response.watch_id, None)
            if self._theirs.get(ours) == response.watch_id:
                del self._theirs[ours]
        return ours

    def _requests(self) -> Iterator[Any]:
        """Runs on a gRPC thread: yields the requests, and checks the stream's health in between."""
        while not self.ended:
            try:
                request = self._outbox.get(timeout=STREAM_CHECK_INTERVAL)
                if request is None:
                    return
                yield self._with_etcds_id(request)
            except concurrency.Empty:
                if self._idle():  # the hub's thread ends with it, though the process keeps its client
                    self.cancel()
            self._probe(concurrency.now())

    def _with_etcds_id(self, request: Any) -> Any:
        """The request with the id of its watch at etcd. The grpc-proxy counts the watches of a stream from 0, whatever
        ids are asked for: so we ask for the same."""
        if request.HasField("create_request"):
            create = request.create_request
            theirs, self._created = self._created, self._created + 1
            self._creating.append(create.watch_id)
            self._ours[theirs], self._theirs[create.watch_id] = create.watch_id, theirs
            create.watch_id = theirs
        else:
            request.cancel_request.watch_id = self._theirs.get(request.cancel_request.watch_id, -1)
        return request

    def _probe(self, now: float) -> None:
        """Ask for an answer after some silence; end the stream when there is none.

        It asks by creating a watch and cancelling it: newer servers do not answer a progress request if nothing was
        written since a watch began.
        """
        heard_at = max(self._answered_at, self.member.alive_at)
        if self._asked_at is not None and self._asked_at < self._answered_at:
            self._asked_at = None
        if self._asked_at is not None and now - self._asked_at > PROBE_TIMEOUT:
            self._give_up("does not answer")
        elif self._moved():
            self._give_up("was blamed by other calls")
        elif self._asked_at is None and now - heard_at > PROBE_AFTER:
            self._asked_at = now
            self.send(messages.message("WatchRequest")(create_request={"key": b"\0", "watch_id": PROBE_ID}))
            self.send(_cancel(PROBE_ID))

    def _moved(self) -> bool:
        try:
            return self._transport.current() is not self.member
        except ClientClosed:
            return True

    def _give_up(self, why: str) -> None:
        log.debug("watch stream: etcd at %s %s", self.member.name, why)
        self._transport.blame(self.member, silent=True)
        self.cancel()


def _create(source: _Source) -> Any:
    create = {
        "key": encode_key(source.span.start) or b"\0",
        "range_end": source.span.end,
        "start_revision": source.next_revision,
        "watch_id": source.id,
        "filters": [messages.NO_PUTS] if source.deletes_only else [],
    }
    return messages.message("WatchRequest")(create_request=create)


def _cancel(watch_id: int) -> Any:
    return messages.message("WatchRequest")(cancel_request={"watch_id": watch_id})


def _event(raw: Any) -> Event:
    return Event("put" if raw.type == messages.PUT_EVENT else "delete", key_value(raw.kv))
