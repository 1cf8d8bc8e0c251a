"""All watches of a client on one gRPC stream. When the stream breaks, another one is opened at a reachable member.

Each watch remembers the revision that it needs next, so a new stream continues exactly where the last one ended: no
change is missed, and none comes twice. Revisions come from events only, never from progress responses, which servers
before 3.5.8 may send too early (etcd issue 15220). Watchers of the same span from now on share one etcd watch.

A member that hangs ends the stream: gRPC misses the answer to its ping, or the transport ends it, because another call
was not answered.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ftcoord import concurrency, errors
from ftcoord.errors import ClientClosed, EtcdAuthError, EtcdError, EtcdUnavailable
from ftcoord.etcd import messages
from ftcoord.etcd.api import Batch, Began, Event, Span, WatchItem, encode_key
from ftcoord.etcd.quiet_grpc import grpc
from ftcoord.etcd.retry import backoff
from ftcoord.etcd.transport import CLIENT_CLOSED, Transport, failure_of

log = logging.getLogger(__name__)

IDLE: Final = 1.0
"""Seconds after which a stream ends on which nothing is watched: the process may keep its client."""
CLOSE_TIMEOUT: Final = 2.0
"""Seconds that `close()` waits for the thread, which may be in a user's callback."""


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

    key: object  # in WatchHub._sources; never changes, nor do the next two
    span: Span
    deletes_only: bool
    next_revision: int  # guarded by WatchHub._lock; only the hub's thread writes it
    number: int = -1  # guarded by WatchHub._lock: its number on the stream that is open
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
        self._sources: dict[object, _Source] = {}  # by span and kind those that began with their first watcher
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
            key = object() if start_revision else (span, deletes_only)
            if (source := self._sources.get(key)) is None:
                source = self._sources[key] = _Source(key, span, deletes_only, start_revision)
                if self._stream is not None:
                    self._stream.create(source)
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

    def remove(self, watcher: Watcher) -> None:
        if not self._transport.owner.is_current:
            return
        with self._lock:
            source = watcher.source
            source.watchers = tuple(one for one in source.watchers if one is not watcher)
            if not source.watchers:
                self._drop(source)

    def close(self) -> None:
        """End every watch. Close the transport before: that ends the stream. Does nothing in a forked child."""
        if not self._transport.owner.is_current:
            return
        self._fail_all(ClientClosed(CLIENT_CLOSED))
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not concurrency.current_thread():
            thread.join(timeout=CLOSE_TIMEOUT)

    def _drop(self, source: _Source) -> bool:
        """With the lock held: watch it no longer; returns whether it was watched. Another one may have its key now."""
        if self._sources.get(source.key) is not source:
            return False
        del self._sources[source.key]
        if self._stream is not None:
            self._stream.cancel(source)
        return True

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

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """With the lock held: make sure that the thread runs. It waits for the lock before it looks for sources."""
        if self._thread is not None:
            return
        thread = concurrency.thread(self._run, "ftcoord-watch")
        try:
            thread.start()
        except errors.ThreadNotStarted as error:
            raise EtcdUnavailable(f"etcd cannot be watched: {error}") from None
        self._thread = thread

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
        failures = 0
        while self._wanted():
            heard = False
            try:
                heard = self._read_stream()
            except EtcdAuthError as error:
                self._fail_all(error)
            except errors.FtcoordError as error:
                log.debug("cannot open a watch stream: %s", error)
            failures = 1 if heard else failures + 1
            self._transport.closed.wait(backoff(failures))

    def _wanted(self) -> bool:
        """Whether a stream is needed. If not, the thread must end: the next watcher starts another."""
        with self._lock:
            if self._sources and not self._transport.closed.is_set():
                return True
            self._thread = None
            return False

    def _read_stream(self) -> bool:
        """Read one stream until it ends; returns whether it worked."""
        stream = _Stream(self._transport)
        with self._lock:
            self._stream = stream
            for source in self._sources.values():
                stream.create(source)
        try:
            for response in stream.open():
                if not self._handle(stream, response):
                    return False
        except grpc.RpcError as error:
            code, details = failure_of(error)
            if messages.blames_member(code, details) and not stream.is_idle:
                self._transport.blame(stream.member)
            if messages.is_stale_token(details):
                self._transport.forget_token(stream.token)
            log.debug("watch stream of %s ended: %s (%s)", stream.member.name, details, code)
        finally:
            with self._lock:
                self._stream = None
            stream.close()
        return stream.heard

    def _handle(self, stream: _Stream, response: Any) -> bool:
        """Handle an answer; returns False if another stream must be opened after a pause."""
        source = stream.source_of(response)
        if response.canceled and stream.token is not None and messages.is_stale_token(response.cancel_reason):
            self._transport.forget_token(stream.token)
            return False
        if source is None:
            return True
        if response.canceled:
            return self._handle_cancel(stream, source, response)
        if response.created:
            self._note_created(source, response.header.revision)
        elif response.events:
            self._hand_over(source, response.events)
        return True

    def _note_created(self, source: _Source, revision: int) -> None:
        source.denied = False
        if revision + 1 < source.next_revision:  # perhaps only a member that lags: reading the keys again shows
            self._fail(source, errors.Rewound(revision, source.next_revision - 1))
            return
        with self._lock:
            source.next_revision = source.next_revision or revision + 1
            source.stood = True
        source.deliver(Began(revision))

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

    def _handle_cancel(self, stream: _Stream, source: _Source, response: Any) -> bool:
        reason = response.cancel_reason
        if response.compact_revision:
            self._fail(source, errors.Compacted(response.compact_revision))
            return True
        if "permission denied" in reason and stream.token is not None and not source.denied:
            source.denied = True  # etcd before 3.5.5 says the same if a token has expired
            self._transport.forget_token(stream.token)
            return False
        if messages.is_stale_token(reason) or "permission denied" in reason:
            advice = "let the user's role read and write what begins with the key prefix"
            if self._transport.config.credentials is None:
                advice = "etcd wants a login: set FTCOORD_USER and FTCOORD_PASSWORD"
            self._fail(source, EtcdAuthError(f"watching {source.span.start!r}: {reason}; {advice}"))
            return True
        log.debug("watch on %r cancelled by etcd (%s); opening it again", source.span.start, reason or "no reason")
        return False


class _Stream:
    """One gRPC stream: what is sent on it, and which of its watches is which.

    The watches are numbered as etcd's grpc-proxy numbers them, whatever numbers are asked for: from 0, in the order in
    which they are created. `create` and `cancel` are called with the hub's lock held, the others by its thread.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.member, self.token = transport.member(), transport.token()
        self._outbox: concurrency.Queue[Any] = concurrency.inbox()  # None ends it
        self._created = 0  # watches that were created so far
        # Any thread, one step at a time:
        self._sources: dict[int, _Source] = {}
        self._unanswered: deque[int] = deque()  # those that etcd has not confirmed yet
        self._call: Any = None
        self.heard = self.is_idle = False

    def create(self, source: _Source) -> None:
        number = source.number = self._created
        self._created += 1
        self._sources[number] = source
        self._unanswered.append(number)
        create = {
            "key": encode_key(source.span.start) or b"\0",
            "range_end": source.span.end,
            "start_revision": source.next_revision,
            "watch_id": number,
            "filters": [messages.NO_PUTS] if source.deletes_only else [],
        }
        self._outbox.put(messages.message("WatchRequest")(create_request=create))

    def cancel(self, source: _Source) -> None:
        """Also if etcd has cancelled it itself: it ignores what it does not know."""
        self._sources.pop(source.number, None)
        self._outbox.put(messages.message("WatchRequest")(cancel_request={"watch_id": source.number}))

    def open(self) -> Iterator[Any]:
        self._call = self._transport.stream(messages.WATCH, self._requests(), self.member, self.token)
        return iter(self._call)

    def _requests(self) -> Iterator[Any]:
        """On a thread of gRPC's: ends the stream when nothing is watched on it any more."""
        while True:
            try:
                if (request := self._outbox.get(timeout=IDLE)) is None:
                    return
                yield request
            except concurrency.Empty:
                if not self._sources and self._call is not None:
                    self.is_idle = True
                    self._call.cancel()
                    return

    def close(self) -> None:
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()

    def source_of(self, response: Any) -> _Source | None:
        """The watch that `response` belongs to. A refused one has no number there, but etcd answers in order."""
        self.heard = True
        self.member.seen()
        number = response.watch_id
        if number < 0 and response.created and self._unanswered:
            number = self._unanswered.popleft()
        elif response.created:
            with suppress(ValueError):
                self._unanswered.remove(number)
        return self._sources.get(number)


def _event(raw: Any) -> Event:
    return Event("put" if raw.type == messages.PUT_EVENT else "delete", messages.key_value(raw.kv))
