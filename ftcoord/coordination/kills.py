"""Ends a manager's process through etcd, by an order to a member of the job.

The member's manager takes the order, or the gateway that represents it, by deleting its key. The order is attached to a
lease of its sender.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.coordination.rank_group import end_process
from ftcoord.core.layout import kill_key, kills_span, member_key, member_of, members_span
from ftcoord.core.quorum_records import parse_replica
from ftcoord.errors import EtcdError, NotInQuorum, StateError
from ftcoord.etcd.api import Delete, Etcd, Get, KeyValue, Op, Put, Span, exists, unchanged
from ftcoord.etcd.retry import UNANSWERED, retry_until_answered
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror

log = logging.getLogger(__name__)

TAKE_TIMEOUT: Final = 1.0
"""Seconds that a manager tries to delete its order before it ends anyway."""
LEASE_MARGIN: Final = 5
"""Seconds that an order outlives its sender's timeout."""


@dataclass(frozen=True, slots=True)
class OrderedKill:
    """An order to end a process, as it was seen in etcd: it may have been withdrawn since.

    Args:
        etcd: the client.
        kv: its key.
    """

    etcd: Etcd
    kv: KeyValue

    @property
    def member(self) -> str:
        """Whose process is to end."""
        return member_of(self.kv.key)

    @property
    def message(self) -> str:
        """Why."""
        return self.kv.value.decode(errors="replace")

    def take(self) -> bool:
        """Delete it, so that whoever gave it knows that it was taken.

        False if it stands no longer: whoever gave it was told that nobody took it. True also if etcd does not answer
        within TAKE_TIMEOUT.
        """
        key = self.kv.key
        guard, delete = unchanged(key, self.kv.mod_revision), Delete(Span(key))
        try:
            return self.etcd.txn([guard], [delete], timeout=TAKE_TIMEOUT).succeeded
        except EtcdError as error:
            log.debug("it is not known whether the order %r still stood: %s", key, error)
            return True


Obey: TypeAlias = Callable[[OrderedKill], None]
"""Handles an order to any member. It may be called several times for one order."""


def watch_kills(etcd: Etcd, prefix: str, obey: Obey, failed: Callable[[BaseException], None]) -> Informer:
    """Call `obey` with every order of the job, on the watch's thread.

    All orders are watched, because there are hardly any; so a member that changes its lease needs no new watch.
    `failed` is called when the watch fails.
    """

    def look(orders: Mirror) -> None:
        for kv in orders.kvs.values():
            obey(OrderedKill(etcd, kv))

    return Informer(etcd, [kills_span(prefix)], look, "ftcoord-kills", failed)


def ends_here(is_mine: Callable[[str], bool]) -> Obey:
    """End this process when that is ordered of a member for which `is_mine` holds.

    A process that could not run for a while (it was stopped, or C code held the interpreter) sees orders that were
    withdrawn meanwhile: those it does not obey.
    """

    def obey(order: OrderedKill) -> None:
        if is_mine(order.member) and order.take():
            end_process(order.message)

    return obey


def order_kill(
    etcd: Etcd, prefix: str, replica_id: str, message: str, deadline: float, also: Sequence[Op] = ()
) -> None:
    """End the process of the newest manager with this replica id; wait until it has taken the order or is gone. A later
    one is left alone. The operations in `also` are part of the order's transaction.

    Raises NotInQuorum if there is no such replica, TimeoutError after the monotonic `deadline`, and EtcdError.
    """
    member = _newest(etcd, prefix, replica_id)
    if member is None:
        raise NotInQuorum(replica_id)
    lease = etcd.grant(math.ceil(max(deadline - concurrency.now(), 0)) + LEASE_MARGIN)
    try:
        order = Put(kill_key(prefix, member), message.encode(), lease.id)
        retry_until_answered(partial(_put_order, etcd, prefix, member, [order, *also]), deadline, concurrency.event())
        _await_taken(etcd, prefix, member, deadline)
    except UNANSWERED as error:
        raise TimeoutError(str(error)) from None
    finally:
        with contextlib.suppress(EtcdError):  # it expires by itself
            etcd.revoke(lease.id, timeout=TAKE_TIMEOUT)


def _newest(etcd: Etcd, prefix: str, replica_id: str) -> str | None:
    """The newest member with that replica id."""
    for kv in etcd.range(Get(members_span(prefix), order="newest")).kvs:
        with contextlib.suppress(StateError):  # no member
            if parse_replica(kv.key, kv.value).request.replica_id == replica_id:
                return member_of(kv.key)
    return None


def _put_order(etcd: Etcd, prefix: str, member: str, order: Sequence[Op], timeout: float) -> None:
    """Write the order, unless the member is gone. Writing it twice is harmless."""
    etcd.txn([exists(member_key(prefix, member))], order, timeout=timeout)


def _await_taken(etcd: Etcd, prefix: str, member: str, deadline: float) -> None:
    over, failures = concurrency.event(), list[BaseException]()

    def look(order: Mirror, there: Mirror) -> None:
        if order.one is None or there.one is None:
            over.set()

    def fail(error: BaseException) -> None:
        failures.append(error)
        over.set()

    with Informer(
        etcd, [Span(kill_key(prefix, member)), Span(member_key(prefix, member))], look, "ftcoord-killing", fail
    ):
        if not over.wait(max(deadline - concurrency.now(), 0)):
            raise TimeoutError(
                "the order was not taken: only a ManagerServer takes it, or its gateway, while etcd is there"
            )
    if failures:
        raise failures[0]
