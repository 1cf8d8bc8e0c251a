"""Waits for keys that do not exist yet, or for the end of the fence: after that nobody will write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.errors import EtcdAuthError
from ftcoord.etcd.api import Batch, Began, Etcd, Get, KeyValue, RangeResult, Span, WatchItem
from ftcoord.etcd.reading import read_snapshot
from ftcoord.etcd.retry import backoff, retry_until_answered
from ftcoord.primitives.write_once import Fence, round_over

_Items: TypeAlias = "concurrency.Queue[tuple[int, WatchItem | None]]"
_FENCE: Final = -1
Take: TypeAlias = Callable[[Sequence[KeyValue]], bool]
"""Takes keys as they are; returns whether it has all that it needs."""


class Waiting:
    """The waiting calls of one store. Thread-safe.

    Args:
        etcd: the etcd client.
        fence: once it is gone, waiting calls raise RoundOver.
        closed: set it, and call `wake()`, to make all of them give up.
    """

    def __init__(self, etcd: Etcd, fence: Fence | None, closed: concurrency.Event) -> None:
        self._etcd, self._fence, self._closed = etcd, fence, closed  # never change
        # Any thread, one step of the list at a time: `wake()` goes through a copy, and whoever adds itself later finds
        # `closed` set.
        self._waiters: list[_Items] = []

    def wake(self) -> None:
        """End all waits. Set `closed` before."""
        for items in list(self._waiters):
            items.put((_FENCE, None))

    def first(self, gets: Sequence[Get], deadline: float) -> KeyValue | None:
        """What one of `gets` finds, or the first value put later; None after the deadline, or if the store is closed.

        Raises as `until` does.
        """
        found = list[KeyValue]()

        def take(kvs: Sequence[KeyValue]) -> bool:
            found.extend(kvs[:1])
            return bool(found)

        return found[0] if self.until(gets, take, deadline) else None

    def until(self, gets: Sequence[Get], take: Take, deadline: float) -> bool:
        """Pass `take` what `gets` find, and then everything that is put into their spans, until it returns True.

        Returns whether it did: False after the deadline, or if the store was closed. `take` may get a key twice.

        Watches each of the spans, and the fence. Raises EtcdError, such as ClientClosed, or EtcdUnavailable when etcd
        does not answer at the deadline; and RoundOver when the fence is gone and `take` still lacks keys.
        """
        ended = 0
        while not self._closed.is_set():
            has_all = self._watch(gets, take, deadline)
            if has_all or concurrency.now() >= deadline:
                return has_all
            ended += 1  # a watch: perhaps the next one ends too
            self._closed.wait(min(backoff(ended), max(deadline - concurrency.now(), 0)))
        return False

    def _watch(self, gets: Sequence[Get], take: Take, deadline: float) -> bool:
        """As `until`, but also returns False when a watch ended."""
        items: _Items = concurrency.inbox()
        self._waiters.append(items)
        with ExitStack() as undo:
            undo.callback(self._waiters.remove, items)
            for index, get in enumerate(gets):
                undo.callback(self._etcd.watch(get.span, 0, partial(_put, items, index)).cancel)
            if self._fence is not None:
                tell = partial(_put, items, _FENCE)
                undo.callback(self._etcd.watch(Span(self._fence.key), 0, tell, deletes_only=True).cancel)
            return self._hear(items, gets, take, deadline)

    def _hear(self, items: _Items, gets: Sequence[Get], take: Take, deadline: float) -> bool:
        """Read after all watches are established, so that no change between them is missed; then wait."""
        standing = set[int]()
        wanted = len(gets) + (self._fence is not None)
        while not self._closed.is_set():
            try:
                index, item = items.get(timeout=max(deadline - concurrency.now(), 0))
            except concurrency.Empty:  # nobody put them, or etcd went away and could not tell
                return self._read(gets, take, deadline)
            has_all = False
            if isinstance(item, Began):
                standing.add(index)
                has_all = len(standing) == wanted and self._read(gets, take, deadline)
            elif isinstance(item, Batch):
                # A key may have been put before the fence went: a read shows both as they are at one revision.
                has_all = self._read(gets, take, deadline) if index == _FENCE else _take_puts(item, take)
            elif isinstance(item, EtcdAuthError):
                raise item
            else:
                return False
            if has_all:
                return True
        return False

    def _read(self, gets: Sequence[Get], take: Take, deadline: float) -> bool:
        """Pass `take` what exists now. Raises RoundOver if that is not all and the fence is gone."""
        fences = [] if self._fence is None else [Get(Span(self._fence.key))]
        found = read_snapshot(partial(self._range, deadline), lambda then: then.ranges([*gets, *fences]))
        has_all = take([kv for one in found[: len(gets)] for kv in one.kvs])
        if not has_all and self._fence is not None and not self._fence.stands(found[-1].one):
            raise round_over(self._fence)
        return has_all

    def _range(self, deadline: float, get: Get) -> RangeResult:
        return retry_until_answered(lambda left: self._etcd.range(get, timeout=left), deadline, self._closed)


def _put(items: _Items, index: int, item: WatchItem) -> None:
    items.put((index, item))


def _take_puts(batch: Batch, take: Take) -> bool:
    puts = [event.kv for event in batch.events if event.kind == "put"]
    return bool(puts) and take(puts)
