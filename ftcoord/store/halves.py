"""The two halves of a store that is written in Python, who holds the C++ half, and how a store ends.

torch passes on an object in C++ (to PrefixStore, to process groups), which calls the methods of the Python object. It
does not keep the Python object alive, and nothing notifies Python when the last holder in C++ releases it. But the C++
object counts its holders in its first bytes, and the Python object is one of them while it lives.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import Final

from torch.distributed import PrefixStore, Store

from ftcoord import concurrency
from ftcoord.etcd.client import EtcdClient
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.exactly_once import ExactlyOnceWriter
from ftcoord.store.waiting import Waiting

HOLDERS_CHECK_INTERVAL: Final = 0.5
"""Seconds between two checks whether C++ still refers to a store that Python has freed."""
_WORDS: Final = 6
"""Words of 32 bits at the start of any C++ store: a pointer, its counts (c10's intrusive_ptr_target), its time-out."""


class _Probe(Store):
    """A store that nobody uses."""


def holders(store: Store) -> int | None:
    """How many hold the C++ half of a store, its Python half among them; None where that cannot be told."""
    words = _words(store)
    return None if _PLACE is None or words is None else words[_PLACE]


class StoreResources:
    """What a store has to close. Does not refer to the store, so that the store's finalizer can pass this on."""

    def __init__(
        self, changes: ExactlyOnceWriter, waiting: Waiting, client: EtcdClient | None, closed: concurrency.Event
    ) -> None:
        self._changes, self._waiting, self._client, self.closed = changes, waiting, client, closed  # never change
        self._owner = OwnerProcess("this store belongs to the parent process")
        self.ending = concurrency.Ending(self._close)
        self.held_in_cpp = concurrency.of_process(_HeldInCpp)  # here, for it takes a lock

    @property
    def is_ours(self) -> bool:
        """False in a forked child of the process that opened them."""
        return self._owner.is_current

    def close(self) -> None:
        """Wake all that wait, let the lease expire, and close the client if it is the store's own. Idempotent."""
        self.ending.close()

    def _close(self) -> None:
        self.closed.set()
        self._waiting.wake()
        self._changes.close()
        if self._client is not None:
            self._client.close()


class _HeldInCpp:
    """The stores of this process that C++ may call, though Python has freed them; and the thread that sees them off."""

    def __init__(self) -> None:
        self._held: deque[tuple[list[Store], StoreResources]] = deque()  # finalizers append, the thread removes
        self._thread = concurrency.DetachedThreads(self._see_off, self._held, 1)

    def put(self, box: list[Store], resources: StoreResources) -> None:
        """From a finalizer. The store in the box is closed when nothing else holds it."""
        self._held.append((box, resources))
        self._thread.start()

    def _see_off(self) -> None:
        """A finalizer runs once, so a box stays until its store is closed, though the thread fails."""
        while self._held:
            for _ in range(len(self._held)):
                box, resources = self._held[0]
                if _is_over(box, resources):
                    resources.close()
                    self._held.popleft()
                    box.clear()
                else:
                    self._held.rotate(-1)
            if self._held:
                concurrency.sleep(HOLDERS_CHECK_INTERVAL)


_kept: list[Store] = []
"""Stores that C++ may call, and whose last holder cannot be noticed: they stay. Any thread appends."""


def let_go(store: Store, resources: StoreResources) -> None:
    """For the finalizer of a store: close it, or keep it as long as C++ may call it, and close it then."""
    held = holders(store)
    if held == 1:
        resources.ending.close_soon()
    elif held is not None and resources.is_ours:
        resources.held_in_cpp.put([store], resources)
    else:
        _kept.append(store)


def _is_over(box: list[Store], resources: StoreResources) -> bool:
    """Whether C++ does not hold it, and Python has closed it or holds it in this box alone.

    Python may have it again: `PrefixStore.underlying_store` gives it back.
    """
    return holders(box[0]) == 1 and (resources.closed.is_set() or sys.getrefcount(box[0]) <= _ALONE)


def _find_place() -> int | None:
    """Which of the words is the count of holders. Tried out, not known: one that goes with those who hold it."""
    probe, held, seen = _Probe(), list[Store](), list[list[int]]()
    for _ in range(3):
        words = _words(probe)
        if words is None:
            return None
        seen.append(words)
        held.append(PrefixStore("", probe))
    held.clear()
    seen.append(_words(probe) or [0] * _WORDS)
    found = [place for place in range(_WORDS) if [words[place] for words in seen] == [1, 2, 3, 1]]
    return found[0] if len(found) == 1 else None


def _words(store: Store) -> list[int] | None:
    """The first words of the C++ half; None if this Python half is not laid out as pybind11 does with one C++ half.

    That is: behind the head of each object the address of the C++ object, and then its holder, which is one pointer to
    the same.
    """
    value, holder = (ctypes.c_size_t * 2).from_address(id(store) + object.__basicsize__)
    if not value or value != holder:
        return None
    return list((ctypes.c_uint32 * _WORDS).from_address(value))


def _references_of_a_list() -> int:
    box = [object()]
    return sys.getrefcount(box[0])


_PLACE: Final = _find_place()
_ALONE: Final = _references_of_a_list()
"""What `sys.getrefcount` says of what is in one list and nowhere else; that depends on the interpreter."""
