"""Keys of this process that a thread keeps at their wanted values in etcd, under one lease.

Keys are overwritten, never deleted: a key's version tells a late copy of an old write from the newest one. A step of
the thread compares the wanted state with the known state, so it may fail and be repeated anywhere.
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
from ftcoord.primitives.write_once import write_attempt_timeout

log = logging.getLogger(__name__)

KEYS_PER_WRITE: Final = 100
"""Keys in one transaction; etcd allows 128 operations."""
KEYS_RETRY_PAUSE: Final = 0.25
"""Seconds until a failed step is repeated."""

Render: TypeAlias = Callable[[], bytes]


class Rendered(NamedTuple):
    """The value of a key, and the function that rendered it."""

    render: Render
    value: bytes


class WantedKeys:
    """The wanted keys, and the communication between their users and the thread that writes them. Thread-safe.

    Its lock is not held during a request or a `render`.
    """

    def __init__(self, what: str) -> None:
        self._what = what  # never changes
        self._changed = concurrency.condition("WantedKeys._changed")  # guards all below
        self.problem: EtcdError | None = None  # why etcd does not have the keys now; anybody may read it
        self._wanted: dict[str, Render] = {}
        self._dirty: dict[str, None] = {}  # the names whose keys may not be as they should be, in order
        self._lost = False  # the lease
        self._closing = False
        self._away = False  # whether etcd is out of reach
        self._failure: BaseException | None = None  # what ended the thread

    # -- for users ----------------------------------------------------------------------------------------------

    def put(self, name: str, render: Render) -> None:
        """Want a key. Raises ClientClosed and ThreadFailed."""
        with self._changed:
            if self._closing:
                raise ClientClosed(f"these {self._what} were closed: make new ones")
            self._check_thread()
            self._wanted[name] = render
            self._dirty[name] = None
            self._changed.notify_all()

    def wait(self, name: str, timeout: float, through_outage: bool) -> bool:
        """Wait for a key. Raises ClientClosed and ThreadFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_resolved(name) or (self._away and not through_outage), timeout)
            self._check_thread()
            done = name not in self._dirty
            if not done:
                self._go_away("it does not answer")
        return done

    def close(self) -> None:
        """Have the thread end after its present step."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _is_resolved(self, name: str) -> bool:
        return name not in self._dirty or self._failure is not None

    def _check_thread(self) -> None:
        """With the lock held."""
        if isinstance(self._failure, ClientClosed):
            raise ClientClosed(f"these {self._what} are not kept in etcd any longer: {self._failure}")
        if self._failure is not None:
            raise ThreadFailed(f"keeps {self._what} in etcd", self._failure)

    # -- for the thread that writes them ------------------------------------------------------------------------

    def wait_for_work(self, has_lease: bool) -> bool:
        """Wait until there is something to do; False at the end."""
        with self._changed:
            if self._away:
                self._changed.wait_for(lambda: self._closing, KEYS_RETRY_PAUSE)
            self._changed.wait_for(lambda: self._closing or self._lost or self._dirty or not has_lease)
            return not self._closing

    def take(self) -> dict[str, Render]:
        """The keys to write next, by name."""
        with self._changed:
            return {name: self._wanted[name] for name in list(self._dirty)[:KEYS_PER_WRITE]}

    def note_done(self, taken: dict[str, Render], done: set[str], absent: set[str]) -> None:
        """Keys that are now as wanted: `done` are written, `absent` do not exist and should not."""
        with self._changed:
            for name in done | absent:
                if self._wanted[name] is taken[name]:  # else it was put again meanwhile
                    del self._dirty[name]
                    if name in absent:
                        del self._wanted[name]
            self._changed.notify_all()

    @property
    def is_lease_lost(self) -> bool:
        return self._lost

    @property
    def is_in_doubt(self) -> bool:
        """Whether keys may still exist in etcd under a lease that nobody keeps or revokes."""
        return self._lost or self._failure is not None

    def note_lost(self) -> None:
        """The lease is lost. Also runs on the keep-alive thread."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def expect_lease(self) -> None:
        """A new lease is about to be granted: only later notes are about that one."""
        with self._changed:
            self._lost = False

    def want_all(self) -> bool:
        """There is a new lease, without keys yet; returns whether anybody still wants them."""
        with self._changed:
            self._dirty = dict.fromkeys(self._wanted)
            return not self._closing

    def note_problem(self, error: EtcdError) -> None:
        """A step failed, and will be repeated."""
        with self._changed:
            self.problem = error
            self._go_away(str(error))
            self._changed.notify_all()

    def note_end(self, failure: BaseException) -> None:
        """The thread has failed for good."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()  # or somebody would wait for what nobody writes

    def come_back(self) -> None:
        """etcd has answered."""
        with self._changed:
            if self._away:
                log.warning("%s are written to etcd again", self._what)
            self._away, self.problem = False, None

    def _go_away(self, why: str) -> None:
        """With the lock held."""
        if not self._away:
            log.warning("%s are not written to etcd until it can be reached again: %s", self._what, why)
        self._away = True


class KeysUnderLease:
    """Writes keys under one lease, and remembers what is known about them. Not thread-safe.

    Args:
        key_of: returns the key of a name under a lease.
    """

    def __init__(self, etcd: Etcd, key_of: Callable[[str, int], str], lease: int) -> None:
        self._etcd, self._key_of, self._lease = etcd, key_of, lease
        self._versions: dict[str, int] = {}
        self._sent: dict[str, Rendered] = {}  # what was sent last; its answer may have been lost

    def may_exist(self, name: str) -> bool:
        """Whether the name's key was ever written."""
        return name in self._versions

    def write(self, writes: dict[str, Rendered]) -> set[str]:
        """Write all of these, or none if a key is not as expected; returns the names whose keys are now as wanted.

        Raises EtcdError.
        """
        keys = {name: self._key_of(name, self._lease) for name in writes}
        before = {name: (self._versions.setdefault(name, 0), self._sent.get(name)) for name in writes}
        self._sent.update(writes)  # before the request: its answer may get lost
        result = self._etcd.txn(
            [Compare(keys[name], "version", "=", version) for name, (version, _) in before.items()],
            [Put(keys[name], sent.value, self._lease) for name, sent in writes.items()],
            [Get(Span(key)) for key in keys.values()],
            timeout=write_attempt_timeout(self._etcd),
        )
        done = set[str]()
        for index, (name, (version, sent)) in enumerate(before.items()):
            found = None if result.succeeded else result.range(index).one
            self._versions[name] = version + 1 if result.succeeded else (found.version if found else 0)
            ours = found is not None and sent is not None and found.value == sent.value  # its answer was lost
            if result.succeeded or (ours and sent is not None and sent.render is writes[name].render):
                done.add(name)
        return done


class LeasedKeys:
    """Keys, each with a name. Its thread takes a lease at once, and a new one whenever that is lost. Thread-safe.

    Args:
        etcd: the etcd client.
        ttl: the lease's TTL, in seconds.
        key_of: the key of a name under a lease, `key_of(name, lease id)`.
        what: what the keys are, for the thread's name and for warnings.
        deaths: the prefix below which the cause is written when this process dies; see `Session`.

    One transaction writes everything that is wanted at the time. Not usable in a forked child.

    If the thread fails with an unexpected error, the error is logged, the keys expire, and `put()` and `wait()` raise
    ThreadFailed.
    """

    def __init__(
        self, etcd: Etcd, ttl: int, key_of: Callable[[str, int], str], what: str, deaths: str | None = None
    ) -> None:
        self._etcd, self._ttl, self._key_of, self._what, self._deaths = etcd, ttl, key_of, what, deaths  # never change
        self._owner = OwnerProcess(f"these {what} belong to the parent process")
        self._wanted = WantedKeys(what)
        self._keys: KeysUnderLease | None = None  # only the thread
        self._session: Session | None = None  # only the thread; `close()` too, when the thread has ended or hangs
        self._thread = concurrency.thread(self._run, f"ftcoord-{what}")
        self._thread.start()

    @property
    def problem(self) -> EtcdError | None:
        """Why etcd does not have the keys now."""
        return self._wanted.problem

    def check_process(self) -> None:
        """Raises ForkedProcessError in a child that was forked after this was made."""
        self._owner.check()

    def put(self, name: str, render: Render) -> None:
        """Keep what `render` returns under a name's key. It is called on the thread, once for each write.

        A key that should be empty is written only if it may hold something else. Raises ClientClosed after `close()`,
        and when the etcd client is closed; and ThreadFailed.
        """
        self.check_process()
        self._wanted.put(name, render)

    def wait(self, name: str, timeout: float, through_outage: bool = False) -> bool:
        """Wait until the name's key is as wanted, at most `timeout` seconds; returns whether it is.

        Does not wait while etcd is known to be unreachable, unless `through_outage`: one caller waits during an outage,
        and the others need not. Raises ClientClosed when the etcd client is closed, and ThreadFailed.
        """
        return self._wanted.wait(name, timeout, through_outage)

    def close(self, timeout: float) -> bool:
        """Revoke the lease, which deletes the keys; takes at most twice `timeout` seconds. Idempotent.

        Returns whether the keys are known to be gone. Does not raise if etcd is unreachable: the lease then expires.
        Does nothing in a forked child.
        """
        if not self._owner.is_current:
            return False
        self._wanted.close()
        self._thread.join(timeout)
        session = self._session
        if session is not None:
            try:
                session.close(timeout)
            except EtcdError as error:
                log.debug("the lease of these %s was not revoked, it expires: %s", self._what, error)
                return False
        # Otherwise it was lost or left to expire, or a thread that hangs may still write.
        return not (self._thread.is_alive() or self._wanted.is_in_doubt)

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
        self._wanted.note_end(failure)
        if self._session is not None:
            self._session.orphan()

    def _run_until_closed(self) -> None:
        while self._wanted.wait_for_work(has_lease=self._keys is not None):
            try:
                self._step()
            except LeaseLost as error:
                log.debug("%s: %s", self._what, error)
                self._wanted.note_lost()
            except ClientClosed as error:
                self._wanted.note_problem(error)
                self._fail(error)
                return
            except EtcdError as error:
                self._wanted.note_problem(error)

    def _step(self) -> None:
        keys = self._live_keys()
        taken = self._wanted.take()
        rendered = {name: Rendered(render, render()) for name, render in taken.items()}
        writes = {name: one for name, one in rendered.items() if one.value or keys.may_exist(name)}
        done = set[str]()
        if writes:
            done = keys.write(writes)
            self._wanted.come_back()
        self._wanted.note_done(taken, done, absent=taken.keys() - writes.keys())

    def _live_keys(self) -> KeysUnderLease:
        if self._session is not None and self._wanted.is_lease_lost:
            self._session.orphan()
            self._session = self._keys = None
            log.warning("the lease of these %s was lost: they are put back under a new one", self._what)
        if self._keys is None:
            self._wanted.expect_lease()
            session = self._session = Session(self._etcd, self._ttl, self._on_state, deaths=self._deaths)
            self._keys = KeysUnderLease(self._etcd, self._key_of, session.lease_id)
            self._wanted.come_back()
            if not self._wanted.want_all():  # `close()` may not wait for this thread any longer
                session.orphan()
        return self._keys

    def _on_state(self, state: SessionState) -> None:
        """Runs on the keep-alive thread."""
        if state is SessionState.LOST:
            self._wanted.note_lost()
