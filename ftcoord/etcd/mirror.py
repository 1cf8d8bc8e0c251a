"""A local copy of a span of keys that stays true: one read, then a watch from the revision after it.

A mirror has no thread and no lock: its owner is handed the watch's items (`post`) and applies them where it likes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftcoord.errors import Compacted
from ftcoord.etcd.api import Batch, Etcd, Get, KeyValue, RangeResult, Span, Watch, WatchItem

log = logging.getLogger(__name__)


class Mirror:
    """The keys of `span` at `revision`.

    `post(mirror, item)` is called on the client's thread for all that the watch delivers; the owner then calls
    `apply(item)` on its own thread. After a compaction `synced` is false until the owner calls `sync()` again.
    """

    def __init__(self, etcd: Etcd, span: Span, post: Callable[[Mirror, WatchItem], None]) -> None:
        self.span = span
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 0
        self.synced = False
        self._etcd = etcd
        self._post = post
        self._watch: Watch | None = None

    @property
    def one(self) -> KeyValue | None:
        """The value of a mirror of a single key."""
        return self.kvs.get(self.span.start)

    def sync(self) -> None:
        """Read the span and watch from there. Raises EtcdError, and may then be called again."""
        self.adopt(self._etcd.range(Get(self.span)))

    def adopt(self, read: RangeResult) -> None:
        """Start from a read of the whole span that was already made, say in a transaction."""
        self.close()
        self.kvs = {kv.key: kv for kv in read.kvs}
        self.revision = read.revision
        self.synced = True
        self._watch = self._etcd.watch(self.span, read.revision + 1, lambda item: self._post(self, item))

    def apply(self, item: WatchItem) -> None:
        """Bring the copy up to date. Raises what ended the watch, unless it was a compaction."""
        if isinstance(item, Batch):
            self._apply_batch(item)
        elif isinstance(item, Compacted):
            log.debug("mirror of %r must list again: %s", self.span.start, item)
            self.close()
        else:
            self.close()
            raise item

    def learn(self, kv: KeyValue) -> None:
        """Take over what a transaction told of the key of a single-key mirror; the watch will not repeat it."""
        if kv.mod_revision > self.revision:
            self.revision = kv.mod_revision
            self.kvs[kv.key] = kv

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.synced = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _apply_batch(self, batch: Batch) -> None:
        known = self.revision  # the watch before the last sync may have posted what was read since
        for event in batch.events:
            if event.kv.mod_revision <= known:
                continue
            self.revision = event.kv.mod_revision
            if event.kind == "put":
                self.kvs[event.kv.key] = event.kv
            else:
                self.kvs.pop(event.kv.key, None)
