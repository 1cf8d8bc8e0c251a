"""torchft's managers: one server in each replica group, one client in each of its ranks, and etcd between them.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

from ftcoord import concurrency
from ftcoord.coordination import checks
from ftcoord.coordination.address import Job
from ftcoord.coordination.advertised import AdvertisedKeys
from ftcoord.coordination.connection import check_process, connect, torchft_errors, unreachable, when_forgotten
from ftcoord.coordination.convert import quorum_result
from ftcoord.coordination.mailbox import Call, Gone, Mailbox, MailboxClient
from ftcoord.coordination.policy import LEASE_FLOOR
from ftcoord.coordination.ranks import RankBarrier, RankRequest, RankVote, VoteCounter, outcome
from ftcoord.coordination.replica import Replica
from ftcoord.coordination.types import QuorumResult
from ftcoord.core.quorum import QuorumRecord, QuorumRequest
from ftcoord.core.quorum_records import encode, parse_quorum
from ftcoord.errors import EtcdError, EtcdUnavailable
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.lease_keeper import LeaseKeeper

log = logging.getLogger(__name__)

LEAVE_TIMEOUT: Final = 2.0  # seconds that a manager tries to tell the others that it goes
PATIENCE: Final = 5.0
"""Seconds that a manager tries to come back, and until it tries again."""
LOOK_AGAIN: Final = 0.1
"""Seconds between two looks for a manager that is not there yet."""
QUORUM, COMMIT, KILL = "quorum", "commit", "kill"

_here: weakref.WeakValueDictionary[str, ManagerServer] = weakref.WeakValueDictionary()
# Ranks in the manager's own process need no etcd to reach it; a forked child has no manager.
os.register_at_fork(after_in_child=_here.clear)


class ManagerServer:
    """Represents a replica group in the quorums of its job. It listens on no port: its ranks reach it through etcd.

    Args:
        replica_id: the group's name, unlike that of all other groups.
        lighthouse_addr: the job's address, see `LighthouseClient`.
        hostname: accepted and not used.
        bind: accepted and not used.
        store_addr: `host:port` of the store of its ranks.
        world_size: the number of its ranks.
        heartbeat_interval: how often it beats where the job's heartbeat time-out is below 3 s; above, its lease is its
            heartbeat, and renewed at a third of its life.
        connect_timeout: how long etcd is looked for.
        quorum_retries: accepted and not used: a quorum is asked for until its time is over, whatever fails meanwhile.

    Raises RuntimeError when etcd is not found.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        self._id = checks.string("replica_id", replica_id)
        self._store_addr = checks.string("store_addr", store_addr)
        self._world_size = checks.integer("world_size", world_size)
        interval = checks.seconds("heartbeat_interval", heartbeat_interval)
        checks.string("hostname", hostname), checks.string("bind", bind)
        checks.integer("quorum_retries", quorum_retries, -checks.LARGEST - 1)
        patience = checks.seconds("connect_timeout", connect_timeout)
        job, self._etcd = connect(checks.string("lighthouse_addr", lighthouse_addr), patience)
        self._job = replace(job.at(self._etcd.config), manager=replica_id)
        self._prefix = mailbox_prefix(self._job)
        lease_keeper = LeaseKeeper.of_process(self._etcd.config)
        self._replica = Replica(self._etcd, job, replica_id, keeps_lease=True, lease_keeper=lease_keeper)
        self._closed = concurrency.event()
        self._pid, self._incarnation = os.getpid(), uuid.uuid4().hex
        self._barrier = RankBarrier(self._world_size, self._ask)
        self._vote_counter = VoteCounter(self._world_size)
        self._advertised = AdvertisedKeys(self._etcd, self._prefix, self._replica, self._closed)
        self._remote: dict[str, Callable[[], object]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ftcoord-manager")
        self._replies = ThreadPoolExecutor(2, thread_name_prefix="ftcoord-replies")
        self._begin(patience, interval if job.heartbeat_timeout < LEASE_FLOOR else None)
        _here[self.address()] = self

    def address(self) -> str:
        """For ManagerClient, here and in other groups."""
        return str(self._job)

    def shutdown(self) -> None:
        """Leave the job. Idempotent; does nothing in a forked child, where the manager is the parent's."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        _here.pop(self.address(), None)
        self._mailbox.close()
        self._replica.leave(LEAVE_TIMEOUT)
        self._beats.join(LEAVE_TIMEOUT)
        self._threads.shutdown(wait=False)
        self._replies.shutdown(wait=False)
        self._etcd.close()

    # -- for the ranks ------------------------------------------------------------------------------------------

    def quorum(self, ask: RankRequest) -> QuorumRecord:
        """Take part in the group's next request. Raises what that ends with, or TimeoutError."""
        future, conclude = self._barrier.join(ask)
        if conclude is not None:
            conclude()
        return outcome(future, ask.timeout, lambda: self._barrier.leave(ask.rank, future))

    def commit(self, rank: int, step: int, yes: bool, timeout: float) -> bool:
        """Vote, and wait for the others. Raises TimeoutError."""
        future = self._vote_counter.cast(rank, step, yes)
        return outcome(future, timeout, lambda: self._vote_counter.leave(rank, future))

    # -- how ----------------------------------------------------------------------------------------------------

    def _begin(self, patience: float, beat_interval: float | None) -> None:
        try:
            with torchft_errors():
                deadline = concurrency.now() + patience
                self._replica.beat(deadline)
                self._advertised.put({"server": self._incarnation}, deadline)
        except (TimeoutError, RuntimeError) as error:
            self._replica.leave(LEAVE_TIMEOUT)
            self._etcd.close()
            raise RuntimeError(f"failed to join the job at {self._job}: {error}") from None
        self._mailbox = Mailbox(self._etcd, self._prefix, self._incarnation, self._hear)
        self._beats = concurrency.thread(self._stay, "ftcoord-beats", beat_interval)
        self._beats.start()

    def _stay(self, beat_interval: float | None) -> None:
        """Send beats, if that is how it lives; and come back when its lease is lost, also while no rank asks."""
        timeout = PATIENCE if beat_interval is None else beat_interval
        while not self._closed.is_set():
            if self._advertised.current:
                self._replica.await_loss(beat_interval)
            if self._closed.is_set():
                return
            deadline = concurrency.now() + timeout
            try:
                self._replica.beat(deadline)
                self._advertised.put({}, deadline)
            except (TimeoutError, EtcdError) as error:
                log.info("a heartbeat was not sent: %s", error)
                self._closed.wait(timeout)

    def _ask(self, asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        deadline = concurrency.now() + last.timeout
        self._advertised.put({f"metadata/{rank}": ask.metadata for rank, ask in asks.items()}, deadline)
        request = QuorumRequest(
            self._id,
            self.address(),
            self._store_addr,
            last.step,
            self._world_size,
            last.shrink_only,
            "",
            last.commit_failures,
            tuple(asks[rank].handle for rank in range(self._world_size) if rank in asks),
        )
        return self._replica.ask(request, deadline)

    # -- ranks in other processes -------------------------------------------------------------------------------

    def _hear(self, line: str, call: Call | None) -> None:
        """Raises StateError for a call that is not ours; it is then left alone."""
        kind = line.partition("-")[0]
        leave = self._remote.pop(line, None)
        if leave is not None:
            leave()
        if call is None:
            return
        if kind == KILL:
            log.error("killed: %s", call.body.get("message", ""))
            try:
                self._reply(replace(call, deadline=concurrency.now()), {})  # else the caller waits for the lease to end
            finally:
                os._exit(1)
        elif kind == QUORUM:
            self._hear_ask(line, call)
        else:
            cast = call.read(RankVote)
            future = self._vote_counter.cast(cast.rank, cast.step, cast.yes)
            self._remote[line] = lambda: self._vote_counter.leave(cast.rank, future)
            future.add_done_callback(lambda done: self._replies.submit(self._reply, call, {"yes": done.result()}))

    def _hear_ask(self, line: str, call: Call) -> None:
        ask = call.read(RankRequest)
        future, conclude = self._barrier.join(ask)
        self._remote[line] = lambda: self._barrier.leave(ask.rank, future)
        future.add_done_callback(lambda done: self._replies.submit(self._reply, call, _body(done)))
        if conclude is not None:
            self._threads.submit(conclude)

    def _reply(self, call: Call, body: Mapping[str, Any]) -> None:
        try:
            self._advertised.under_lease(lambda lease: self._mailbox.answer(call, body, lease), call.deadline)
        except (TimeoutError, EtcdError) as error:
            log.warning("a rank was not answered: %s", error)


class ManagerClient:
    """One rank's way to its manager, or to that of another group. Thread-safe.

    Args:
        addr: `ManagerServer.address()`.
        connect_timeout: how long the manager is looked for.

    Raises RuntimeError when it is not found in that time.
    """

    def __new__(cls, addr: str, connect_timeout: timedelta) -> ManagerClient:
        # Made like a native class, whose signature mock's autospec does not see: torchft's own tests rely on that.
        client = super().__new__(cls)
        client._connect(addr, connect_timeout)
        return client

    def _connect(self, addr: str, connect_timeout: timedelta) -> None:
        self._address = checks.string("addr", addr)
        deadline = concurrency.now() + checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(self._address, connect_timeout.total_seconds())
        self._prefix = mailbox_prefix(self._job)
        self._mailbox_client, self._pid = MailboxClient(self._etcd, self._prefix), os.getpid()
        when_forgotten(self, _disconnect, self._mailbox_client, self._etcd)
        if self._address not in _here:
            self._find(deadline, connect_timeout)

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: int,
        timeout: timedelta,
        reconfigure_handle: str = "",
    ) -> QuorumResult:
        """RankRequest for a quorum together with all other ranks of the group.

        Args:
            group_rank: this rank.
            step: the step that the group is at.
            checkpoint_metadata: what a peer needs to fetch the weights of this rank.
            shrink_only: let nobody new in.
            init_sync: whether all take the weights of one replica at step 0.
            commit_failures: steps in a row that were not committed.
            timeout: how long to wait; that of the last rank counts for the group.
            reconfigure_handle: what peers need to rebuild their process group (nightly).

        Raises TimeoutError and RuntimeError.
        """
        ask = RankRequest(
            checks.integer("group_rank", group_rank),
            checks.integer("step", step, -checks.LARGEST - 1),
            checks.string("checkpoint_metadata", checkpoint_metadata),
            checks.boolean("shrink_only", shrink_only),
            checks.integer("commit_failures", commit_failures, -checks.LARGEST - 1),
            checks.seconds("timeout", timeout),
            checks.string("reconfigure_handle", reconfigure_handle),
        )
        checks.boolean("init_sync", init_sync)
        server = self._server()
        with torchft_errors():
            quorum = server.quorum(ask) if server is not None else self._remote_quorum(ask)
        return quorum_result(quorum, self._job.manager, group_rank, init_sync)

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote on a step, and wait until all ranks of the group have.

        Args:
            group_rank: this rank.
            step: the step.
            should_commit: this rank's vote.
            timeout: how long to wait.

        Returns whether all said yes. Raises TimeoutError, after which the vote does not count, and RuntimeError.
        """
        rank, limit = checks.integer("group_rank", group_rank), checks.seconds("timeout", timeout)
        checks.integer("step", step, -checks.LARGEST - 1)
        checks.boolean("should_commit", should_commit)
        server = self._server()
        with torchft_errors():
            if server is not None:
                return server.commit(rank, step, should_commit, limit)
            return bool(self._call(COMMIT, rank, {"rank": rank, "step": step, "yes": should_commit}, limit)["yes"])

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """What a rank of the group told its manager last. Raises TimeoutError, RuntimeError.

        Args:
            rank: the rank.
            timeout: how long to wait for etcd.
        """
        key = f"{self._prefix}/metadata/{checks.integer('rank', rank)}"
        with torchft_errors():
            found = self._etcd.range(Get(Span(key)), timeout=max(checks.seconds("timeout", timeout), 0.05)).one
        if found is None:
            raise checks.failed("InvalidArgument", "rank not found")
        return found.value.decode()

    def kill(self, message: str, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End the manager's process with status 1. Beyond torchft's Python: there only its dashboard can.

        Returns when the manager has heard of it, or is gone. One that takes its place meanwhile is left alone.

        Args:
            message: why, for its log.
            timeout: how long to wait for that.

        Raises TimeoutError and RuntimeError.
        """
        body = {"message": checks.string("message", message)}
        deadline = concurrency.now() + checks.seconds("timeout", timeout)
        check_process(self._pid)
        with torchft_errors(), contextlib.suppress(Gone):
            self._mailbox_client.call(f"{KILL}-0", body, deadline, again=False)

    def _find(self, deadline: float, connect_timeout: timedelta) -> None:
        with torchft_errors(), contextlib.ExitStack() as undo:
            undo.callback(_disconnect, self._mailbox_client, self._etcd)
            while (problem := self._look()) is not None:
                if concurrency.now() >= deadline:
                    raise unreachable(self._address, connect_timeout.total_seconds(), problem) from None
                concurrency.sleep(LOOK_AGAIN)
            undo.pop_all()

    def _look(self) -> str | None:
        """Why the manager cannot be reached; None if it can."""
        try:
            found = self._etcd.range(Get(Span(f"{self._prefix}/server"))).one
        except EtcdUnavailable as error:
            return str(error)
        return None if found is not None else "there is no manager"

    def _server(self) -> ManagerServer | None:
        """The manager, if it is in this process. Raises ForkedProcessError."""
        check_process(self._pid)
        return _here.get(self._address)

    def _remote_quorum(self, ask: RankRequest) -> QuorumRecord:
        names = ("rank", "step", "metadata", "shrink_only", "commit_failures", "handle")
        answer = self._call(QUORUM, ask.rank, {name: getattr(ask, name) for name in names}, ask.timeout)
        if "error" in answer:
            raise TimeoutError(answer["error"]) if answer["timed_out"] else checks.failed("Internal", answer["error"])
        return parse_quorum(f"{self._prefix}/out", answer["quorum"].encode())

    def _call(self, kind: str, rank: int, body: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        try:
            return self._mailbox_client.call(f"{kind}-{rank}", body, concurrency.now() + timeout, again=True)
        except Gone as error:
            raise checks.failed("Unavailable", str(error)) from None


def mailbox_prefix(job: Job) -> str:
    """Where a manager's ranks and peers find it."""
    return f"{job.prefix}/managers/{quote(job.manager, safe='')}"


def _body(done: Future[QuorumRecord]) -> Mapping[str, Any]:
    error = done.exception()
    if error is None:
        return {"quorum": encode(done.result()).decode()}
    return {"error": str(error), "timed_out": isinstance(error, TimeoutError)}


def _disconnect(caller: MailboxClient, etcd: SharedClient) -> None:
    caller.close()
    etcd.close()
