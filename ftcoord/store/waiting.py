"""Waiting for keys that are not there yet, or for the end of the fence: then nobody will write them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.errors import EtcdAuthError
from ftcoord.etcd.api import Batch, Began, Etcd, Get, KeyValue, Span, WatchItem
from ftcoord.etcd.retry import retry_until_answered
from ftcoord.primitives.exactly_once import round_over

_Items: TypeAlias = "concurrency.Queue[tuple[int, WatchItem | None]]"
_FENCE: Final = -1


class Waiting:
    """The calls of one store that wait, in any of its threads.

    Args:
        etcd: the etcd client.
        fence: a key; once it is gone, waiting calls raise RoundOver.
        closed: set it, and call `wake()`, to make all of them give up.
    """

    def __init__(self, etcd: Etcd, fence: str | None, closed: concurrency.Event) -> None:
        self._etcd, self._fence, self._closed = etcd, fence, closed  # never change
        # Any thread, one step of the list at a time: `wake()` goes through a copy, and whoever adds itself later finds
        # `closed` set.
        self._waiters: list[_Items] = []

    def wake(self) -> None:
        """End all waits, `closed` being set."""
        for items in list(self._waiters):
            items.put((_FENCE, None))

    def first(self, gets: Sequence[Get], deadline: float) -> KeyValue | None:
        """What one of `gets` finds, or the first value put later; None after the deadline or when the store was closed.

        Watches each of them, and the fence. Raises EtcdError, such as ClientClosed; and RoundOver when nothing is there
        and the fence is gone.
        """
        while not self._closed.is_set():
            found = self._watch(gets, deadline)
            if found is not None or concurrency.now() >= deadline:
                return found
        return None

    def _watch(self, gets: Sequence[Get], deadline: float) -> KeyValue | None:
        """As `first`, but None also when a watch ended."""
        items: _Items = concurrency.inbox()
        self._waiters.append(items)
        with ExitStack() as undo:
            undo.callback(self._waiters.remove, items)
            for index, get in enumerate(gets):
                undo.callback(self._etcd.watch(get.span, 0, partial(_put, items, index)).cancel)
            if self._fence is not None:
                tell = partial(_put, items, _FENCE)
                undo.callback(self._etcd.watch(Span(self._fence), 0, tell, deletes_only=True).cancel)
            return self._hear(items, gets, deadline)

    def _hear(self, items: _Items, gets: Sequence[Get], deadline: float) -> KeyValue | None:
        """Read once all watches stand, so that nothing is missed between reading and watching; then wait."""
        standing = set[int]()
        wanted = len(gets) + (self._fence is not None)
        while not self._closed.is_set():
            try:
                index, item = items.get(timeout=max(deadline - concurrency.now(), 0))
            except concurrency.Empty:
                return None
            found = None
            if isinstance(item, Began):
                standing.add(index)
                found = self._read(gets, deadline) if len(standing) == wanted else None
            elif isinstance(item, Batch):
                # A key may have been put before the fence went: a read shows both as they are at one revision.
                found = self._read(gets, deadline) if index == _FENCE else _put_in(item)
            elif isinstance(item, EtcdAuthError):
                raise item
            else:
                return None
            if found is not None:
                return found
        return None

    def _read(self, gets: Sequence[Get], deadline: float) -> KeyValue | None:
        """What is there now. Raises RoundOver if nothing is there and the fence is gone."""
        fences = [] if self._fence is None else [Get(Span(self._fence), keys_only=True)]
        reads = [*gets, *fences]
        result = retry_until_answered(lambda left: self._etcd.txn((), reads, timeout=left), deadline, self._closed)
        found = next((kv for index in range(len(gets)) if (kv := result.range(index).one)), None)
        if found is None and self._fence is not None and result.range(len(gets)).one is None:
            raise round_over(self._fence)
        return found


def _put(items: _Items, index: int, item: WatchItem) -> None:
    items.put((index, item))


def _put_in(batch: Batch) -> KeyValue | None:
    return next((event.kv for event in batch.events if event.kind == "put"), None)
