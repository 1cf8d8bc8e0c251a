"""A local copy of a span of keys that is kept up to date: a watch, and a read of the keys that existed when it started.

A mirror has no thread and no lock. Its owner gets the items of the watch (`post`) and applies them on its own thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, Compacted, EtcdUnavailable, RequestRefused
from ftcoord.etcd.api import Batch, Began, Etcd, Get, KeyValue, RangeResult, Span, Watch, WatchItem

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """One change of a key: what it `was` before (None: absent) and is `now` (None: deleted)."""

    key: str
    was: KeyValue | None
    now: KeyValue | None


@dataclass(frozen=True, slots=True)
class Posted:
    """An item that a mirror's watch delivered; `source` tells it from items of the mirror's earlier watches."""

    source: object
    item: WatchItem


class Mirror:
    """The keys of `span` at `revision`, once it is `synced`.

    `post(mirror, posted)` is called on the client's thread with every item that the watch delivers. The owner then
    calls `apply(posted)` on its own thread, and `sync()` as long as `synced` is false. `synced` becomes false again
    after a compaction, after an interruption of the watch, and whenever the copy turns out to be wrong.

    With `deletes_only` the mirror knows which keys exist, but not how their values changed.

    Not thread-safe: the owner calls everything on one thread, or holds its own lock. Only `post` is called on another
    thread, and it changes nothing here.
    """

    def __init__(
        self, etcd: Etcd, span: Span, post: Callable[[Mirror, Posted], None], deletes_only: bool = False
    ) -> None:
        # Never change:
        self.span = span
        self._etcd, self._deletes_only, self._post = etcd, deletes_only, post
        # Only the owner's thread:
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 0
        self.synced = False
        self._watch: Watch | None = None
        self._source: object = None  # marks what the current watch posts: an earlier watch may still post something
        self._stands = False  # whether etcd has confirmed the watch
        self._began: Began | None = None  # the last confirmation: another one means an interruption
        self._doubted = False  # the copy was in sync, and etcd may have lost what it says
        self._watch_doubted = False  # and this watch may still deliver what etcd has lost

    @property
    def one(self) -> KeyValue | None:
        """The first key of the span: in a mirror of a single key, that key."""
        return self.kvs.get(self.span.start)

    def sync(self) -> None:
        """Watch from now on; or read the span if the watch is established. Raises EtcdError, and may then be called
        again."""
        if self._watch is None:
            self._start(0)
        elif self._stands and self._doubted and self._is_history():
            self.synced, self._doubted, self._watch_doubted = True, False, False
        elif self._stands and self._watch_doubted:
            self.close()
            self._start(0)
        elif self._stands:
            self.adopt(self._etcd.range(self._all()))

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
            self.close()
            raise EtcdUnavailable(f"etcd began no watch on {self.span.start!r} within {timeout:g} s: is it up?")
        if isinstance(items[0], Exception):
            self.close()
            raise items[0]
        if isinstance(items[0], Began):  # otherwise a change overtook it: the read to come has that too
            self._began = items[0]
        self._stands = True

    def adopt(self, read: RangeResult) -> None:
        """Continue from a read of the whole span, such as one in a transaction. If there is a watch, the read must have
        been made after the watch was established."""
        self.kvs = {kv.key: kv for kv in read.kvs}
        self.revision = read.revision
        self.synced, self._doubted, self._watch_doubted = True, False, False
        if not self._stands:
            self.close()
            self._start(read.revision + 1)
            self.synced = self._stands = True

    def apply(self, posted: Posted) -> list[Change]:
        """Bring the copy up to date; returns the changes, in order.

        Raises the error that ended the watch, unless that was a compaction or the end of the client, which `sync()`
        reports.
        """
        item = posted.item
        if posted.source is not self._source:
            return []
        if isinstance(item, Began):
            self._note_began(item)
        elif isinstance(item, Batch):
            # The read to come has what overtook the confirmation of the watch, and all that follows a missed change.
            return self._apply_batch(item) if self.synced or self._doubted else []
        elif isinstance(item, (Compacted, ClientClosed)):
            log.debug("the watch of mirror %r is over: %s", self.span.start, item)
            self.close()
        else:
            self.close()
            raise item
        return []

    def learn(self, *kvs: KeyValue) -> None:
        """Take over what one transaction returned about the keys of this mirror; the watch will not repeat it.

        It must cover all keys of the mirror that changed up to then: keys that are not given here count as unchanged.
        """
        revision = max(kv.mod_revision for kv in kvs)
        if revision > self.revision:
            self.revision = revision
            self.kvs.update((kv.key, kv) for kv in kvs)

    def doubt(self) -> None:
        """A transaction contradicts this copy: have the next `sync()` check whether etcd ever had its values.

        If it did, the watch goes on, and no change is lost. If not, the copy is read anew under another watch: this one
        may still deliver what etcd has lost.
        """
        self._doubt()
        self._watch_doubted = self._doubted

    def compare(self) -> None:
        """Ask etcd whether the copy is up to date, and `forget()` it if not. Reads no values. Raises EtcdError."""
        now = self._etcd.range(Get(self.span, keys_only=True))
        if {kv.key: kv.mod_revision for kv in now.kvs} != {key: kv.mod_revision for key, kv in self.kvs.items()}:
            self.forget()

    def forget(self) -> None:
        """Have the next `sync()` read all keys again: the watch may have missed changes."""
        self.synced = self._doubted = self._watch_doubted = False

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.synced = self._stands = self._doubted = self._watch_doubted = False
        self._source = self._began = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _start(self, revision: int, listen: Callable[[WatchItem], None] | None = None) -> None:
        source = self._source = object()

        def deliver(item: WatchItem) -> None:
            self._post(self, Posted(source, item))
            if listen is not None:
                listen(item)

        self._watch = self._etcd.watch(self.span, revision, deliver, deletes_only=self._deletes_only)

    def _note_began(self, item: Began) -> None:
        """The watch is established. If it was before, etcd may have lost what this copy has, and may have made as many
        new revisions since: so the copy is doubted."""
        if self._began is not None and item is not self._began:
            self._doubt()
        self._began, self._stands = item, True

    def _doubt(self) -> None:
        self.synced, self._doubted = False, self.synced or self._doubted

    def _is_history(self) -> bool:
        """Whether etcd has the values of this copy, at its revision. If so, the watch brings everything that came
        later."""
        try:
            past = self._etcd.range(self._all(self.revision))
        except RequestRefused:  # compacted, or in etcd's future
            return False
        return self.kvs == {kv.key: kv for kv in past.kvs}

    def _all(self, revision: int = 0) -> Get:
        """All keys; without their values if those are not known anyway."""
        return Get(self.span, revision=revision, keys_only=self._deletes_only)

    def _apply_batch(self, batch: Batch) -> list[Change]:
        known, changes = self.revision, []  # up to here the read has everything, though the watch delivers it too
        for event in batch.events:
            key, was, now = event.kv.key, self.kvs.get(event.kv.key), event.kv if event.kind == "put" else None
            if event.kv.mod_revision <= known:
                continue
            if not self._deletes_only and not _follows(now, was):
                log.warning("a watch missed a change of %r: reading again", key)
                self.synced = self._doubted = False
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
