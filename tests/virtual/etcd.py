"""An etcd in memory, for tests: `MemoryEtcd` is the server, `MemoryEtcd.client()` makes what speaks to it.

It keeps the promises of `ftcoord.etcd.api.Etcd`, and does what etcd does: tests/contract/test_etcd_contract.py runs the
same tests on both. Its clients fail as told (`Fate`, `MemoryClient.cut_off`), each by itself, as hosts do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from ftcoord import closing, concurrency, config, errors
from ftcoord.etcd.api import Compare, Etcd, Event, Get, Lease, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from virtual.backend import Backend, NotServed
from virtual.fate import DELIVERED, NEVER, Call, Fate, Method
from virtual.keyspace import Transaction
from virtual.watching import MemoryWatches

T = TypeVar("T")

REQUEST_TIMEOUT: Final = 5.0
"""Seconds that a call may take where nothing else is said."""
MEMORY_CLIENT_CLOSED: Final = "this etcd client was closed; make a new one"


class MemoryEtcd(Backend):
    """An etcd in memory. A context manager, which closes it.

    Args:
        min_ttl: seconds of the shortest lease that it grants; a real etcd grants 2 at the least by default.

    Thread-safe. A lease expires up to half a second after its TTL, as with etcd. In a `Scheduler` all time is virtual.
    Not promised: the time that anything takes on a real etcd, its limits of rate, users and roles, and members.
    """

    def __init__(self, *, min_ttl: int = 2) -> None:
        super().__init__(min_ttl)
        self._clients: list[MemoryClient] = []

    def client(self, fate: Callable[[Call], Fate] | None = None) -> MemoryClient:
        """A client of its own, with its own thread and its own faults: one for each process that a test plays.

        Args:
            fate: decides of each call what becomes of it, see `MemoryClient.fate`.
        """
        client = MemoryClient(self, fate)
        self._clients.append(client)
        client._look_for_etcd()
        return client

    @contextmanager
    def outage(self, *, hangs: bool = False) -> Iterator[None]:
        """Nobody reaches etcd meanwhile, and no lease expires; then each has its whole TTL, as on a new leader.

        Args:
            hangs: it only stands still, as a server does that was stopped. When it goes on, all leases expire whose
                time is over.
        """
        self.go_down()
        for client in self._clients:
            client._look_for_etcd()
        try:
            yield
        finally:
            self.come_up(with_old_leader=hangs)
            for client in self._clients:
                client._look_for_etcd()

    def close(self) -> None:
        """Close every client, and end all threads. Idempotent."""
        for client in self._clients:
            client.close()
        super().close()


class MemoryClient(Etcd, closing.Closing):
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
        self.config: config.EtcdConfig | None = None
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
        asked = Transaction(tuple(compares), tuple(success), tuple(failure))
        return self._call("txn", asked, lambda: self._backend.txn(asked), timeout, writes=True)

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
            raise errors.ClientClosed(MEMORY_CLIENT_CLOSED)
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

    def _call(
        self, method: Method, asked: object, request: Callable[[], T], timeout: float | None, writes: bool = False
    ) -> T:
        """One call: it may not leave, may not arrive, arrive late, or stay without an answer."""
        deadline = concurrency.now() + (REQUEST_TIMEOUT if timeout is None else timeout)
        lost: errors.EtcdError = (
            errors.OutcomeUnknown("etcd did not answer: the write may have happened")
            if writes
            else errors.EtcdUnavailable("etcd did not answer in time")
        )
        fate = self.fate(Call(method, asked, writes))
        self._reach(deadline, lost)
        if fate.refused:
            raise errors.EtcdUnavailable("the test refused this call: it had no effect")
        begun = concurrency.now()
        told_at = min(deadline, begun + fate.breaks)
        if not self._pass(fate.arrives, told_at):
            if self._closed:
                raise errors.ClientClosed(MEMORY_CLIENT_CLOSED)
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

    def _reach(self, deadline: float, lost: errors.EtcdError) -> None:
        """Wait for as long as this client is cut off, or etcd is down."""
        left = max(deadline - concurrency.now(), 0)
        with self._link:
            if not self._reaches():
                self._link.wait_for(lambda: self._reaches() or self._closed, left)
            if self._closed:
                raise errors.ClientClosed(MEMORY_CLIENT_CLOSED)
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
