"""The Python half and the C++ half of a store: who refers to the C++ half, and when to close the store.

torch hands a C++ object on (to PrefixStore, to process groups), which calls the methods of the Python object. It does
not keep the Python object alive, and nothing notifies Python when the last C++ reference goes. But the C++ object has a
reference count in its first bytes, and the Python object holds one reference while it lives.
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
"""32-bit words at the start of any C++ store: a pointer, its counts (c10's intrusive_ptr_target), its timeout."""


class _Probe(Store):
    """A store that nobody uses."""


def holders(store: Store) -> int | None:
    """The reference count of a store's C++ half, including its Python half; None if it cannot be determined."""
    words = _words(store)
    return None if _PLACE is None or words is None else words[_PLACE]


class StoreResources:
    """The resources of a store. Does not refer to the store, so that the store's finalizer can hand this on."""

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
        """Wake all waiting calls, let the lease expire, and close the client if the store made it. Idempotent."""
        self.ending.close()

    def _close(self) -> None:
        self.closed.set()
        self._waiting.wake()
        self._changes.close()
        if self._client is not None:
            self._client.close()


class _HeldInCpp:
    """Stores of this process that Python has freed but C++ may still call, and the thread that closes them."""

    def __init__(self) -> None:
        self._held: deque[tuple[list[Store], StoreResources]] = deque()  # finalizers append, the thread removes
        self._thread = concurrency.DetachedThreads(self._see_off, self._held, 1)

    def put(self, box: list[Store], resources: StoreResources) -> None:
        """For a finalizer. The store in the box is closed when nothing else refers to it."""
        self._held.append((box, resources))
        self._thread.start()

    def _see_off(self) -> None:
        """A finalizer runs only once, so a box stays until its store is closed, even if the thread fails."""
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
"""Stores that C++ may call, and whose last reference cannot be noticed: they stay. Any thread appends."""


def let_go(store: Store, resources: StoreResources) -> None:
    """For the finalizer of a store: close it when C++ cannot call it any more."""
    held = holders(store)
    if held == 1:
        resources.ending.close_soon()
    elif held is not None and resources.is_ours:
        resources.held_in_cpp.put([store], resources)
    else:
        _kept.append(store)


def _is_over(box: list[Store], resources: StoreResources) -> bool:
    """Whether C++ does not refer to the store, and Python has closed it or refers to it from this box alone.

    Python may have it again: `PrefixStore.underlying_store` gives it back.
    """
    return holders(box[0]) == 1 and (resources.closed.is_set() or sys.getrefcount(box[0]) <= _ALONE)


def _find_place() -> int | None:
    """Which of the words is the reference count. Found by trial: the word that changes with the references."""
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
    """The first words of the C++ half; None if the Python half does not have pybind11's layout for one C++ half.

    That layout is: the object's header, the address of the C++ object, and its holder, a pointer to the same address.
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
"""What `sys.getrefcount` returns for an object that only one list refers to. It depends on the interpreter."""
