"""What a manager tells others about itself: keys that lie under its replica's lease, and move on when that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftcoord import concurrency
from ftcoord.coordination.mailbox import put_all
from ftcoord.coordination.replica import Replica
from ftcoord.errors import LeaseLost
from ftcoord.etcd.api import Etcd, Put


class AdvertisedKeys:
    """The keys under a prefix that a replica keeps. Thread-safe.

    Args:
        etcd: the door to etcd.
        prefix: of the keys.
        replica: under whose lease they lie.
        closed: set it to make it give up.
    """

    def __init__(self, etcd: Etcd, replica: Replica, closed: concurrency.Event) -> None:
        self._etcd, self._replica, self._closed = etcd, replica, closed
        self._lock = concurrency.lock("AdvertisedKeys._lock")
        self._put: dict[str, tuple[int, str]] = {}

    @property
    def current(self) -> bool:
        """Whether all of them are under the lease that the replica lives under now."""
        lease = self._replica.lease
        return all(under == lease for under, _ in list(self._put.values()))

    def put(self, texts: Mapping[str, str], deadline: float) -> None:
        """Tell these too; mostly the same as before, and then nothing is written.

        Raises TimeoutError after the monotonic `deadline`, and EtcdError.
        """
        with self._lock:
            wanted = {key: text for key, (_, text) in self._put.items()} | dict(texts)

            def put_new(lease: int) -> None:
                new = {key: (lease, text) for key, text in wanted.items() if self._put.get(key) != (lease, text)}
                if new:
                    puts = [Put(key, text.encode(), lease) for key, (_, text) in new.items()]
                    put_all(self._etcd, puts, deadline)
                self._put.update(new)

            self.under_lease(put_new, deadline)

    def under_lease(self, write: Callable[[int], None], deadline: float) -> None:
        """Write something under the replica's lease; if that is lost, under the next one. Raises as `put` does."""
        while not self._closed.is_set():
            try:
                write(self._replica.lease)
                return
            except LeaseLost:
                self._replica.beat(deadline)
