"""What a manager publishes about itself: keys under its replica's lease, which move along when that lease changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftcoord import concurrency
from ftcoord.coordination.mailbox import put_all
from ftcoord.coordination.replica import Replica
from ftcoord.errors import LeaseLost
from ftcoord.etcd.api import Etcd, Put


class AdvertisedKeys:
    """Keys that are kept under a replica's lease. Thread-safe.

    Args:
        etcd: the client.
        replica: the owner of the lease.
        closed: set it to make `put` and `under_lease` return without having written.
    """

    def __init__(self, etcd: Etcd, replica: Replica, closed: concurrency.Event) -> None:
        self._etcd, self._replica, self._closed = etcd, replica, closed
        # One writes at a time: else two that move the keys to a new lease could leave an old text behind. It is held
        # over requests, so callers wait for it with a time-out.
        self._writing = concurrency.lock("AdvertisedKeys._writing")
        self._written: dict[str, tuple[int, str]] = {}  # lease and text by key; changed under _writing, read by any

    @property
    def current(self) -> bool:
        """Whether all of them are under the lease that the replica has now."""
        lease = self._replica.lease
        return all(under == lease for under, _ in list(self._written.values()))

    def put(self, texts: Mapping[str, str], deadline: float) -> None:
        """Publish these too. Writes only what is not there yet under the current lease: mostly nothing.

        Raises TimeoutError after the monotonic `deadline`, and EtcdError.
        """
        with concurrency.held(self._writing, deadline, TimeoutError("another write of this manager was not done")):
            wanted = {key: text for key, (_, text) in self._written.items()} | dict(texts)

            def put_new(lease: int) -> None:
                new = {key: (lease, text) for key, text in wanted.items() if self._written.get(key) != (lease, text)}
                if new:
                    puts = [Put(key, text.encode(), lease) for key, (_, text) in new.items()]
                    put_all(self._etcd, puts, deadline)
                self._written.update(new)

            self.under_lease(put_new, deadline)

    def under_lease(self, write: Callable[[int], None], deadline: float) -> None:
        """Write something under the replica's lease; if that is lost, under the next one. Raises as `put` does."""
        while not self._closed.is_set():
            try:
                write(self._replica.lease)
                return
            except LeaseLost:
                self._replica.beat(deadline)  # which takes a new lease
