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
        restarted: whether the watch has just begun, or begun again: until now changes may have been late. Changes that
            come with this are what a read found, and may have happened long ago.
    """

    changes: list[Change]
    restarted: bool = False


class Feed:
    """Delivers what is in `span`, then every change. If some were missed, or compacted, only their result.

    With `deletes_only` it then delivers only which of those that it delivered are gone: etcd is not asked for more.

    For one thread; only `wake()` may be called from others.
    """

    def __init__(self, etcd: Etcd, span: Span, *, deletes_only: bool = False) -> None:
        # The client's threads put into the inbox, `wake()` too; only the reader touches the mirror.
        self._inbox: concurrency.Queue[Posted | None] = concurrency.inbox()
        self._mirror = Mirror(etcd, span, lambda _mirror, posted: self._inbox.put(posted), deletes_only)

    @property
    def synced(self) -> bool:
        """Whether it has delivered all that was there when it began."""
        return self._mirror.synced

    def next(self, timeout: float) -> News | None:
        """What comes next; None if nothing came for `timeout` seconds, or on a `wake()`.

        Raises EtcdError: call it again after a pause. ClientClosed is final.
        """
        if not self._mirror.synced:
            before = dict(self._mirror.kvs)
            self._mirror.sync()
            if self._mirror.synced:
                return News(self._since(before), restarted=True)
        try:
            posted = self._inbox.get(timeout=max(timeout, 0))
        except concurrency.Empty:
            return None
        if posted is None:
            return None
        return News(self._mirror.apply(posted), restarted=isinstance(posted.item, Began))

    def wake(self) -> None:
        """End the `next()` that waits, or else the next call of it. From any thread."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._mirror.close()

    def _since(self, before: dict[str, KeyValue]) -> list[Change]:
        """How a read differs from what was known."""
        now = self._mirror.kvs
        gone = [Change(key, was, None) for key, was in before.items() if key not in now]
        return gone + [Change(key, before.get(key), kv) for key, kv in now.items() if before.get(key) != kv]
