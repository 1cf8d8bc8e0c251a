"""Kill orders for replicas behind a gateway.

torchft's own managers do not use etcd. So the gateway forwards an order to them by torchft's protocol, as torchft's
lighthouse does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.coordination.failure import TRANSPORT_ERROR
from ftcoord.coordination.kills import OrderedKill, watch_kills
from ftcoord.coordination.manager_client import place_of
from ftcoord.coordination.native_manager import NativeManager
from ftcoord.coordination.rank_frames import KillOrder
from ftcoord.errors import ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd
from ftcoord.pool import DaemonPool
from ftcoord.primitives.informer import Informer

log = logging.getLogger(__name__)

HAND_ON_TIMEOUT: Final = 5.0
"""Seconds that a manager may take to exit after its order was read, including the time in the queue."""
THREADS: Final = 16
"""The most orders that are forwarded at a time. Managers that do not answer hold a thread until their deadline."""


class GatewayKills(Closing):
    """Forwards kill orders, from `begin()` to `close()`.

    Args:
        etcd: the client; not closed here.
        prefix: the prefix of the job's quorums.
        manager_of: returns the address of a member's manager; None for a member of another gateway.

    An order is claimed before it is forwarded, so a withdrawn order is never forwarded. It is taken when the manager's
    process has ended, or the manager has accepted it. If the manager cannot be reached, the order stays, so the sender
    sees that it failed. If the watch fails, the error is logged and the replicas keep training, but nobody can kill
    them through etcd until the gateway is restarted.
    """

    def __init__(self, etcd: Etcd, prefix: str, manager_of: Callable[[str], str | None]) -> None:
        self._etcd, self._prefix, self._manager_of = etcd, prefix, manager_of  # never change
        self._lock = concurrency.lock("GatewayKills._lock")
        self._informer: Informer | None = None  # guarded by _lock, as the next
        self._closed = concurrency.event()  # set under _lock
        self._seen: set[tuple[str, int]] = set()  # orders that are there, by `_name`; only the watch's thread
        self._pool = DaemonPool(THREADS, "ftcoord-killing")

    def begin(self) -> None:
        """Start to watch the orders; later calls do nothing. Call it with the first replica: before, there is nobody to
        kill. Raises ThreadNotStarted, and may then be called again."""
        with self._lock:
            if self._informer is None and not self._closed.is_set():
                self._informer = watch_kills(self._etcd, self._prefix, self._obey, _note_failure)

    def look_again(self) -> None:
        """Check all orders again: the manager of one of them may be known now. Does not block."""
        with self._lock:
            if self._informer is not None:
                self._informer.report_again()

    def close(self) -> None:
        """Stop. Waits a few seconds at most for orders that are being forwarded; queued orders stay untaken.
        Idempotent."""
        with self._lock:
            self._closed.set()
            informer, self._informer = self._informer, None
        if informer is not None:
            informer.close()
        self._pool.close()

    def _obey(self, orders: Sequence[OrderedKill]) -> None:
        """On the watch's thread, which does not wait for managers.

        Each order is forwarded once: a manager that was restarted since, under the same name and lease, must not get
        the order for its predecessor.
        """
        self._seen.intersection_update(map(_name, orders))
        for order in orders:
            if _name(order) in self._seen or (address := self._manager_of(order.member)) is None:
                continue
            self._seen.add(_name(order))
            deadline = concurrency.now() + HAND_ON_TIMEOUT
            try:
                self._pool.submit(self._hand_on, address, order, deadline)
            except ThreadNotStarted as error:
                log.warning("the order to end the manager at %s is not handed on: %s", neutral(address), error)

    def _hand_on(self, address: str, order: OrderedKill, deadline: float) -> None:
        """On a thread of the pool, perhaps long after the order came."""
        if self._closed.is_set():
            return
        shown, message = neutral(address), neutral(order.message)
        if concurrency.now() >= deadline:
            log.warning("the order to end the manager at %s is not handed on: too many came before it", shown)
            return
        if not order.claim():
            log.info("the order to end the manager at %s was withdrawn", shown)
            return
        problem = _kill(address, order.message, deadline)
        if problem:
            log.warning("the manager at %s did not take the order to end (%s): %s", shown, message, problem)
        else:
            log.info("the manager at %s was ended: %s", shown, message)
            order.take()


def _name(order: OrderedKill) -> tuple[str, int]:
    """Which order it is: each lies under a lease of its own, and a claim does not change that."""
    return order.kv.key, order.kv.lease


def _kill(address: str, message: str, deadline: float) -> str:
    """Make a manager exit before the monotonic `deadline`; returns why it did not, or an empty text."""
    try:
        manager = NativeManager(*place_of(address), deadline)
    except (ValueError, OSError) as error:  # no address; nobody there; TimeoutError
        return str(error)
    try:
        answer = manager.call(KillOrder(message), deadline)
    except TimeoutError as error:
        return str(error)
    finally:
        manager.close()
    # It looks like an error of the transport when the process has ended before it answered.
    return "" if isinstance(answer, bytes) or answer == TRANSPORT_ERROR else answer.message


def _note_failure(error: BaseException) -> None:
    log.error("orders to kill replicas are not handed on any longer: %s; start the gateway again", error)
