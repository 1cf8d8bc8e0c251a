"""What was read of keys, kept for the next look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ftcoord.etcd.api import KeyValue

T = TypeVar("T")


class Memo(Generic[T]):
    """Reads each key once, as long as it does not change. For one thread.

    The whole of a key counts, not its revision alone: an etcd that lost writes gives revisions to others.

    Args:
        read: what to make of a key. Must be pure. What it raises is not kept.
    """

    def __init__(self, read: Callable[[KeyValue], T]) -> None:
        self._read = read  # never changes
        self._known: dict[str, tuple[KeyValue, T]] = {}

    def of(self, kvs: Iterable[KeyValue]) -> list[T]:
        """What was made of each, in the order given: the same objects as the last time, where the keys are the same.
        All other keys are forgotten."""
        before, known, found = self._known, dict[str, tuple[KeyValue, T]](), list[T]()
        for kv in kvs:
            one = before.get(kv.key)
            if one is None or one[0] != kv:
                one = kv, self._read(kv)
            known[kv.key] = one
            found.append(one[1])
        self._known = known
        return found
