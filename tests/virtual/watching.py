"""The watches of one `MemoryClient`: delivered on a thread of its own, and resumed where they were interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ftcoord import concurrency, errors
from ftcoord.etcd.api import Batch, Began, Event, Span, WatchItem
from virtual.backend import Backend, Subscription

log = logging.getLogger(__name__)

CLOSE_TIMEOUT: Final = 2.0
"""Seconds that `close()` waits for the thread: in a scheduler, its process may be paused."""


@dataclass(slots=True, eq=False)
class MemoryWatch:
    """One running watch; see `ftcoord.etcd.api.Watch`."""

    watches: MemoryWatches
    source: _Source
    deliver: Callable[[WatchItem], None]

    def tell(self, item: WatchItem) -> None:
        """Deliver; what the watcher's own code raises costs nobody else an event, nor the client its thread."""
        try:
            self.deliver(item)
        except Exception:  # whatever it is: the thread serves every watch of this client
            log.exception("what watches %r failed, and missed what it was told", self.source.span.start)

    def cancel(self) -> None:
        self.watches.remove(self)


@dataclass(slots=True, eq=False)
class _Source:
    """One watch of etcd's, and who hears of it. Those who watch the same keys from now on share one."""

    key: object
    span: Span
    deletes_only: bool
    next_revision: int
    stood: bool = False
    subscription: Subscription | None = None
    watchers: tuple[MemoryWatch, ...] = ()

    def deliver(self, item: WatchItem) -> None:
        for watcher in self.watchers:
            watcher.tell(item)


class MemoryWatches:
    """All watches of one client. Thread-safe.

    Args:
        loses: which changes are not delivered.
    """

    def __init__(self, backend: Backend, loses: Callable[[Event], bool]) -> None:
        self._backend, self._loses = backend, loses
        self._lock = concurrency.lock("MemoryWatches._lock")
        self._inbox = concurrency.inbox()
        self._sources: dict[object, _Source] = {}  # guarded by _lock, as all below; a source's fields too
        self._connected = True
        self._closed = False
        self._thread: concurrency.Thread | None = None

    def add(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], deletes_only: bool
    ) -> MemoryWatch:
        """See `ftcoord.etcd.api.Etcd.watch`."""
        with self._lock:
            if self._closed:
                raise errors.ClientClosed("this etcd client was closed; make a new one")
            key = object() if start_revision else (span, deletes_only)
            if (source := self._sources.get(key)) is None:
                source = self._sources[key] = _Source(key, span, deletes_only, start_revision)
                self._subscribe(source)
            watch = MemoryWatch(self, source, deliver)
            source.watchers += (watch,)
            stands_since = source.next_revision - 1 if source.stood else None
            if self._thread is None:
                self._thread = concurrency.thread(self._run, "ftcoord-watch")
                self._thread.start()
        if stands_since is not None:
            watch.tell(Began(stands_since))
        return watch

    def remove(self, watch: MemoryWatch) -> None:
        """End one of them; idempotent."""
        with self._lock:
            source = watch.source
            source.watchers = tuple(one for one in source.watchers if one is not watch)
            if not source.watchers:
                self._drop(source)

    def disconnect(self) -> None:
        """Interrupt every watch. What is on its way to the thread is still delivered."""
        with self._lock:
            self._connected = False
            for source in self._sources.values():
                self._unsubscribe(source)

    def connect(self) -> None:
        """Have the thread resume every watch, after what was delivered before."""
        with self._lock:
            if not self._connected:
                self._connected = True
                self._inbox.put((None, None, None))

    def close(self) -> None:
        """End every watch, which is told ClientClosed on this thread. Idempotent."""
        with self._lock:
            self._closed = True
            sources = list(self._sources.values())
            for source in sources:
                self._drop(source)
            thread, self._thread = self._thread, None
        for source in sources:
            source.deliver(errors.ClientClosed("this etcd client was closed; make a new one"))
        if thread is not None:
            self._inbox.put(None)
            if thread is not concurrency.current_thread():
                thread.join(CLOSE_TIMEOUT)

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _drop(self, source: _Source) -> None:
        """Forget a source."""
        self._unsubscribe(source)
        if self._sources.get(source.key) is source:
            del self._sources[source.key]

    def _subscribe(self, source: _Source) -> None:
        if self._connected:
            # It pushes before it returns: by then the thread has to know whose items these are.
            source.subscription = Subscription(
                source.span, source.deletes_only, lambda own, item: self._inbox.put((source, own, item))
            )
            self._backend.subscribe(source.subscription, source.next_revision)

    def _unsubscribe(self, source: _Source) -> None:
        if source.subscription is not None:
            self._backend.unsubscribe(source.subscription)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (entry := self._inbox.get()) is not None:
            source, subscription, item = entry
            if item is None:
                self._resume(subscription)
            else:
                self._handle(source, subscription, item)

    def _resume(self, interrupted: Subscription | None) -> None:
        """Go on with the source whose watch was interrupted, or with all of them."""
        with self._lock:
            for source in self._sources.values():
                if interrupted is None or source.subscription is interrupted:
                    self._unsubscribe(source)
                    self._subscribe(source)

    def _handle(self, source: _Source, subscription: Subscription, item: WatchItem) -> None:
        with self._lock:
            if self._sources.get(source.key) is not source or source.subscription is not subscription:
                return
            if isinstance(item, Began):
                source.next_revision = source.next_revision or item.revision + 1
                source.stood = True
            elif isinstance(item, Batch):
                events = tuple(event for event in item.events if event.kv.mod_revision >= source.next_revision)
                if not events:
                    return
                source.next_revision = events[-1].kv.mod_revision + 1
                item = Batch(tuple(event for event in events if not self._loses(event)))
            else:
                self._drop(source)
            watchers = source.watchers
        if not isinstance(item, Batch) or item.events:
            for watcher in watchers:
                watcher.tell(item)
