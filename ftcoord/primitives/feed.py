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
        restarted: whether the watch has just started or restarted: changes until now may have been late. Changes that
            come with this are from a read, and may have happened long ago.
    """

    changes: list[Change]
    restarted: bool = False


class Feed:
    """Delivers the present keys of `span`, then every change. If changes were missed, or compacted, delivers their
    result.

    With `deletes_only` it delivers, after the present keys, only which of them are gone; etcd sends no other changes.

    For one thread; only `wake()` may be called from others.
    """

    def __init__(self, etcd: Etcd, span: Span, *, deletes_only: bool = False) -> None:
        # The client's threads put into the inbox, `wake()` too; only the reader touches the mirror.
        self._inbox: concurrency.Queue[Posted | None] = concurrency.inbox()
        self._mirror = Mirror(etcd, span, lambda _mirror, posted: self._inbox.put(posted), deletes_only)

    @property
    def synced(self) -> bool:
        """Whether it has delivered everything that existed when it started."""
        return self._mirror.synced

    def next(self, timeout: float) -> News | None:
        """The next changes; None if there were none for `timeout` seconds, or on `wake()`.

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
