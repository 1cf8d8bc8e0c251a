"""torchft's lighthouse API without a lighthouse: the clients decide quorums among themselves, through etcd. And who
follows these without taking part: for a whole job, or for the members of one quorum.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from math import inf
from typing import Any, Final, TypeAlias

from ftcoord import concurrency
from ftcoord.closing import Closing, weakly
from ftcoord.coordination import api
from ftcoord.coordination.address import Job, connect
from ftcoord.coordination.replica import Replica, order_kill
from ftcoord.core.layout import decided_key, member_key, members_span
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, parse_quorum, parse_replica
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import SharedClient
from ftcoord.primitives.deaths import causes_of
from ftcoord.primitives.group.use import ParsedKeys
from ftcoord.primitives.mirror import Informer, Mirror

log = logging.getLogger(__name__)

# -- taking part -------------------------------------------------------------------------------------------------------


SERVER_CONNECT_TIMEOUT: Final = timedelta(seconds=10)
"""How long a new LighthouseServer waits for etcd."""
LEAVE_TIMEOUT: Final = 2.0
"""Seconds that leaving may take. After that the replicas' leases expire."""


class LighthouseServer:
    """Makes the address of a new job, with the rules of its quorums. It is no server: the job's state is in etcd.

    The address contains all of the rules, so this object and its process may end at any time. The endpoints come from
    FTCOORD_ENDPOINTS, else from ETCDCTL_ENDPOINTS, else 127.0.0.1:2379.

    Args:
        bind: accepted, but not used: nothing is listened to.
        min_replicas: the fewest replicas that form a quorum.
        join_timeout_ms: how long a quorum waits for replicas that are alive but do not ask, in milliseconds. The
            default is 100, as in torchft; an address without this option has 60000.
        quorum_tick_ms: accepted, but not used: decisions follow events.
        heartbeat_timeout_ms: how long a replica counts as alive after its last beat, in milliseconds; default 5000.
            Below 3000 only a client judges its own replicas by it, and a gateway its own; leases live for 3 s.

    Raises TypeError and OverflowError for arguments of a wrong type or size, and RuntimeError for a bad value,
    or when etcd does not answer within 10 s.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        api.string("bind", bind)
        api.integer("quorum_tick_ms", 100 if quorum_tick_ms is None else quorum_tick_ms)
        job = Job(
            scheme="etcd",
            endpoints="",
            name=uuid.uuid4().hex,
            min_replicas=api.integer("min_replicas", min_replicas),
            join_timeout_ms=api.integer("join_timeout_ms", 100 if join_timeout_ms is None else join_timeout_ms),
            heartbeat_timeout_ms=api.integer(
                "heartbeat_timeout_ms", 5000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms
            ),
        )
        _, client = connect(str(job), SERVER_CONNECT_TIMEOUT.total_seconds())
        with contextlib.closing(client):
            self._address = str(job.at(client.config))

    def address(self) -> str:
        """`etcd://endpoints/job?options`, for LighthouseClient, ManagerServer and TORCHFT_LIGHTHOUSE."""
        return self._address

    def shutdown(self) -> None:
        """Does nothing: replicas that know the address continue."""


class LighthouseClient:
    """Takes part in the quorums of a job, for any number of replica ids. Thread-safe.

    The job's keys are below `/ftcoord/v2/<job>/quorum`.

    Args:
        addr: `etcd://h1:2379,h2:2379/job?min_replicas=2&join_timeout_ms=60000`, or `LighthouseServer.address()`.
        connect_timeout: how long to wait for etcd, a timedelta.

    Raises TypeError and ValueError for bad arguments, and its ConfigError for a malformed address, all at once;
    RuntimeError after `connect_timeout` if etcd does not answer. Every method raises TypeError, ValueError (a negative
    timedelta) or OverflowError for bad arguments, and ForkedProcessError in a forked child.

    A call of `quorum` keeps the replica alive while it waits, and counts as one beat when it returns. A client that
    nobody refers to is closed: its replicas leave at once, so nobody waits for them.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._job, self._etcd = connect(api.string("addr", addr), api.seconds("connect_timeout", connect_timeout))
        self._pid = os.getpid()
        self._lock = concurrency.lock("LighthouseClient._lock")
        self._replicas: dict[str, Replica] = {}  # guarded by _lock, as the next two
        self._calls = Counter[str]()
        """How many calls of each replica are in progress."""
        self._signs: dict[str, float] = {}
        """When the last call of each replica ended."""
        self._cancel_finalizer = concurrency.when_forgotten(self, _leave_all, self._replicas, self._etcd)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: dict[Any, Any] | None = None,
    ) -> api.Quorum:
        """Ask for a quorum, and wait until one is decided that contains this replica.

        Args:
            replica_id: the replica's name; no two replicas may have the same.
            timeout: how long to wait, a timedelta.
            address: the address of its manager.
            store_address: the address of its store.
            step: the training step that it is at.
            world_size: the number of its ranks.
            shrink_only: whether to admit no new replicas.
            data: a dict for all members to see; JSON must be able to represent it.

        Raises:
            TimeoutError: no such quorum was decided in time, for the reason that the text tells if it is known, or etcd
                did not answer. The replica no longer asks.
            RuntimeError: the request has more than 64 KiB, etcd refuses, the quorum's record cannot be read, JSON
                cannot represent `data`, or the replica has left.
        """
        deadline = concurrency.now() + api.seconds("timeout", timeout)
        request = QuorumRequest(
            replica_id=api.string("replica_id", replica_id),
            address=api.string("address", address),
            store_address=api.string("store_address", store_address),
            step=api.integer("step", step, -api.LARGEST - 1),
            world_size=api.integer("world_size", world_size),
            shrink_only=api.boolean("shrink_only", shrink_only),
            data=api.json_text(data),
        )
        with api.torchft_errors(), self._calling(replica_id) as replica:
            return api.Quorum(replica.ask(request, deadline))

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Show that a replica is alive.

        Args:
            replica_id: the replica's name.
            timeout: how long etcd may take, a timedelta.

        Raises TimeoutError when etcd does not answer in time, and RuntimeError when it refuses.
        """
        deadline = concurrency.now() + api.seconds("timeout", timeout)
        with api.torchft_errors(), self._calling(api.string("replica_id", replica_id)) as replica:
            replica.beat(deadline)

    def leave(self, replica_id: str) -> None:
        """Let a replica leave, so that nobody waits for its heartbeat to time out. Not in torchft.

        Does nothing for a replica that this client does not represent. Takes up to 2 s if etcd is unreachable, and does
        not raise then: the lease expires.

        Args:
            replica_id: the replica's name.
        """
        with self._lock:
            replica = self._replicas.pop(api.string("replica_id", replica_id), None)
        if replica is not None:
            replica.leave(LEAVE_TIMEOUT)

    def kill(self, replica_id: str, message: str, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Make the process of a replica's manager exit with status 1. In torchft, only the dashboard can do that.

        Returns when the replica is no member of the job any longer. A later replica of the same name is left alone.

        Args:
            replica_id: the replica's name.
            message: the reason, for the manager's log.
            timeout: how long to wait, a timedelta.

        Raises TimeoutError when it is still a member after that time or etcd does not answer; the process may end yet,
        within a minute. Raises RuntimeError when etcd refuses or there is no such replica.
        """
        deadline = concurrency.now() + api.seconds("timeout", timeout)
        replica, why = api.string("replica_id", replica_id), api.string("message", message)
        api.check_process(self._pid)
        with api.torchft_errors():
            order_kill(self._etcd, self._job.prefix, replica, why, deadline)

    def close(self) -> None:
        """Let all replicas leave, and disconnect. Not in torchft. Idempotent; does nothing in a forked child.

        Takes up to 2 s if etcd is unreachable, and does not raise then: the leases expire.
        """
        if os.getpid() != self._pid:  # the replicas are the parent's
            return
        self._cancel_finalizer()
        with self._lock:
            replicas = self._replicas.copy()
            self._replicas.clear()
        _leave_all(replicas, self._etcd)

    @contextlib.contextmanager
    def _calling(self, replica_id: str) -> Iterator[Replica]:
        """The replica, for a call of it."""
        api.check_process(self._pid)
        with self._lock:
            self._calls[replica_id] += 1
            silent = self._take_silent()
            if replica_id not in self._replicas:
                self._replicas[replica_id] = Replica(self._etcd, self._job, replica_id, keeps_lease=False)
            replica = self._replicas[replica_id]
        try:
            for one in silent:
                one.leave(LEAVE_TIMEOUT)
            yield replica
        finally:
            with self._lock:
                self._calls[replica_id] -= 1
                self._signs[replica_id] = concurrency.now()

    def _take_silent(self) -> list[Replica]:
        """With the lock held: the replicas without a call for the heartbeat timeout, if leases cannot show that so
        soon."""
        if self._job.silent_after >= self._job.heartbeat_timeout:
            return []
        since = concurrency.now() - self._job.silent_after
        silent = [name for name in self._replicas if not self._calls[name] and self._signs.get(name, since) < since]
        return [self._replicas.pop(name) for name in silent]


def _leave_all(replicas: dict[str, Replica], etcd: SharedClient) -> None:
    """The timeout is for all of them together: if etcd is unreachable, it is for each."""
    deadline = concurrency.now() + LEAVE_TIMEOUT
    for replica in replicas.values():
        left = deadline - concurrency.now()
        if left > 0:
            replica.leave(left)
        else:
            replica.orphan()
    etcd.close()


# -- following ---------------------------------------------------------------------------------------------------------


class Observer:
    """Follows one job. Thread-safe.

        def abort(replica_id: str, cause: str) -> None:
            print(replica_id, "is lost:", cause)
            process_group.abort()  # collectives that wait for it end now, not when NCCL times out

        observer = Observer("etcd://h1:2379,h2:2379/job1", timedelta(seconds=10), on_lost=abort)

    With callbacks, etcd sends it every request and every quorum of the job, so use one per job, or per host.

    Args:
        addr: the job's address, see `LighthouseClient`.
        connect_timeout: how long to wait for etcd, a timedelta.
        on_quorum: called with the last quorum, if there is one, and then with every new one. After an interruption it
            may be called only with the last of several.
        on_lost: called with the replica id and the cause when a member of the current quorum dies, leaves or misses its
            heartbeat timeout: long before its peers' collectives time out. Once per quorum and member. The cause is one
            line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)", or empty if none is known.

    Callbacks run one at a time, on the observer's thread. Their exceptions are logged, and do not stop later callbacks.
    While etcd is unreachable nothing is reported; changes are reported when it is back. An observer that nobody refers
    to is closed. If its thread fails with an unexpected error, the error is logged, callbacks end, and each method
    raises RuntimeError.

    Raises TypeError and ValueError for bad arguments, and RuntimeError when etcd does not answer within
    `connect_timeout`.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta,
        *,
        on_quorum: Callable[[api.Quorum], object] | None = None,
        on_lost: Callable[[str, str], object] | None = None,
    ) -> None:
        limit = api.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(api.string("addr", addr), limit)
        self._decided_key = decided_key(self._job.prefix)
        self._on_quorum, self._on_lost = on_quorum, on_lost
        # Only the informer's thread:
        self._current: QuorumRecord | None = None
        self._reported_lost: set[str] = set()  # members of the current quorum
        # Set once by the informer's thread, read by any:
        self._failure: BaseException | None = None
        with contextlib.ExitStack() as ends:
            ends.callback(self._etcd.close)
            if any((on_quorum, on_lost)):
                spans = [Span(self._decided_key), members_span(self._job.prefix)]
                # Weak references: the informer's thread must not keep this object alive.
                report, failed = weakly(self._report), weakly(self._note_failure)
                ends.callback(Informer(self._etcd, spans, report, "ftcoord-observer", failed).close)
            self._end = ends.pop_all().close
        self._cancel_finalizer = concurrency.when_forgotten(self, self._end, last=True)

    def quorum(self) -> api.Quorum | None:
        """The last quorum; None before the first. Costs one read. Raises RuntimeError when etcd does not answer, or the
        observer's thread has failed."""
        if self._failure is not None:
            problem = f"{type(self._failure).__name__}: {self._failure}"
            why = f"this observer has failed ({problem}); close it and make a new one"
            raise api.Failure("Internal", why).error()
        with api.torchft_errors():
            decided = self._etcd.get(self._decided_key).one
            return api.Quorum(parse_quorum(decided.key, decided.value)) if decided is not None else None

    def close(self) -> None:
        """Stop following the job. No callback begins after this returns. Idempotent.

        It waits for a running callback, unless that callback calls it.
        """
        self._cancel_finalizer()
        self._end()

    # -- how ----------------------------------------------------------------------------------------------------

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error

    def _report(self, quorum: Mirror, alive: Mirror) -> None:
        decided = parse_quorum(quorum.one.key, quorum.one.value) if quorum.one is not None else None
        if decided is not None and decided != self._current:
            self._current, self._reported_lost = decided, set()
            if self._on_quorum is not None:
                _call(self._on_quorum, api.Quorum(decided))
        if self._current is None or self._on_lost is None:
            return
        for seat in self._current.seats:
            key = member_key(self._job.prefix, seat.member)
            if key in alive.kvs or seat.member in self._reported_lost:
                continue
            # The watch of the decision may be ahead of that of the members, so a new member may only seem to be lost.
            if self._etcd.get(key).one is None:
                cause = causes_of(self._etcd, self._job.prefix, [seat.member]).get(seat.member, "")
                self._reported_lost.add(seat.member)  # only now: where etcd does not answer, this is called again
                _call(self._on_lost, seat.request.replica_id, cause)


def _call(callback: Callable[..., object], *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:  # a user's: its failure must not end the thread that runs the other callbacks
        log.exception("an observer's callback failed")


LOOKED_BACK: Final = 100
"""How many past quorums to search: a rank's quorum is almost always the last one."""

OnLost: TypeAlias = Callable[[int, str, str], object]
"""Called with a quorum's id, a replica id, and the cause, which may be empty."""


class QuorumWatch(Closing):
    """Watches for lost members of the quorum that a process is in. Thread-safe; its owner must close it.

    An `Observer` gets every request and every decision of a job. This class is for every rank of a job: it reads the
    quorum once, when it is told which one, and from then on etcd sends it only the members that are gone.

    A member with a known cause of death is lost. A member that is gone without a cause may have left after its part, or
    may only have lost its lease: it is lost if no replica of its name is back after a heartbeat timeout.

    Args:
        addr: the job's address, see `LighthouseClient`.
        connect_timeout: how long to wait for etcd, a timedelta.
        on_lost: called on the watch's thread when a member of the quorum is lost; perhaps again for the same member.
        on_failed: called on the watch's thread with an unexpected error, which is logged and ends the watch.

    Raises TypeError and ValueError for bad arguments, and RuntimeError when etcd does not answer in time. While etcd is
    unreachable nothing is reported; losses are reported when it is back.
    """

    def __init__(
        self, addr: str, connect_timeout: timedelta, on_lost: OnLost, on_failed: Callable[[BaseException], object]
    ) -> None:
        limit = api.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(api.string("addr", addr), limit)
        self._on_lost = on_lost
        self._wanted: int | None = None  # written by any thread, as a whole
        # Only the thread:
        self._followed: int | None = None
        self._seats: dict[str, str] = {}  # the replica ids of the quorum's members that are not lost yet
        self._missed: dict[str, float] = {}  # until when those are waited for that are gone without a cause
        self._replicas = ParsedKeys(parse_replica)
        with contextlib.ExitStack() as undo:
            undo.callback(self._etcd.close)
            spans = [members_span(self._job.prefix)]
            self._informer = Informer(self._etcd, spans, self._report, "ftcoord-vigil", on_failed, deletes_only=True)
            undo.pop_all()

    def follow(self, quorum_id: int) -> None:
        """Watch this quorum from now on, and no other."""
        self._wanted = quorum_id
        self._informer.report_again()

    def close(self) -> None:
        """Stop reporting. Waits for a running call of `on_lost`, unless that calls this. Idempotent."""
        self._informer.close()
        self._etcd.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _report(self, members: Mirror) -> float:
        if (wanted := self._wanted) is None:
            return inf
        if wanted != self._followed:
            self._seats = self._read_seats(wanted)
            self._followed = wanted
            self._missed.clear()
            members.forget()  # etcd sends only who goes: read who has come since
            return concurrency.now()
        gone = {one: name for one, name in self._seats.items() if member_key(self._job.prefix, one) not in members.kvs}
        causes = causes_of(self._etcd, self._job.prefix, gone) if gone else {}
        now = concurrency.now()
        until = now + self._job.heartbeat_timeout
        silent = {one for one in gone if one not in causes and self._missed.setdefault(one, until) <= now}
        live = self._live() if silent else frozenset()
        for member in silent | causes.keys():
            name = self._seats.pop(member)
            self._missed.pop(member, None)
            if member in causes or name not in live:
                self._on_lost(wanted, name, causes.get(member, ""))
            else:  # under another id, which the next decision has
                self._followed = None
        return now if self._followed is None else min(self._missed.values(), default=inf)

    def _live(self) -> frozenset[str]:
        """The replica ids of all members."""
        found = self._etcd.range(Get(members_span(self._job.prefix))).kvs
        return frozenset(one.request.replica_id for _, one in self._replicas.of(found))

    def _read_seats(self, quorum_id: int) -> dict[str, str]:
        """The replica ids of the quorum's members, by member id; empty if etcd no longer has the quorum. The others may
        have decided another one meanwhile, while this rank's collectives still wait for those of its own."""
        revision = 0  # the newest
        for _ in range(LOOKED_BACK):
            try:
                decided = self._etcd.range(Get(Span(decided_key(self._job.prefix)), revision=revision)).one
            except RequestRefused as error:
                log.debug("etcd's history ends: %s", error)
                break
            if decided is None:
                break
            quorum = parse_quorum(decided.key, decided.value)
            if quorum.id == quorum_id:
                return {seat.member: seat.request.replica_id for seat in quorum.seats}
            revision = decided.mod_revision - 1
        log.warning("quorum %s is not in etcd's history: who is lost of it is not reported", quorum_id)
        return {}
