"""Keys of this process that a thread keeps in etcd as they should be, under one lease.

Each key is written over and never deleted: its version tells a late copy of an old write from the newest. A step of the
thread compares what should be with what is known to be, so it may fail and be repeated anywhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ftcoord import concurrency
from ftcoord.core.lease import SessionState
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost, ThreadFailed
from ftcoord.etcd.api import Compare, Etcd, Get, Put, Span
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import WRITE_ATTEMPT_TIMEOUT

log = logging.getLogger(__name__)

KEYS_PER_WRITE: Final = 100
"""Keys in one transaction; etcd allows 128 operations."""
KEYS_RETRY_PAUSE: Final = 0.25
"""Seconds until a step that failed is tried again."""

Render: TypeAlias = Callable[[], bytes]


class _Sent(NamedTuple):
    """The value that was sent last, and what rendered it."""

    render: Render
    value: bytes


class LeasedKeys:
    """Keys with a name each. Its thread takes a lease at once, and a new one whenever that is lost.

    Args:
        etcd: the etcd client.
        ttl: of the lease, in seconds.
        key_of: the key of a name under a lease, `key_of(name, lease id)`.
        what: what the keys are, for the thread's name and for warnings.

    Thread-safe. One transaction writes all that is asked for at the time. Not usable in a forked child.

    If the thread fails by an error that nobody foresaw, that is logged, the keys expire, and `put()` and `wait()` raise
    ThreadFailed.
    """

    def __init__(self, etcd: Etcd, ttl: int, key_of: Callable[[str, int], str], what: str) -> None:
        self._etcd, self._ttl, self._key_of, self._what = etcd, ttl, key_of, what  # never change
        self._owner = OwnerProcess(f"these {what} belong to the parent process")
        # Guards all in the next paragraph. Never held during a request or a `render`.
        self._changed = concurrency.condition("LeasedKeys._changed")
        self.problem: EtcdError | None = None  # why etcd does not have the keys now; anybody may read it
        self._wanted: dict[str, Render] = {}
        self._dirty: dict[str, None] = {}  # the names whose keys may not be as they should be, in order
        self._lost = False  # the lease
        self._closing = False
        self._away = False  # whether etcd is out of reach
        self._failure: BaseException | None = None  # what ended the thread
        # Only the thread: what it knows of the keys under its lease.
        self._versions: dict[str, int] = {}
        self._sent: dict[str, _Sent] = {}
        self._session: Session | None = None  # only the thread; `close()` too, when the thread has ended or hangs
        self._thread = concurrency.thread(self._run, f"ftcoord-{what}")
        self._thread.start()

    def check_process(self) -> None:
        """Raises ForkedProcessError in a child that was forked after this was made."""
        self._owner.check()

    def put(self, name: str, render: Render) -> None:
        """Keep what `render` returns under a name's key. It is called on the thread, once for each write.

        A key that should be empty is written only if it may hold something else. Raises ClientClosed after `close()`,
        and when the etcd client is closed, and ThreadFailed.
        """
        self.check_process()
        with self._changed:
            if self._closing:
                raise ClientClosed(f"these {self._what} were closed: make new ones")
            self._check_thread()
            self._wanted[name] = render
            self._dirty[name] = None
            self._changed.notify_all()

    def wait(self, name: str, timeout: float, through_outage: bool = False) -> bool:
        """Wait until the name's key is as it should be; whether it is, after `timeout` seconds at most.

        Does not wait while etcd is known to be out of reach, unless `through_outage`: one caller waits for an outage,
        and the others need not. Raises ClientClosed when the etcd client is closed, and ThreadFailed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(name) or (self._away and not through_outage), timeout)
            self._check_thread()
            done = name not in self._dirty
            if not done:
                self._go_away("it does not answer")
        return done

    def close(self, timeout: float) -> None:
        """Revoke the lease, and delete the keys with it; takes `timeout` seconds, twice at most. Idempotent.

        Never raises for an etcd that is out of reach: the lease then expires. Does nothing in a forked child.
        """
        if not self._owner.is_current:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        session = self._session
        if session is not None:
            try:
                session.close(timeout)
            except EtcdError as error:
                log.debug("the lease of these %s was not revoked, it expires: %s", self._what, error)

    def _is_settled(self, name: str) -> bool:
        return name not in self._dirty or self._failure is not None

    def _check_thread(self) -> None:
        """With the lock held."""
        if isinstance(self._failure, ClientClosed):
            raise ClientClosed(f"these {self._what} are not kept in etcd any longer: {self._failure}")
        if self._failure is not None:
            raise ThreadFailed(f"keeps {self._what} in etcd", self._failure)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:
            failure = sys.exc_info()[1]
            if failure is not None:
                log.exception("these %s are not kept in etcd any longer: their thread failed", self._what)
                self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()  # or somebody would wait for what nobody writes
        if self._session is not None:
            self._session.orphan()

    def _run_until_closed(self) -> None:
        while self._wait_for_work():
            try:
                self._step()
            except LeaseLost as error:
                log.debug("%s: %s", self._what, error)
                self._note_lost()
            except ClientClosed as error:
                self._note_failure(error)
                self._fail(error)
                return
            except EtcdError as error:
                self._note_failure(error)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False at the end."""
        with self._changed:
            if self._away:
                self._changed.wait_for(lambda: self._closing, KEYS_RETRY_PAUSE)
            self._changed.wait_for(lambda: self._closing or self._lost or self._dirty or self._session is None)
            return not self._closing

    def _step(self) -> None:
        session = self._live_session()
        with self._changed:
            wanted = {name: self._wanted[name] for name in list(self._dirty)[:KEYS_PER_WRITE]}
        values = {name: render() for name, render in wanted.items()}
        writes = {name: _Sent(wanted[name], value) for name, value in values.items() if value or name in self._versions}
        done = wanted.keys() - writes.keys()  # these are not there, and should not be
        if writes:
            done |= self._write(session.lease_id, writes)
            self._come_back()
        with self._changed:
            for name in done:
                if self._wanted[name] is wanted[name]:  # else it was put again meanwhile
                    del self._dirty[name]
                    if name not in writes:
                        del self._wanted[name]
            self._changed.notify_all()

    def _write(self, lease: int, writes: dict[str, _Sent]) -> set[str]:
        """Write all of these, or none if a key is not as expected; the names whose keys are now as they should be."""
        keys = {name: self._key_of(name, lease) for name in writes}
        before = {name: (self._versions.setdefault(name, 0), self._sent.get(name)) for name in writes}
        self._sent.update(writes)  # before the request: its answer may get lost
        result = self._etcd.txn(
            [Compare(keys[name], "version", "=", version) for name, (version, _) in before.items()],
            [Put(keys[name], sent.value, lease) for name, sent in writes.items()],
            [Get(Span(key)) for key in keys.values()],
            timeout=WRITE_ATTEMPT_TIMEOUT,
        )
        done = set[str]()
        for index, (name, (version, sent)) in enumerate(before.items()):
            found = None if result.succeeded else result.range(index).one
            self._versions[name] = version + 1 if result.succeeded else (found.version if found else 0)
            ours = found is not None and sent is not None and found.value == sent.value  # its answer was lost
            if result.succeeded or (ours and sent is not None and sent.render is writes[name].render):
                done.add(name)
        return done

    def _live_session(self) -> Session:
        if self._lost and self._session is not None:
            self._session.orphan()
            self._session = None
            log.warning("the lease of these %s was lost: they are put back under a new one", self._what)
        if self._session is None:
            with self._changed:
                self._lost = False
            self._versions.clear()
            self._sent.clear()
            session = self._session = Session(self._etcd, self._ttl, self._on_state)
            self._come_back()
            with self._changed:
                self._dirty = dict.fromkeys(self._wanted)
                closing = self._closing
            if closing:  # meanwhile: `close()` may not wait for this thread any longer
                session.orphan()
        return self._session

    def _on_state(self, state: SessionState) -> None:
        """Runs on the keep-alive thread."""
        if state is SessionState.LOST:
            self._note_lost()

    def _note_lost(self) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    # -- etcd that is away --------------------------------------------------------------------------------------

    def _note_failure(self, error: EtcdError) -> None:
        with self._changed:
            self.problem = error
            self._go_away(str(error))
            self._changed.notify_all()

    def _go_away(self, why: str) -> None:
        """With the lock held."""
        if not self._away:
            log.warning("%s are not written to etcd until it can be reached again: %s", self._what, why)
        self._away = True

    def _come_back(self) -> None:
        with self._changed:
            if self._away:
                log.warning("%s are written to etcd again", self._what)
            self._away, self.problem = False, None
