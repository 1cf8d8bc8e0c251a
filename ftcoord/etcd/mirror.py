"""A local copy of a span of keys that stays true: a watch, and a read of what was there when it began.

A mirror has no thread and no lock: its owner is handed the watch's items (`post`) and applies them where it likes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ftcoord.errors import ClientClosed, Compacted, EtcdUnavailable
from ftcoord.etcd.api import Batch, Began, Etcd, Get, KeyValue, RangeResult, Span, Watch, WatchItem

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """What became of a key: what it `was` before, None if it was not there, and is `now`, None if it is gone."""

    key: str
    was: KeyValue | None
    now: KeyValue | None


@dataclass(frozen=True, slots=True)
class Posted:
    """What a watch of a mirror delivered; `source` tells it from those that the mirror had before."""

    source: object
    item: WatchItem


class Mirror:
    """The keys of `span` at `revision`, once it is `synced`.

    `post(mirror, posted)` is called on the client's thread for all that the watch delivers; the owner then calls
    `apply(posted)` on its own thread, and `sync()` as long as `synced` is false, as it is again after a compaction.
    """

    def __init__(
        self, etcd: Etcd, span: Span, post: Callable[[Mirror, Posted], None], deletes_only: bool = False
    ) -> None:
        self.span = span
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 0
        self.synced = False
        self._etcd = etcd
        self._deletes_only = deletes_only
        self._post = post
        self._watch: Watch | None = None
        self._source: object = None
        self._stands = False

    @property
    def one(self) -> KeyValue | None:
        """The value of a mirror of a single key."""
        return self.kvs.get(self.span.start)

    def sync(self) -> None:
        """Watch from now on, or read the span if the watch stands. Raises EtcdError, and may then be called again."""
        if self._watch is None:
            self._start(0)
        elif self._stands:
            self.adopt(self._etcd.range(Get(self.span)))

    def begin(self, timeout: float) -> None:
        """Watch from now on, and wait until the watch stands; then `adopt()`. Raises EtcdError."""
        if self._stands:
            return
        items: list[WatchItem] = []
        told = threading.Event()

        def listen(item: WatchItem) -> None:
            items.append(item)
            told.set()

        self.close()
        self._start(0, listen)
        if not told.wait(timeout):
            self.close()
            raise EtcdUnavailable(f"etcd began no watch on {self.span.start!r} within {timeout:g} s: is it up?")
        if isinstance(items[0], Exception):
            self.close()
            raise items[0]
        self._stands = True

    def adopt(self, read: RangeResult) -> None:
        """Go on from a read of the whole span, say in a transaction; made since the watch stands, if there is one."""
        self.kvs = {kv.key: kv for kv in read.kvs}
        self.revision = read.revision
        self.synced = True
        if not self._stands:
            self.close()
            self._start(read.revision + 1)
            self.synced = self._stands = True

    def apply(self, posted: Posted) -> list[Change]:
        """Bring the copy up to date; what changed, in order.

        Raises what ended the watch, unless it was a compaction, or its client's end.
        """
        item = posted.item
        if posted.source is not self._source:
            return []
        if isinstance(item, Began):
            self._stands = True
        elif isinstance(item, Batch):
            # One that overtook the news that the watch stands is in the read that follows these.
            return self._apply_batch(item) if self._stands else []
        elif isinstance(item, (Compacted, ClientClosed)):
            log.debug("the watch of mirror %r is over: %s", self.span.start, item)
            self.close()
        else:
            self.close()
            raise item
        return []

    def learn(self, kv: KeyValue) -> None:
        """Take over what a transaction told of the key of a single-key mirror; the watch will not repeat it."""
        if kv.mod_revision > self.revision:
            self.revision = kv.mod_revision
            self.kvs[kv.key] = kv

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.synced = self._stands = False
        self._source = None
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

    def _apply_batch(self, batch: Batch) -> list[Change]:
        known, changes = self.revision, []  # what came before the read was delivered too
        for event in batch.events:
            if event.kv.mod_revision <= known:
                continue
            self.revision = event.kv.mod_revision
            was, now = self.kvs.get(event.kv.key), event.kv if event.kind == "put" else None
            if now is not None:
                self.kvs[now.key] = now
            else:
                self.kvs.pop(event.kv.key, None)
            changes.append(Change(event.kv.key, was, now))
        return changes
