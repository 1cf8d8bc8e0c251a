"""A local copy of a span of keys that is kept up to date: a watch, and a read of the keys that existed when it started.

A `Mirror` has no thread and no lock: its owner gets what the watch delivers (`post`) and applies it on its own thread.
A `Feed` gives its changes to a thread that waits for them, and an `Informer` reports them on a thread of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.concurrency import StepThread
from ftcoord.errors import ClientClosed, Compacted, EtcdUnavailable
from ftcoord.etcd.api import Batch, Began, Etcd, Get, KeyValue, RangeResult, Span, Watch, WatchItem

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """One change of a key: what it `was` before (None: absent) and is `now` (None: deleted)."""

    key: str
    was: KeyValue | None
    now: KeyValue | None


Apply: TypeAlias = Callable[[], list[Change]]
"""Applies one item of a mirror's watch, for the mirror's owner: see `Mirror`."""


class Mirror:
    """The keys of `span` at `revision`, once it is `synced`.

    `post(apply)` is called on the client's thread with every item that the watch delivers. The owner then calls
    `apply()` on its own thread, and `sync()` as long as `synced` is false. `apply` returns the changes, in order, and
    raises the error that ended the watch, unless that was a compaction or the end of the client, which `sync()`
    reports. `synced` becomes false again after a compaction, when the watch begins anew (G5), and whenever the copy
    turns out to be wrong.

    With `deletes_only` the mirror knows which keys exist, but not how their values changed. Outside `watched`, a part
    of the span, it knows the keys as they were last read or learned.

    Not thread-safe: the owner calls everything on one thread, or holds its own lock. Only `post` is called on another
    thread, and it changes nothing here.
    """

    def __init__(self, etcd: Etcd, span: Span, post: Callable[[Apply], None], deletes_only: bool = False) -> None:
        # Never change:
        self.span = span
        self._etcd, self._deletes_only, self._post = etcd, deletes_only, post
        # Only the owner's thread:
        self.watched = span
        """The part of the span whose changes the watch delivers: all of it, unless it was narrowed."""
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 0
        self.synced = False
        self._watch: Watch | None = None
        self._source: object = None  # marks what this watch delivers: an earlier one may still deliver something
        self._stands = False  # whether etcd has confirmed the watch
        self._began: Began | None = None  # the last confirmation: another one means an interruption

    @property
    def one(self) -> KeyValue | None:
        """The first key of the span: in a mirror of a single key, that key."""
        return self.kvs.get(self.span.start)

    def narrow(self, watched: Span) -> None:
        """Watch this part of the span only, from the next watch on: begins that, if it is another part."""
        if watched != self.watched:
            self.watched = watched
            self.close()

    def sync(self) -> None:
        """Watch from now on; or read the span if the watch is established. Raises EtcdError, and may then be called
        again."""
        if self._watch is None:
            self._start(0)
        elif self._stands:
            self.adopt(self._etcd.range(Get(self.span, keys_only=self._deletes_only)))

    def begin(self, timeout: float) -> None:
        """Watch from now on, and wait until the watch is established, at most `timeout` seconds; then call `adopt()`.

        Raises EtcdError.
        """
        if self._stands:
            return
        items: list[WatchItem] = []
        delivered = concurrency.event()

        def listen(item: WatchItem) -> None:  # on the client's thread
            items.append(item)
            delivered.set()

        self.close()
        self._start(0, listen)
        if not delivered.wait(timeout):
            items.append(EtcdUnavailable(f"etcd began no watch on {self.span.start!r} within {timeout:g} s: is it up?"))
        if isinstance(items[0], Exception):
            self.close()
            raise items[0]
        self._stands = True
        if isinstance(items[0], Began):  # otherwise a change overtook it: the read to come has that too
            self._began = items[0]

    def adopt(self, read: RangeResult) -> None:
        """Continue from a read of the whole span, such as one in a transaction. If there is a watch, the read must have
        been made after the watch was established, and after all that was applied here had been delivered."""
        if read.revision < self.revision:  # etcd was restored or replaced: this watch may wait for what will never come
            self.close()
        self.kvs = {kv.key: kv for kv in read.kvs}
        self.revision = read.revision
        self.synced = True
        if not self._stands:
            self.close()
            self._start(read.revision + 1)
            self.synced = self._stands = True

    def learn(self, kv: KeyValue) -> None:
        """Take over what a transaction wrote; the watch will not repeat it. No other key of the mirror may have changed
        since the last change that was applied here."""
        if kv.mod_revision > self.revision:
            self.revision = kv.mod_revision
            self.kvs[kv.key] = kv

    def forget(self) -> None:
        """Have the next `sync()` read all keys again: the watch may have missed changes."""
        self.synced = False

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.synced = self._stands = False
        self._source = self._began = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _start(self, revision: int, listen: Callable[[WatchItem], None] | None = None) -> None:
        source = self._source = object()

        def deliver(item: WatchItem) -> None:
            self._post(partial(self._apply, source, item))
            if listen is not None:
                listen(item)

        self._watch = self._etcd.watch(self.watched, revision, deliver, deletes_only=self._deletes_only)

    def _apply(self, source: object, item: WatchItem) -> list[Change]:
        if source is not self._source:
            return []
        if isinstance(item, Began):
            self._note_began(item)
        elif isinstance(item, Batch):
            # The read to come has what overtook the confirmation of the watch, and all that follows a missed change.
            return self._apply_batch(item) if self.synced else []
        else:
            self.close()
            if not isinstance(item, (Compacted, ClientClosed)):
                raise item
            log.debug("the watch of mirror %r is over: %s", self.span.start, item)
        return []

    def _note_began(self, item: Began) -> None:
        """The watch is established. If it was before, etcd may have lost what this copy has, and may have made as many
        new revisions since: so all is read again."""
        if self._began is not None and item is not self._began:
            self.forget()
        self._began, self._stands = item, True

    def _apply_batch(self, batch: Batch) -> list[Change]:
        known, changes = self.revision, []  # up to here the read has everything, though the watch delivers it too
        for event in batch.events:
            key, was, now = event.kv.key, self.kvs.get(event.kv.key), event.kv if event.kind == "put" else None
            if event.kv.mod_revision <= known:
                continue
            if not self._deletes_only and not _follows(now, was):
                log.warning("a watch missed a change of %r: reading again", key)
                self.forget()
                break
            self.revision = event.kv.mod_revision
            if now is not None:
                self.kvs[key] = now
            else:
                self.kvs.pop(key, None)
            if was != now:
                changes.append(Change(key, was, now))
        return changes


def _follows(now: KeyValue | None, was: KeyValue | None) -> bool:
    """Whether one change leads from `was` to `now`: etcd counts the changes of each key."""
    if now is None:
        return was is not None
    if was is None:
        return now.version == 1
    return (now.create_revision, now.version) == (was.create_revision, was.version + 1)


# -- for a thread that reads changes one by one -----------------------------------------------------------------------


class Feed:
    """Delivers the present keys of `span`, then every change. If changes were missed, or compacted, delivers their
    result.

    For one thread; only `wake()` may be called from others.
    """

    def __init__(self, etcd: Etcd, span: Span) -> None:
        # The client's threads put into the inbox, `wake()` too; only the reader touches the mirror.
        self._inbox: concurrency.Queue[Apply | None] = concurrency.inbox()
        self._mirror = Mirror(etcd, span, self._inbox.put)

    def next(self, timeout: float) -> list[Change] | None:
        """The next changes, in order; None if nothing came for `timeout` seconds, or on `wake()`.

        Raises EtcdError: call it again after a pause. ClientClosed is final.
        """
        if not self._mirror.synced:
            before = self._mirror.kvs.copy()
            self._mirror.sync()
            if self._mirror.synced:
                return self._since(before)
        try:
            apply = self._inbox.get(timeout=max(timeout, 0))
        except concurrency.Empty:
            return None
        return apply and apply()

    def wake(self) -> None:
        """End a waiting `next()`, or else the next call of it. For any thread."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._mirror.close()

    def _since(self, before: dict[str, KeyValue]) -> list[Change]:
        """How a read differs from what was known."""
        now = self._mirror.kvs
        gone = [Change(key, was, None) for key, was in before.items() if key not in now]
        return gone + [Change(key, before.get(key), kv) for key, kv in now.items() if before.get(key) != kv]


# -- with a thread of its own -----------------------------------------------------------------------------------------

BATCHES_PER_REPORT: Final = 1000
"""The most batches of changes that one report covers: they may come faster than they can be applied."""


class Informer(Closing):
    """Mirrors several spans from its creation on.

    Args:
        etcd: the etcd client.
        spans: the spans to mirror.
        report: called on the informer's thread with the spans' mirrors: once all are in sync, and then whenever one of
            them may have changed. It may return the monotonic time at which to call it again at the latest. If it
            raises EtcdError or StateError, it is called again half a second later.
        name: the thread's name.
        failed: called on the thread with the error that ends it: ClientClosed, or an unexpected error, which is logged.
            Nothing is reported after that. Not called for a `close()`.
        gathers: whether to report once for all that has come by then, BATCHES_PER_REPORT at most, as where a report
            costs more than a change does; else each change is reported by itself, as far as etcd tells of them one by
            one.
        deletes_only: see `Mirror`.
    """

    def __init__(
        self,
        etcd: Etcd,
        spans: Sequence[Span],
        report: Callable[..., float | None],
        name: str,
        failed: Callable[[BaseException], object],
        *,
        gathers: bool = False,
        deletes_only: bool = False,
    ) -> None:
        # The client's threads put into the inbox, and any thread may, to wake the informer's. Only that one takes out
        # and touches the mirrors.
        self._inbox: concurrency.Queue[Apply] = concurrency.inbox()
        self._mirrors = [Mirror(etcd, span, self._inbox.put, deletes_only) for span in spans]
        self._report, self._at_once = report, BATCHES_PER_REPORT if gathers else 1  # never change
        # Whether there is something to report, and when to do so at the latest; only the thread
        self._due, self._due_at = True, math.inf
        self._thread = StepThread(self._step, name, self.report_again, self._end, failed)
        self._thread.start()

    def report_again(self) -> None:
        """Report once more, though no key may have changed. From any thread; does not block."""
        self._inbox.put(list)

    def close(self) -> None:
        """Stop reporting. Waits for a running report, unless that calls this. Idempotent."""
        self._thread.close()

    def _step(self) -> None:
        if not self._due:
            self._take_in()
        if self._thread.closed:
            return
        for mirror in self._mirrors:
            if not mirror.synced:
                mirror.sync()
        if all(mirror.synced for mirror in self._mirrors):
            due_at = self._report(*self._mirrors)
            self._due_at = math.inf if due_at is None else due_at
        self._due = False

    def _take_in(self) -> None:
        """Wait for the next item or wake, and apply it and the items that are there already."""
        for _ in range(self._at_once):
            left = self._due_at - concurrency.now()
            self._due = True  # also if what follows fails
            try:
                self._inbox.get(timeout=None if left == math.inf else max(left, 0))()
            except concurrency.Empty:  # it is time
                return
            if self._inbox.empty():  # nobody else takes out of it
                return

    def _end(self) -> None:
        for mirror in self._mirrors:
            mirror.close()
