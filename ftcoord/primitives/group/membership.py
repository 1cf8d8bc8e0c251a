"""One incarnation of a member: a lease, a place in the group, and the latest decided record."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ftcoord.core.lease import SessionState
from ftcoord.errors import EtcdError, LeaseLost, StateError
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.primitives.group.group import Group
from ftcoord.primitives.group.policy import Policy
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

T = TypeVar("T")


class Membership(Generic[T]):
    """Takes a lease and begins to watch at once; joins the group with the first `enter()`.

    Args:
        etcd: the door to etcd.
        prefix: of the group.
        policy: what to decide when this member is the decider.
        parse: reads the decided record; `parse(key, value)`.
        changed: notified whenever `record`, `problem` or `lost` may have changed.
        ttl: of the lease, in seconds.
        record_ttl: seconds that the decided record outlives the last decider.
        timeout: seconds for each request.
        restless: see `Group`.

    Raises EtcdError when it can have no lease or no watch.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        policy: Policy,
        parse: Callable[[str, bytes], T],
        changed: threading.Condition,
        *,
        ttl: int,
        record_ttl: int,
        timeout: float,
        restless: bool = False,
    ) -> None:
        self.record: T | None = None
        self.record_lease = 0
        self.problem: StateError | None = None
        self.lost = False
        self._parse, self._changed, self._timeout = parse, changed, timeout
        self.session = Session(etcd, ttl, self._on_state)
        self.group = Group(
            etcd, self.session, prefix, policy, record_ttl, self._on_decided, failed=self.lose, restless=restless
        )
        self.id = self.group.id
        try:
            self.group.prepare(timeout)
        except EtcdError:
            self.leave(timeout)
            raise

    @property
    def entered(self) -> bool:
        """Whether it has a key in the group."""
        return self.group.entered

    def enter(self, value: bytes, timeout: float | None = None) -> None:
        """Join, or ask for something else. Raises EtcdError; after LeaseLost, make a new membership."""
        try:
            self.group.enter(value, timeout or self._timeout)
        except LeaseLost:
            self.lose()
            raise

    def enter_soon(self, value: bytes, timeout: float, done: Callable[[bool], None]) -> None:
        """See `Group.enter_soon`."""
        self.group.enter_soon(value, timeout, done)

    def leave(self, timeout: float) -> None:
        """Tell the others at once by giving up the lease; never raises for an etcd that is out of reach."""
        self.group.close()
        try:
            self.session.close(timeout)
        except EtcdError as error:
            log.debug("the lease was not given up, it expires by itself: %s", error)

    def lose(self) -> None:
        """Take part no more; the lease expires by itself."""
        self.group.close()
        self.session.orphan()
        with self._changed:
            self.lost = True
            self._changed.notify_all()

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.SUSPENDED:
            log.warning(
                "etcd has not renewed the lease of member %s in time: what runs goes on, as far as it can", self.id
            )
        elif state is SessionState.CONNECTED:
            log.warning("etcd renews the lease of member %s again", self.id)
        if state is SessionState.LOST:
            self.lose()

    def check(self) -> None:
        """Have this member's key put back if it is gone, though its lease is not."""
        self.group.check()

    def _on_decided(self, kv: KeyValue | None) -> None:
        try:
            record = self._parse(kv.key, kv.value) if kv else self.record
        except StateError as error:
            log.warning("%s", error)
            with self._changed:
                self.problem = error
                self._changed.notify_all()
            raise
        with self._changed:
            self.record, self.problem = record, None
            if kv is not None:  # else it was deleted: the last one still counts, and its lease may live
                self.record_lease = kv.lease
            self._changed.notify_all()
