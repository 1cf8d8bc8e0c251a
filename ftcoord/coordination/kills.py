"""Ends a manager's process through etcd, by an order to a member of the job.

The member's manager takes the order, or the gateway that represents it, by deleting its key. The order is attached to a
lease of its sender. So is its mark, which the same transaction writes and nobody takes: it shows a sender that got no
answer whether the order was written.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.coordination.rank_group import end_process
from ftcoord.core.layout import kill_key, kill_mark_key, kills_span, member_key, member_of, members_span
from ftcoord.core.quorum_records import parse_replica
from ftcoord.errors import EtcdError, NotInQuorum, StateError
from ftcoord.etcd.api import Compare, Delete, Etcd, Get, KeyValue, Op, Put, Span, absent, exists, unchanged
from ftcoord.etcd.retry import UNANSWERED, TimeLimit, retry_until_answered
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror

log = logging.getLogger(__name__)

LONGEST_REQUEST: Final = 5.0
"""Seconds that one request of an order may take."""
TAKE_TIMEOUT: Final = 1.0
"""Seconds that a manager tries to delete its order before it exits anyway, and that a sender tries to withdraw one."""
LEASE_MARGIN: Final = 5
"""Seconds that an order outlives its sender's timeout."""


@dataclass(frozen=True, slots=True)
class OrderedKill:
    """An order to end a process, as it was read from etcd. It may have been withdrawn since.

    Args:
        etcd: the client.
        kv: the order's key and value.
    """

    etcd: Etcd
    kv: KeyValue

    @property
    def member(self) -> str:
        """The member whose process it is."""
        return member_of(self.kv.key)

    @property
    def message(self) -> str:
        """The reason."""
        return self.kv.value.decode(errors="replace")

    def take(self) -> bool:
        """Delete the order, which tells the sender that it was taken.

        Returns False if the order was withdrawn: the sender was told that nobody took it. Returns True also if etcd
        does not answer within TAKE_TIMEOUT.
        """
        return self._stood(Delete(Span(self.kv.key)))

    def claim(self) -> bool:
        """Write the order again. The sender can then no longer withdraw it, and sees that it was forwarded.

        Returns False if the order was withdrawn. Returns True also if etcd does not answer within TAKE_TIMEOUT.
        """
        return self._stood(Put(self.kv.key, self.kv.value, self.kv.lease))

    def _stood(self, change: Op) -> bool:
        """Make a change unless the order was withdrawn; returns whether it was made. The lease identifies the order:
        each order has its own."""
        key = self.kv.key
        guards = exists(key), Compare(key, "lease", "=", self.kv.lease)
        try:
            return self.etcd.txn(guards, [change], timeout=TAKE_TIMEOUT).succeeded
        except EtcdError as error:
            log.debug("it is not known whether the order %r still stood: %s", key, error)
            return True


Obey: TypeAlias = Callable[[Sequence[OrderedKill]], None]
"""Handles the orders to all members. It is called after each change, with all orders that are in etcd then."""


def watch_kills(etcd: Etcd, prefix: str, obey: Obey, failed: Callable[[BaseException], None]) -> Informer:
    """Call `obey` with all orders of the job, on the watch's thread.

    All orders are watched, because there are hardly any; so a member that changes its lease needs no new watch.
    `failed` is called when the watch fails.
    """

    def look(orders: Mirror) -> None:
        obey([OrderedKill(etcd, kv) for kv in orders.kvs.values()])

    return Informer(etcd, [kills_span(prefix)], look, "ftcoord-kills", failed)


def ends_here(is_mine: Callable[[str], bool]) -> Obey:
    """Make a handler that ends this process when an order names a member for which `is_mine` holds.

    A process that could not run for a while, because it was stopped or C code held the interpreter, may see orders that
    were withdrawn in the meantime. It does not obey those.
    """

    def obey(orders: Sequence[OrderedKill]) -> None:
        for order in orders:
            if is_mine(order.member) and order.take():
                end_process(order.message)

    return obey


def order_kill(
    etcd: Etcd, prefix: str, replica_id: str, message: str, deadline: float, also: Sequence[Op] = ()
) -> bool:
    """End the process of the newest manager with this replica id; wait until it has taken the order. A later one is
    left alone. The operations in `also` are part of the order's transaction.

    Returns False if the member's lease ended before it took the order: its process may be alive. The order is then
    withdrawn.

    Raises NotInQuorum if there is no such replica, and EtcdError. Raises TimeoutError after the monotonic `deadline`,
    with the order withdrawn; or the text says that the order may be taken yet. Raises TimeoutError at once if there is
    another order to the same member.
    """
    within = TimeLimit(LONGEST_REQUEST, deadline)
    member = _newest(etcd, prefix, replica_id, within)
    if member is None:
        raise NotInQuorum(replica_id)
    ttl = math.ceil(max(deadline - concurrency.now(), 0)) + LEASE_MARGIN
    expires = concurrency.now() + ttl
    lease = etcd.grant(ttl, timeout=within.left())
    key, there = kill_key(prefix, member), member_key(prefix, member)
    try:
        mark = kill_mark_key(prefix, lease.id)
        put = partial(_put_order, etcd, there, Put(key, message.encode(), lease.id), mark, also)
        revision = retry_until_answered(put, deadline, concurrency.event())
        return revision is not None and _GivenOrder(etcd, key, there, revision, expires).await_taken(deadline)
    except UNANSWERED as error:
        raise TimeoutError(str(error)) from None
    finally:
        with contextlib.suppress(EtcdError):  # it expires by itself
            etcd.revoke(lease.id, timeout=TAKE_TIMEOUT)


def _newest(etcd: Etcd, prefix: str, replica_id: str, within: TimeLimit) -> str | None:
    """The newest member with that replica id."""
    for kv in etcd.range(Get(members_span(prefix), order="newest"), timeout=within.left()).kvs:
        with contextlib.suppress(StateError):  # no member
            if parse_replica(kv.key, kv.value).request.replica_id == replica_id:
                return member_of(kv.key)
    return None


def _put_order(etcd: Etcd, there: str, order: Put, mark: str, also: Sequence[Op], timeout: float) -> int | None:
    """Write the order, once; returns its revision, also if an earlier attempt wrote it and it was taken since. Returns
    None if the member was gone before.

    Raises TimeoutError if there is another sender's order. It is not replaced: when one sender withdraws an order, the
    other one would conclude that its own was taken.
    """
    guards = absent(mark), exists(there), absent(order.key)
    ops, look = [order, Put(mark, b"", order.lease), *also], [Get(Span(mark)), Get(Span(order.key))]
    put = etcd.txn(guards, ops, look, timeout=timeout)
    if put.succeeded:
        return put.revision
    if (marked := put.range(0).one) is not None:
        return marked.create_revision
    if put.range(1).one is not None:
        raise TimeoutError("another order to end it is under way: see what becomes of that, and order again")
    return None


class _Found(Enum):
    """The state in which a withdrawal found the order."""

    STANDING = "nobody has taken it"
    CLAIMED = "a gateway has forwarded it"
    GONE = "it was taken"


@dataclass(frozen=True, slots=True)
class _GivenOrder:
    """An order in etcd, as its sender sees it.

    Args:
        etcd: the client.
        key: the order's key.
        there: the key of the member that is to take it.
        revision: the revision at which it was written.
        expires: the monotonic time until which its lease lives at least.
    """

    etcd: Etcd
    key: str
    there: str
    revision: int
    expires: float

    def await_taken(self, deadline: float) -> bool:
        """Whether it was taken; False if the member's lease ended before that. See `order_kill` for what it raises."""
        is_over = self._await(deadline, lambda order, there: self._is_gone(order.one) or there.one is None)
        found = self._withdraw()  # the truth: of the two watches one may be ahead of the other
        if found is _Found.CLAIMED and is_over:
            self._await(deadline, lambda order, _there: self._is_gone(order.one))
            found = self._withdraw()
        if found is _Found.CLAIMED:
            raise TimeoutError(
                "its gateway has handed the order on, and it has not ended: see that gateway's log; it may end yet"
            )
        if found is _Found.STANDING and not is_over:
            raise TimeoutError(
                "the order was not taken: only a ManagerServer takes it, or its gateway, while etcd is there"
            )
        if found is _Found.GONE and concurrency.now() >= self.expires:
            raise TimeoutError("this process could not run for so long that the order has expired, or was taken")
        return found is _Found.GONE

    def _await(self, deadline: float, holds: Callable[[Mirror, Mirror], bool]) -> bool:
        """Wait until the mirrors of the order and its member satisfy a condition; returns whether they do in time."""
        over, failures = concurrency.event(), list[BaseException]()

        def look(order: Mirror, there: Mirror) -> None:
            if holds(order, there):
                over.set()

        def fail(error: BaseException) -> None:
            failures.append(error)
            over.set()

        with Informer(self.etcd, [Span(self.key), Span(self.there)], look, "ftcoord-killing", fail):
            is_over = over.wait(max(deadline - concurrency.now(), 0))
        if failures:
            raise failures[0]
        return is_over

    def _withdraw(self) -> _Found:
        """Delete the order unless it was claimed or taken. Raises TimeoutError if etcd does not answer."""
        guard, delete, get = unchanged(self.key, self.revision), Delete(Span(self.key)), Get(Span(self.key))
        try:
            withdrawn = self.etcd.txn([guard], [delete], [get], timeout=TAKE_TIMEOUT)
        except UNANSWERED as error:
            raise TimeoutError(f"the order may be taken yet: it could not be withdrawn: {error}") from None
        if withdrawn.succeeded:
            return _Found.STANDING
        return _Found.GONE if self._is_gone(withdrawn.range(0).one) else _Found.CLAIMED

    def _is_gone(self, there: KeyValue | None) -> bool:
        """Whether the order is gone, by what its key has now: that may be another sender's order. A claim keeps the
        revision at which the key was created."""
        return there is None or there.create_revision != self.revision
