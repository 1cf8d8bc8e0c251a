"""The changes of a span of keys, one by one, for a thread that reads them."""

from __future__ import annotations

from typing import NamedTuple

from ftcoord import concurrency
from ftcoord.etcd.api import Began, Etcd, KeyValue, Span
from ftcoord.primitives.mirror import Change, Mirror, Posted


class News(NamedTuple):
    """What a feed delivered.

    Args:
        changes: in order.
        anew: whether the watch has just begun, or begun again: until now changes may have been late. Changes that come
            with this are what a read found, and may have happened long ago.
    """

    changes: list[Change]
    anew: bool = False


class Feed:
    """Tells what is in `span`, then every change. Where some were missed, or compacted, only what came of them.

    Not thread-safe, but for `wake()`.
    """

    def __init__(self, etcd: Etcd, span: Span) -> None:
        self._inbox: concurrency.Queue[Posted | None] = concurrency.inbox()
        self._mirror = Mirror(etcd, span, lambda _mirror, posted: self._inbox.put(posted))

    @property
    def synced(self) -> bool:
        """Whether it has told all that was there when it began."""
        return self._mirror.synced

    def next(self, timeout: float) -> News | None:
        """What comes next; None if there was nothing for `timeout` seconds, or on a `wake()`.

        Raises EtcdError; call it again a little later.
        """
        if not self._mirror.synced:
            before = dict(self._mirror.kvs)
            self._mirror.sync()
            if self._mirror.synced:
                return News(self._since(before), anew=True)
        try:
            posted = self._inbox.get(timeout=max(timeout, 0))
        except concurrency.Empty:
            return None
        if posted is None:
            return None
        return News(self._mirror.apply(posted), anew=isinstance(posted.item, Began))

    def wake(self) -> None:
        """End the `next()` that waits, or the one to come. From any thread."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._mirror.close()

    def _since(self, before: dict[str, KeyValue]) -> list[Change]:
        """How a read differs from what was known."""
        now = self._mirror.kvs
        gone = [Change(key, was, None) for key, was in before.items() if key not in now]
        return gone + [Change(key, before.get(key), kv) for key, kv in now.items() if before.get(key) != kv]
