"""How much of a gateway one caller may take. Its protocol has no login, so a broken caller must not stop all others."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import unquote

from ftcoord import concurrency
from ftcoord.coordination.pending_call import PendingCall
from ftcoord.errors import ServerError

CALL_THREADS: Final = 1024
"""The most threads for calls. A quorum call holds a thread while it waits, and so does a replica's first beat while
etcd is unreachable. Threads are made when they are needed, so a high limit costs nothing. As many other threads talk to
etcd for the quorum calls, so that each call ends in time even if etcd does not answer."""
MOST_RPCS: Final = 2 * CALL_THREADS
"""The most calls in progress, including those that have no thread yet. gRPC refuses more."""
MOST_WAITING: Final = CALL_THREADS - 256
"""The most quorum calls that wait. The other threads are for beats, which are never delayed by calls that wait."""
MOST_WAITING_OF_ADDRESS: Final = 512
MOST_WAITING_OF_ID: Final = 4
"""The most quorum calls of one replica that wait: its next call ends the oldest one."""
MOST_IDS: Final = 1024
"""The most replicas that a gateway represents: each costs a lease, a thread, and a member in each decision."""
MOST_IDS_OF_ADDRESS: Final = 256
MOST_DESCRIPTORS: Final = 8192
RESERVED_DESCRIPTORS: Final = 128
"""File descriptors that are left for etcd's connection, logs and the page when callers have taken all of theirs."""


def most_connections() -> int:
    """How many callers may be connected at a time: half of the descriptors that this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - RESERVED_DESCRIPTORS) // 2, 8) if soft != resource.RLIM_INFINITY else MOST_RPCS


def raise_descriptor_limit() -> None:
    """Have this process open as many file descriptors as the system lets it, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def address_of(peer: str) -> str:
    """The address of a peer that gRPC names `ipv4:10.0.0.1:4711`, without the port."""
    return unquote(peer).rpartition(":")[0]


class Shares:
    """What is taken of a limited thing, by address. For whoever holds the lock of its owner.

    Args:
        what: what is limited, for the error.
        most, most_of_one: the limits in all, and for one address.
    """

    def __init__(self, what: str, most: int, most_of_one: int) -> None:
        self._what, self._most, self._most_of_one = what, most, most_of_one  # never change
        self._taken: Counter[str] = Counter()

    def take(self, address: str) -> None:
        """Raises ServerError if nothing is left for this address."""
        of_one = self._taken[address] >= self._most_of_one
        if of_one or self._taken.total() >= self._most:
            limit = f"{self._most_of_one} {self._what} of one address" if of_one else f"{self._most} {self._what}"
            raise ServerError(f"this gateway takes at most {limit}; use another gateway for the others")
        self._taken[address] += 1

    def give_back(self, address: str) -> None:
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]


class WaitingCalls:
    """The quorum calls that wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("WaitingCalls._lock")  # guards all below
        self._calls: dict[str, dict[PendingCall, str]] = {}  # of each replica, the oldest first, with their addresses
        self._shares = Shares("quorum calls that wait", MOST_WAITING, MOST_WAITING_OF_ADDRESS)

    @contextmanager
    def waiting(self, replica_id: str, address: str, call: PendingCall) -> Iterator[None]:
        """While this is open, the call waits. Ends the oldest call of a replica that has too many. Raises ServerError
        if too many wait."""
        superseded = None
        with self._lock:
            calls = self._calls.get(replica_id, {})
            if len(calls) >= MOST_WAITING_OF_ID:
                superseded = next(iter(calls))
                self._remove(replica_id, superseded)
            self._shares.take(address)
            self._calls.setdefault(replica_id, {})[call] = address
        if superseded is not None:
            superseded.leave()
        try:
            yield
        finally:
            with self._lock:
                self._remove(replica_id, call)

    def _remove(self, replica_id: str, call: PendingCall) -> None:
        calls = self._calls.get(replica_id, {})
        if call in calls:
            self._shares.give_back(calls.pop(call))
        if not calls:
            self._calls.pop(replica_id, None)
