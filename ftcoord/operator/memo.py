"""Values that are derived from keys, kept for the next read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ftcoord.etcd.api import KeyValue

T = TypeVar("T")


class Memo(Generic[T]):
    """Derives a value from each key, once until the key changes. For one thread.

    Keys are compared as a whole, not by their revisions: an etcd that lost writes assigns revisions again.

    Args:
        read: derives the value of a key. It must be pure. What it raises is not kept.
    """

    def __init__(self, read: Callable[[KeyValue], T]) -> None:
        self._read = read  # never changes
        self._known: dict[str, tuple[KeyValue, T]] = {}

    def of(self, kvs: Iterable[KeyValue]) -> list[T]:
        """The values of these keys, in order: the same objects as before for unchanged keys. Others are forgotten."""
        before, known, found = self._known, dict[str, tuple[KeyValue, T]](), list[T]()
        for kv in kvs:
            one = before.get(kv.key)
            if one is None or one[0] != kv:
                one = kv, self._read(kv)
            known[kv.key] = one
            found.append(one[1])
        self._known = known
        return found
