"""An etcd in memory, for tests: `MemoryEtcd` is the server, `MemoryEtcd.client()` makes what speaks to it.

It keeps the promises of `ftcoord.etcd.api.Etcd`, and does what etcd does: tests/contract/test_etcd_contract.py runs the
same tests on both. Its clients fail as told (`Fate`, `MemoryClient.cut_off`), each by itself, as hosts do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, TypeVar

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Compare, Etcd, Event, Get, Lease, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from virtual.backend import Backend, NotServed, Snapshot
from virtual.fate import DELIVERED, NEVER, Call, Fate, Method
from virtual.keyspace import Transaction
from virtual.watching import MemoryWatches

T = TypeVar("T")

REQUEST_TIMEOUT: Final = 5.0
"""Seconds that a call may take where nothing else is said."""
MEMORY_CLIENT_CLOSED: Final = "this etcd client was closed; make a new one"


class MemoryEtcd:
    """An etcd in memory. A context manager, which closes it.

    Args:
        min_ttl: seconds of the shortest lease that it grants; a real etcd grants 2 at the least by default.

    Thread-safe. A lease expires up to half a second after its TTL, as with etcd. In a `Scheduler` all time is virtual.
    Not promised: the time that anything takes on a real etcd, its limits of rate, users and roles, and members.
    """

    def __init__(self, *, min_ttl: int = 2) -> None:
        self._backend = Backend(min_ttl)
        self._clients: list[MemoryClient] = []

    def client(self, fate: Callable[[Call], Fate] | None = None) -> MemoryClient:
        """A client of its own, with its own thread and its own faults: one for each process that a test plays.

        Args:
            fate: decides of each call what becomes of it, see `MemoryClient.fate`.
        """
        client = MemoryClient(self._backend, fate)
        self._clients.append(client)
        client._look_for_etcd()
        return client

    @property
    def revision(self) -> int:
        """Where etcd is."""
        return self._backend.revision

    @property
    def leases(self) -> dict[int, int]:
        """The leases that there are, and the TTL of each in seconds."""
        return self._backend.leases

    @property
    def watches(self) -> int:
        """How many watches stand, of all clients together."""
        return self._backend.watches

    def listen(self, listener: Callable[[Sequence[Event]], object]) -> None:
        """Have a test told of all that changes: of each revision's changes at once, before anybody else hears of it.

        It is called on the thread that makes the change, and must not call etcd.
        """
        self._backend.listen(listener)

    def expire(self, lease_id: int) -> None:
        """End a lease at once, and its keys with it. Its holder hears of it when it renews it next."""
        self._backend.revoke(lease_id)

    def compact(self, revision: int | None = None) -> None:
        """Forget the history before `revision`, or all of it. Raises RequestRefused where that is done already."""
        self._backend.compact(self.revision if revision is None else revision)

    def change_leader(self) -> None:
        """Every lease gets its whole TTL again, and every watch is interrupted and goes on where it was."""
        self._backend.change_leader()

    def set_no_space(self, full: bool, *, let_in: int = 0) -> None:
        """Whether the quota is used up, so that puts and new leases are refused with EtcdNoSpace.

        Args:
            let_in: so many of the next ones are made all the same, and raise EtcdNoSpace too: etcd does so with those
                that it had let in when others used up the quota.
        """
        self._backend.set_full(full, let_in)

    @contextmanager
    def outage(self, *, hangs: bool = False) -> Iterator[None]:
        """Nobody reaches etcd meanwhile, and no lease expires; then each has its whole TTL, as on a new leader.

        Args:
            hangs: it only stands still, as a server does that was stopped. When it goes on, all leases expire whose
                time is over.
        """
        self._backend.go_down()
        for client in self._clients:
            client._look_for_etcd()
        try:
            yield
        finally:
            self._backend.come_up(with_old_leader=hangs)
            for client in self._clients:
                client._look_for_etcd()

    def snapshot(self) -> Snapshot:
        """What it holds now, for `rewind()`."""
        return self._backend.snapshot()

    def rewind(self, snapshot: Snapshot) -> None:
        """Go back to what it held then, as an etcd does that lost its last writes. Watches are interrupted."""
        self._backend.rewind(snapshot)

    def close(self) -> None:
        """Close every client, and end all threads. Idempotent."""
        for client in self._clients:
            client.close()
        self._backend.close()

    def __enter__(self) -> MemoryEtcd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemoryClient(Etcd):
    """A client of a `MemoryEtcd`. Implements `ftcoord.etcd.api.Etcd`; thread-safe.

    It makes no call twice: what its fate is, the caller sees. While it is cut off calls wait for it to be reconnected,
    until their time-out.
    """

    def __init__(self, backend: Backend, fate: Callable[[Call], Fate] | None) -> None:
        self.fate: Callable[[Call], Fate] = fate or (lambda _call: DELIVERED)
        """Decides of each call what becomes of it. May be replaced at any time; it is called on the caller's thread."""
        self.loses: Callable[[Event], bool] = lambda _event: False
        """Which changes its watches never hear of."""
        self._backend = backend
        self._link = concurrency.condition("MemoryClient._link")
        self._connected = True  # guarded by _link, as the next
        self._closed = False
        self._watches = MemoryWatches(backend, lambda event: self.loses(event))
        self.config: EtcdConfig | None = None
        """No other process can reach this etcd."""

    # -- Etcd ---------------------------------------------------------------------------------------------------------

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        return self._call("range", get, lambda: self._backend.range(get), timeout)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        return self._txn(Transaction(tuple(compares), tuple(success), tuple(failure)), timeout)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        return self._call("grant", ttl, lambda: self._backend.grant(ttl), timeout)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        return self._call("renew", lease_id, lambda: self._backend.renew(lease_id), timeout)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        self._call("revoke", lease_id, lambda: self._backend.revoke(lease_id), timeout)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        if self._closed:
            raise ClientClosed(MEMORY_CLIENT_CLOSED)
        return self._watches.add(span, start_revision, deliver, deletes_only)

    # -- as EtcdClient has them ---------------------------------------------------------------------------------------

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`. Repeating it is an error of etcd's, raised as RequestRefused."""
        self._call("compact", revision, lambda: self._backend.compact(revision), None)

    def close(self) -> None:
        """End all watches and calls, and its threads; idempotent. Leases stay, until they expire."""
        with self._link:
            if self._closed:
                return
            self._closed = True
            self._link.notify_all()
        self._watches.close()

    # -- what a test does to it ---------------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """Nothing gets through until `reconnect()`: calls time out, watches are interrupted, leases are not renewed."""
        with self._link:
            self._connected = False
        self._look_for_etcd()

    def reconnect(self) -> None:
        """End of `cut_off()`: calls that wait go through, and watches go on where they were, after a new Began. While
        etcd is down that waits for the end of the outage."""
        with self._link:
            self._connected = True
        self._look_for_etcd()

    def __enter__(self) -> MemoryClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look_for_etcd(self) -> None:
        """Whether it can be reached has changed, perhaps."""
        with self._link:
            reaches = self._reaches()
            self._link.notify_all()
        if reaches:
            self._watches.connect()
        else:
            self._watches.disconnect()

    def _reaches(self) -> bool:
        return self._connected and not self._backend.is_down

    # -- calls and their fates ----------------------------------------------------------------------------------------

    def _txn(self, asked: Transaction, timeout: float | None) -> TxnResult:
        return self._call("txn", asked, lambda: self._backend.txn(asked), timeout, writes=True)

    def _call(
        self, method: Method, asked: object, request: Callable[[], T], timeout: float | None, writes: bool = False
    ) -> T:
        """One call: it may not leave, may not arrive, arrive late, or stay without an answer."""
        deadline = concurrency.now() + (REQUEST_TIMEOUT if timeout is None else timeout)
        lost: EtcdError = (
            OutcomeUnknown("etcd did not answer: the write may have happened")
            if writes
            else EtcdUnavailable("etcd did not answer in time")
        )
        fate = self.fate(Call(method, asked, writes))
        if fate.refused:
            self._reach(deadline, lost)
            raise EtcdUnavailable("the test refused this call: it had no effect")
        self._reach(deadline, lost)
        begun = concurrency.now()
        told_at = min(deadline, begun + fate.breaks)
        if not self._pass(fate.arrives, told_at):
            if self._closed:
                raise ClientClosed(MEMORY_CLIENT_CLOSED)
            if fate.arrives != NEVER:
                self._backend.later(begun + fate.arrives - concurrency.now(), request)
            raise lost
        if fate.again != NEVER:
            self._backend.later(fate.again, request)
        try:
            answer = self._backend.serve(request)
        except NotServed:  # it went down when the request was under way
            self._pass(NEVER, told_at)
            raise lost from None
        if not self._pass(fate.answers, told_at):
            raise lost
        return answer

    def _reach(self, deadline: float, lost: EtcdError) -> None:
        """Wait for as long as this client is cut off, or etcd is down."""
        left = max(deadline - concurrency.now(), 0)
        with self._link:
            if not self._reaches():
                self._link.wait_for(lambda: self._reaches() or self._closed, left)
            if self._closed:
                raise ClientClosed(MEMORY_CLIENT_CLOSED)
            if not self._reaches():
                raise lost

    def _pass(self, seconds: float, until: float) -> bool:
        """Let time pass, but not beyond `until`; whether that was enough, and this client was not closed meanwhile."""
        if not seconds:
            return True
        now = concurrency.now()
        end = now + seconds
        with self._link:
            closed = self._link.wait_for(lambda: self._closed, max(min(end, until) - now, 0))
        return end <= until and not closed
