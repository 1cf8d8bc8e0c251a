"""A key of this process that a thread keeps at its wanted value in etcd, under a lease: heartbeats, and the timers of a
worker.

Each write is guarded by the revision that the last one left. So a copy of an old write that arrives late has no effect,
and a step of the thread may fail and be repeated anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftcoord import concurrency
from ftcoord.core.lease import SessionState
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, ThreadFailed
from ftcoord.etcd.api import Etcd, KeyValue, Put
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import write_attempt_timeout, write_once

log = logging.getLogger(__name__)


class LeasedKey:
    """The thread takes a lease at once, and a new one whenever that is lost. Thread-safe; not usable in a forked child.

    Args:
        etcd: the etcd client.
        ttl: the lease's TTL, in seconds.
        key_of: the key under a lease, by the lease's id.
        what: what the key holds, for the thread's name and for log lines.
        deaths: the prefix below which the cause is written when this process dies; see `Session`.
    """

    def __init__(
        self, etcd: Etcd, ttl: int, key_of: Callable[[int], str], what: str, deaths: str | None = None
    ) -> None:
        self._etcd, self._ttl, self._key_of, self._what, self._deaths = etcd, ttl, key_of, what, deaths  # never change
        self._owner = OwnerProcess(f"the {what} belong to the parent process")
        self._changed = concurrency.condition("LeasedKey._changed")  # notified of all below; not held during a request
        self.problem: EtcdError | None = None
        """Why etcd does not have the value now."""
        self._value: bytes | None = None  # the wanted one; guarded by _changed, as the next
        self._is_written = True
        self._failure: BaseException | None = None  # what ended the thread
        # Only the thread, and `close()` when that has ended:
        self._session: Session | None = None
        self._kv: KeyValue | None = None  # as far as is known
        self._thread = concurrency.StepThread(self._step, f"ftcoord-{what}", self._wake, lambda: None, self._fail)
        self._thread.start()

    def check_process(self) -> None:
        """Raises ForkedProcessError in a child that was forked after this was made."""
        self._owner.check()

    def put(self, value: bytes) -> None:
        """Want a value; does not wait. Raises ClientClosed after `close()`."""
        self.check_process()
        with self._changed:
            if self._thread.closed:
                raise ClientClosed(f"these {self._what} were closed: make new ones")
            self._value, self._is_written = value, False
            self._changed.notify_all()

    def wait(self, timeout: float, through_outage: bool = False) -> bool:
        """Wait until etcd has the wanted value, at most `timeout` seconds; returns whether it has.

        Does not wait while etcd is known to be unreachable, unless `through_outage`: one caller waits during an outage,
        and the others need not. If the thread has ended for good, raises ClientClosed (its etcd client was closed) or
        ThreadFailed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_written or self._failure or (self.problem and not through_outage), timeout
            )
            if isinstance(self._failure, ClientClosed):
                raise ClientClosed(f"these {self._what} are not kept in etcd any longer: {self._failure}")
            if self._failure is not None:
                raise ThreadFailed(f"keeps {self._what} in etcd", self._failure)
            if not self._is_written and self.problem is None:
                self.problem = EtcdUnavailable(
                    "etcd did not answer in time: check that it is up, and that your user may write"
                )
            return self._is_written

    def close(self, timeout: float) -> None:
        """Revoke the lease, which deletes the key, within `timeout` seconds and those of a write in progress.

        Idempotent. Does not raise if etcd is unreachable: the lease then expires. Does nothing in a forked child.
        """
        if not self._owner.is_current:
            return
        self._thread.close()
        if self._session is not None:
            try:
                self._session.close(timeout)
            except EtcdError as error:
                log.debug("the lease of these %s was not revoked, it expires: %s", self._what, error)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._thread.closed or self._has_no_lease() or not self._is_written)
        if self._thread.closed:
            return
        try:
            self._write(self._live_session().lease_id)
        except LeaseLost as error:
            log.warning("the lease of these %s was lost, and they are written under a new one: %s", self._what, error)
            self._give_up_lease()
        except EtcdError as error:
            self.problem = error
            self._wake()
            raise

    def _has_no_lease(self) -> bool:
        return self._session is None or self._session.state is SessionState.LOST

    def _live_session(self) -> Session:
        """Raises LeaseLost, after which the next step takes a new lease, and EtcdError."""
        if self._session is None:
            limit = write_attempt_timeout(self._etcd)
            self._session = Session(self._etcd, self._ttl, lambda _: self._wake(), deaths=self._deaths, timeout=limit)
            with self._changed:
                self._is_written = self._value is None
        elif self._session.state is SessionState.LOST:
            raise LeaseLost(f"lease {self._session.lease_id:x} is gone")
        return self._session

    def _write(self, lease: int) -> None:
        value = self._value
        if value is None:
            return
        put, limit = Put(self._key_of(lease), value, lease), write_attempt_timeout(self._etcd)
        outcome = write_once(self._etcd, put, self._kv, timeout=limit)
        self._kv = outcome.kv
        with self._changed:
            self.problem = None
            if outcome.done and value is self._value:  # else another value is wanted meanwhile
                self._is_written = True
            self._changed.notify_all()

    def _give_up_lease(self) -> None:
        if self._session is not None:
            self._session.orphan()
        self._session = self._kv = None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, failure: BaseException) -> None:
        log.error("these %s are not kept in etcd any longer: %s", self._what, failure)
        self._failure = failure
        self._wake()
        self._give_up_lease()
