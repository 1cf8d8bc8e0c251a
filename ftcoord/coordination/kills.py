"""Ends a manager's process through etcd: an order is one key, `kill/<member>`, under a lease of a minute.

A manager that reads an order for a member that it is, or was, exits. Who gave the order watches whether that member
goes: nobody answers an order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.core.layout import kill_key, kills_span, member_key, member_of, members_span
from ftcoord.core.quorum_records import parse_replica
from ftcoord.errors import NotInQuorum, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue, Op, Put, Span, exists
from ftcoord.etcd.retry import UNANSWERED, TimeLimit, retry_until_answered
from ftcoord.primitives.mirror import Informer, Mirror

LONGEST_REQUEST: Final = 5.0
"""Seconds that one request of an order may take."""
ORDER_TTL: Final = 60
"""Seconds that an order lives: a manager that cannot reach etcd for so long does not end."""
_STILL_THERE: Final = (
    f"it is still a member, and may end yet: the order stands for {ORDER_TTL} s. Only a ManagerServer obeys one, or a "
    "manager behind a gateway, while etcd can be reached: see its log"
)


def watch_kills(
    etcd: Etcd, prefix: str, obey: Callable[[KeyValue], object], failed: Callable[[BaseException], None]
) -> Informer:
    """Call `obey` with each order of the job, on the watch's thread, after each change of any.

    All orders are watched, because there are hardly any; so a member that changes its lease needs no new watch.
    `failed` is called when the watch fails.
    """

    def look(orders: Mirror) -> None:
        for order in orders.kvs.values():
            obey(order)

    return Informer(etcd, [kills_span(prefix)], look, "ftcoord-kills", failed)


def order_kill(
    etcd: Etcd, prefix: str, replica_id: str, message: str, deadline: float, also: Sequence[Op] = ()
) -> None:
    """End the process of the newest manager with this replica id; returns when its member is gone. A later manager of
    that id is left alone. The operations in `also` are part of the order's transaction, which may be repeated.

    Raises NotInQuorum if there is no such replica, and EtcdError. Raises TimeoutError after the monotonic `deadline`:
    the order stands until its lease ends, so the process may end yet.
    """
    within = TimeLimit(LONGEST_REQUEST, deadline)
    member = _newest(etcd, prefix, replica_id, within)
    if member is None:
        raise NotInQuorum(replica_id)
    there = member_key(prefix, member)
    try:
        order = Put(kill_key(prefix, member), message.encode(), etcd.grant(ORDER_TTL, timeout=within.left()).id)
        # Only while the member is there. To write the order twice does no harm: a successor is another member.
        write = partial(etcd.txn, [exists(there)], [order, *also])
        retry_until_answered(lambda left: write(timeout=left), deadline, concurrency.event())
    except UNANSWERED as error:
        raise TimeoutError(f"etcd did not answer, and may have the order: {error}") from None
    ends: concurrency.Queue[BaseException | None] = concurrency.inbox()

    def look(found: Mirror) -> None:
        if not found.kvs:
            ends.put(None)

    with Informer(etcd, [Span(there)], look, "ftcoord-killing", ends.put):
        try:
            failure = ends.get(timeout=max(deadline - concurrency.now(), 0))
        except concurrency.Empty:
            failure = TimeoutError(_STILL_THERE)
    if failure is not None:
        raise failure


def _newest(etcd: Etcd, prefix: str, replica_id: str, within: TimeLimit) -> str | None:
    """The newest member with that replica id."""
    for kv in etcd.range(Get(members_span(prefix), order="newest"), timeout=within.left()).kvs:
        with contextlib.suppress(StateError):  # no member
            if parse_replica(kv.key, kv.value).request.replica_id == replica_id:
                return member_of(kv.key)
    return None
