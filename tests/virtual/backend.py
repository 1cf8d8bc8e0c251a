"""What stands behind all clients of a `MemoryEtcd`: its keys and leases, who watches them, and the passing of time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from ftcoord import closing, concurrency, errors
from ftcoord.etcd.api import Batch, Began, Event, Get, Lease, RangeResult, Span, TxnResult, WatchItem
from virtual.keyspace import KeySpace, Transaction, concerning

SCAN: Final = 0.5
"""Seconds between two looks at which leases have expired, as in etcd: a lease lives up to that much longer."""
MAX_TTL: Final = 9_000_000_000
"""Seconds; etcd grants no longer lease."""
_FIRST_ID: Final = 0x694D_7A11_0000_0001


@dataclass(slots=True)
class _Granted:
    ttl: int
    expires_at: float


class Leases:
    """The leases of one etcd.

    Args:
        min_ttl: seconds of the shortest lease that it grants.
        now: when it starts to scan for expired ones.
    """

    def __init__(self, min_ttl: int, now: float) -> None:
        self._min_ttl = min_ttl
        self._started = now
        self._granted: dict[int, _Granted] = {}
        self._ids = itertools.count(_FIRST_ID)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._granted

    @property
    def ttls(self) -> dict[int, int]:
        """The TTL of each, in seconds."""
        return {lease_id: lease.ttl for lease_id, lease in self._granted.items()}

    def grant(self, ttl: int, now: float) -> Lease:
        """A new lease. Raises RequestRefused for one that is too long."""
        if ttl > MAX_TTL:
            raise errors.RequestRefused(f"etcdserver: too large lease TTL; it may be {MAX_TTL} s at the most")
        granted = max(ttl, self._min_ttl)
        lease_id = next(self._ids)
        self._granted[lease_id] = _Granted(granted, now + granted)
        return Lease(lease_id, granted)

    def renew(self, lease_id: int, now: float) -> int:
        """Its TTL, which begins again. Raises LeaseLost, also for one that has expired and was not revoked yet."""
        lease = self._granted.get(lease_id)
        if lease is None or lease.expires_at <= now:
            raise errors.LeaseLost(f"lease {lease_id:x} has expired or was revoked; take a new one")
        lease.expires_at = now + lease.ttl
        return lease.ttl

    def drop(self, lease_id: int) -> None:
        """Forget a lease; one that is gone already is no error."""
        self._granted.pop(lease_id, None)

    def refresh(self, now: float) -> None:
        """Begin every TTL again, as a new leader of etcd does."""
        for lease in self._granted.values():
            lease.expires_at = now + lease.ttl

    def expired(self, now: float) -> list[int]:
        """Those whose time is over."""
        return [lease_id for lease_id, lease in self._granted.items() if lease.expires_at <= now]

    def next_scan(self) -> float | None:
        """When to look for expired ones again; None where there are none to expire."""
        if not self._granted:
            return None
        first = min(lease.expires_at for lease in self._granted.values())
        # Rounding must not put the scan before the end of the lease, or it would find nothing and come at once again.
        return max(first, self._started + math.ceil((first - self._started) / SCAN) * SCAN)

    def copy(self) -> Leases:
        """A copy to go back to; ids that were given out since are not given out again."""
        twin = Leases(self._min_ttl, self._started)
        twin._granted = {key: _Granted(lease.ttl, lease.expires_at) for key, lease in self._granted.items()}
        twin._ids = self._ids
        return twin


T = TypeVar("T")

NO_SPACE: Final = (
    "etcdserver: mvcc: database space exceeded: NOSPACE; make room with `etcdctl compact REVISION` and `etcdctl"
    " defrag`, then `etcdctl alarm disarm`; a write may have happened all the same: re-read before repeating it"
)


@dataclass(eq=False, slots=True)
class Subscription:
    """One watch that reaches a client.

    Args:
        push: called with each item, and with None when the watch is interrupted; under the backend's lock, so that all
            hear everything in one order. It must only put what it is given into a queue.
    """

    span: Span
    deletes_only: bool
    push: Callable[[Subscription, WatchItem | None], None]


class NotServed(Exception):
    """etcd is down: the request reaches nobody."""


class Snapshot(NamedTuple):
    """What an etcd held at one moment."""

    keys: KeySpace
    leases: Leases


class Backend(closing.Closing):
    """One etcd; see `MemoryEtcd`. Thread-safe. It has one thread, which makes leases expire and requests arrive that
    were delayed."""

    def __init__(self, min_ttl: int) -> None:
        self._changed = concurrency.condition("Backend._changed")
        self._keys = KeySpace()  # guarded by _changed, as all below
        self._leases = Leases(min_ttl, concurrency.now())
        self._subscriptions: dict[Subscription, None] = {}
        self._listeners: list[Callable[[Sequence[Event]], object]] = []
        self._late: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._full = self._down = self._closed = False
        self._let_in = 0  # how many requests that take space are still made though it is full
        self._thread = concurrency.thread(self._run, "ftcoord-memory-etcd")

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """Where etcd is."""
        return self._keys.revision

    @property
    def is_down(self) -> bool:
        """Whether it serves nobody."""
        return self._down

    def serve(self, request: Callable[[], T]) -> T:
        """Have a client's request, one of those below, take effect now. Raises NotServed, and what the request does."""
        with self._changed:
            if self._down:
                raise NotServed
            return request()

    def range(self, get: Get) -> RangeResult:
        with self._changed:
            return self._keys.range(get)

    def txn(self, asked: Transaction) -> TxnResult:
        with self._changed:
            is_let_in = asked.puts and self._need_space()
            result, events = self._keys.txn(asked, self._leases.__contains__)
            self._tell(events)
            if is_let_in:
                raise errors.EtcdNoSpace(NO_SPACE)
            return result

    def grant(self, ttl: int) -> Lease:
        with self._changed:
            is_let_in = self._need_space()
            lease = self._leases.grant(ttl, concurrency.now())
            self._start()
            self._changed.notify_all()
            if is_let_in:
                raise errors.EtcdNoSpace(NO_SPACE)
            return lease

    def renew(self, lease_id: int) -> int:
        with self._changed:
            return self._leases.renew(lease_id, concurrency.now())

    def revoke(self, lease_id: int) -> None:
        with self._changed:
            self._leases.drop(lease_id)
            self._tell(self._keys.drop_lease(lease_id))

    def expire(self, lease_id: int) -> None:
        """End a lease at once, and its keys with it. Its holder hears of it when it renews it next."""
        self.revoke(lease_id)

    def compact(self, revision: int | None = None) -> None:
        """Forget the history before `revision`, or all of it. Raises RequestRefused where that is done already."""
        with self._changed:
            self._keys.compact(self.revision if revision is None else revision)

    def later(self, seconds: float, request: Callable[[], object]) -> None:
        """Have a request arrive in so many seconds, or when etcd is back; nobody hears what becomes of it."""

        def arrive() -> None:
            with contextlib.suppress(errors.EtcdError):
                request()

        with self._changed:
            heapq.heappush(self._late, (concurrency.now() + seconds, next(self._order), arrive))
            self._start()
            self._changed.notify_all()

    def subscribe(self, subscription: Subscription, start_revision: int) -> None:
        """Begin a watch: what it tells first is pushed before this returns, in etcd's order. While etcd is down there
        is none to begin."""
        with self._changed:
            if self._down:
                return
            now = self._keys.revision
            if start_revision > now + 1:
                subscription.push(subscription, errors.Rewound(now, start_revision - 1))
                return
            subscription.push(subscription, Began(now))
            if 0 < start_revision < self._keys.compacted:
                subscription.push(subscription, errors.Compacted(self._keys.compacted))
                return
            if 0 < start_revision <= now:
                missed = self._keys.since(subscription.span, start_revision, subscription.deletes_only)
                if missed:
                    subscription.push(subscription, Batch(missed))
            self._subscriptions[subscription] = None

    def unsubscribe(self, subscription: Subscription) -> None:
        with self._changed:
            self._subscriptions.pop(subscription, None)

    # -- what a test sees of it ---------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[Sequence[Event]], object]) -> None:
        """Have a test told of all that changes: of each revision's changes at once, before anybody else hears of it.

        It is called on the thread that makes the change, and must not call etcd.
        """
        with self._changed:
            self._listeners.append(listener)

    @property
    def watches(self) -> int:
        """How many watches stand, of all clients together."""
        return len(self._subscriptions)

    @property
    def leases(self) -> dict[int, int]:
        """The leases that there are, and the TTL of each in seconds."""
        return self._leases.ttls

    # -- what a test does to it ---------------------------------------------------------------------------------------

    def set_no_space(self, full: bool, *, let_in: int = 0) -> None:
        """Whether the quota is used up, so that puts and new leases are refused with EtcdNoSpace.

        Args:
            let_in: so many of the next ones are made all the same, and raise EtcdNoSpace too: etcd does so with those
                that it had let in when others used up the quota.
        """
        with self._changed:
            self._full, self._let_in = full, let_in if full else 0

    def go_down(self) -> None:
        """Serve no longer: no lease expires meanwhile."""
        with self._changed:
            self._down = True
            self._interrupt()

    def come_up(self, *, with_old_leader: bool = False) -> None:
        """Serve again, with a new leader; an old one ends the leases whose time is over."""
        with self._changed:
            self._down = False
            if not with_old_leader:
                self._elect()
            self._changed.notify_all()

    def change_leader(self) -> None:
        """Every lease gets its whole TTL again, and every watch is interrupted and goes on."""
        with self._changed:
            self._interrupt()
            self._elect()

    def snapshot(self) -> Snapshot:
        """What it holds now, for `rewind()`."""
        with self._changed:
            return Snapshot(self._keys.copy(), self._leases.copy())

    def rewind(self, snapshot: Snapshot) -> None:
        """Go back to what it held then, as an etcd does that lost its last writes. Watches are interrupted."""
        with self._changed:
            self._keys, self._leases = snapshot.keys.copy(), snapshot.leases.copy()
            self._interrupt()
            self._elect()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not concurrency.current_thread():
            self._thread.join()

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _need_space(self) -> bool:
        """Refuse a request that takes space, if there is none; whether it is one that had been let in before. That one
        is made, and its caller is told the same."""
        if not self._full:
            return False
        if not self._let_in:
            raise errors.EtcdNoSpace(NO_SPACE)
        self._let_in -= 1
        return True

    def _tell(self, events: Sequence[Event]) -> None:
        """Every watch hears of what one revision changed."""
        if events:
            for listener in self._listeners:
                listener(events)
            for subscription in self._subscriptions:
                concerned = concerning(events, subscription.span, subscription.deletes_only)
                if concerned:
                    subscription.push(subscription, Batch(concerned))

    def _interrupt(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, {}
        for subscription in subscriptions:
            subscription.push(subscription, None)

    def _elect(self) -> None:
        self._leases.refresh(concurrency.now())
        self._start()
        self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread.ident is None and not self._closed:
            self._thread.start()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], object] | None:
        """Wait for what time brings; None at the end."""
        with self._changed:
            while not self._closed:
                now = concurrency.now()
                if not self._down:
                    if self._late and self._late[0][0] <= now:
                        return heapq.heappop(self._late)[2]
                    for lease_id in self._leases.expired(now) if self._is_time(now) else ():
                        self.revoke(lease_id)
                self._changed.wait(self._pause(now))
            return None

    def _is_time(self, now: float) -> bool:
        scan = self._leases.next_scan()
        return scan is not None and scan <= now

    def _pause(self, now: float) -> float | None:
        """Seconds until something is due; None when nothing is."""
        if self._down:
            return None
        due = [*(entry[0] for entry in self._late[:1]), self._leases.next_scan()]
        first = min((at for at in due if at is not None), default=None)
        return None if first is None else max(first - now, 0)
