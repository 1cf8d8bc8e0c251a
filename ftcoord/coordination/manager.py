"""torchft's managers: one server in each replica group, one client in each of its ranks, and etcd between them.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.coordination import checks
from ftcoord.coordination.advertised import AdvertisedKeys
from ftcoord.coordination.connection import check_process, connect, torchft_errors, unreachable
from ftcoord.coordination.convert import quorum_result
from ftcoord.coordination.mailbox import Call, Gone, Mailbox, MailboxClient
from ftcoord.coordination.policy import LEASE_FLOOR
from ftcoord.coordination.ranks import RankBarrier, RankRequest, RankVote, VoteCounter, await_outcome
from ftcoord.coordination.replica import Replica
from ftcoord.coordination.types import QuorumResult
from ftcoord.core.layout import mailbox_answer_key, mailbox_metadata_key, mailbox_prefix, mailbox_server_key
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, encode, parse_quorum
from ftcoord.errors import EtcdError, EtcdUnavailable
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.lease_keeper import LeaseKeeper

log = logging.getLogger(__name__)

LEAVE_TIMEOUT: Final = 2.0
"""Seconds that a manager which is shut down tries to leave the job; after that its lease expires."""
REJOIN_TIMEOUT: Final = 5.0
"""Seconds that a manager tries to come back after it lost its lease, and until it tries again."""
LOOKUP_INTERVAL: Final = 0.1
"""Seconds between two looks for a manager that is not there yet."""
QUORUM, COMMIT, KILL = "quorum", "commit", "kill"

_managers: weakref.WeakValueDictionary[str, ManagerServer] = weakref.WeakValueDictionary()
"""The managers of this process by their addresses: ranks in the same process need no etcd to reach them."""
os.register_at_fork(after_in_child=_managers.clear)  # a forked child has no manager: the threads are the parent's


class ManagerServer:
    """Represents a replica group in the quorums of its job. It listens on no port: its ranks reach it through etcd.

    Args:
        replica_id: the group's name; no two groups may have the same.
        lighthouse_addr: the job's address, see `LighthouseClient`.
        hostname: accepted and not used.
        bind: accepted and not used.
        store_addr: `host:port` of the store of its ranks.
        world_size: the number of its ranks.
        heartbeat_interval: how often it beats if the job's heartbeat time-out is below 3 s. Otherwise its lease is its
            heartbeat, which is renewed at a third of its TTL.
        connect_timeout: how long to look for etcd.
        quorum_retries: accepted and not used: a quorum is asked for until its time is over, whatever fails meanwhile.

    Raises TypeError, ValueError and OverflowError for bad arguments, and RuntimeError when etcd is not found. If a
    thread of it fails by an error of ftcoord's own, that is logged, and the manager leaves the job: its ranks then see
    that it is gone.
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
        checks.string("hostname", hostname)
        checks.string("bind", bind)
        checks.integer("quorum_retries", quorum_retries, -checks.LARGEST - 1)
        limit = checks.seconds("connect_timeout", connect_timeout)
        job, self._etcd = connect(checks.string("lighthouse_addr", lighthouse_addr), limit)
        self._job = replace(job.at(self._etcd.config), manager=replica_id)
        self._prefix = mailbox_prefix(self._job.prefix, self._job.manager)
        self._pid, self._incarnation = os.getpid(), uuid.uuid4().hex
        self._closed = concurrency.event()
        self._replica = Replica(
            self._etcd, job, replica_id, keeps_lease=True, lease_keeper=LeaseKeeper.of_process(self._etcd.config)
        )
        self._advertised = AdvertisedKeys(self._etcd, self._replica, self._closed)
        self._barrier = RankBarrier(self._world_size, self._ask)
        self._vote_counter = VoteCounter(self._world_size)
        self._remote: dict[str, Callable[[], object]] = {}  # only the mailbox's thread: what withdraws a call
        self._askers = ThreadPoolExecutor(2, thread_name_prefix="ftcoord-manager")
        self._repliers = ThreadPoolExecutor(2, thread_name_prefix="ftcoord-replies")
        self._complete = concurrency.event()  # all attributes are there, so `shutdown` may run on any thread
        self._join(limit)
        beat_interval = interval if job.heartbeat_timeout < LEASE_FLOOR else None
        self._beats = concurrency.thread(self._run_beats, "ftcoord-beats", beat_interval)
        self._mailbox = Mailbox(self._etcd, self._prefix, self._incarnation, self._on_call, self._fail)
        self._beats.start()
        _managers[self.address()] = self
        self._complete.set()

    def address(self) -> str:
        """For ManagerClient, here and in other groups."""
        return str(self._job)

    def shutdown(self) -> None:
        """Leave the job. Idempotent; does nothing in a forked child, where the manager is the parent's."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        _managers.pop(self.address(), None)
        # The mailbox first: it must take no call that nobody answers. Leaving wakes the thread of the beats.
        self._mailbox.close()
        self._replica.leave(LEAVE_TIMEOUT)
        if self._beats is not concurrency.current_thread():  # it is when that thread has failed
            self._beats.join(LEAVE_TIMEOUT)
        self._askers.shutdown(wait=False)
        self._repliers.shutdown(wait=False)
        self._etcd.close()

    # -- for the ranks ------------------------------------------------------------------------------------------

    def quorum(self, request: RankRequest) -> QuorumRecord:
        """Take part in the group's next request. Raises what that ends with, or TimeoutError."""
        future, ask_for_all = self._barrier.join(request)
        if ask_for_all is not None:
            ask_for_all()
        return await_outcome(future, request.timeout, lambda: self._barrier.leave(request.rank, future))

    def commit(self, rank: int, step: int, yes: bool, timeout: float) -> bool:
        """Vote, and wait for the others. Raises TimeoutError."""
        future = self._vote_counter.cast(rank, step, yes)
        return await_outcome(future, timeout, lambda: self._vote_counter.leave(rank, future))

    # -- how ----------------------------------------------------------------------------------------------------

    def _join(self, limit: float) -> None:
        """Become a member of the job, and say where. Raises RuntimeError."""
        try:
            with torchft_errors():
                deadline = concurrency.now() + limit
                self._replica.beat(deadline)
                self._advertised.put({mailbox_server_key(self._prefix): self._incarnation}, deadline)
        except (TimeoutError, RuntimeError) as error:
            self._replica.leave(LEAVE_TIMEOUT)
            self._etcd.close()
            raise RuntimeError(f"failed to join the job at {self._job}: {error}") from None

    def _run_beats(self, beat_interval: float | None) -> None:
        try:
            self._stay(beat_interval)
        finally:
            error = sys.exc_info()[1]
            if error is not None:
                self._fail(error)

    def _stay(self, beat_interval: float | None) -> None:
        """Send beats, if they are judged; and come back under a new lease when the last is lost, even if no rank asks.

        Returns when the manager is shut down.
        """
        timeout = REJOIN_TIMEOUT if beat_interval is None else beat_interval
        while not self._closed.is_set():
            if self._advertised.current:
                self._replica.await_loss(beat_interval)
            if self._closed.is_set():
                return
            deadline = concurrency.now() + timeout
            try:
                self._replica.beat(deadline)
                self._advertised.put({}, deadline)  # moves what is published to the new lease
            except (TimeoutError, EtcdError) as error:
                log.info("a heartbeat was not sent: %s", error)
                self._closed.wait(timeout)

    def _fail(self, error: BaseException) -> None:
        """A thread of this manager has ended by an error: leave the job, so that nobody counts on this manager.

        The ranks see that it is gone, as if its process had died.
        """
        self._complete.wait()
        log.critical("manager %s leaves the job, for a thread of it has failed: %r", self._id, error)
        self.shutdown()

    def _ask(self, requests: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        deadline = concurrency.now() + last.timeout
        self._advertised.put(
            {mailbox_metadata_key(self._prefix, rank): one.metadata for rank, one in requests.items()}, deadline
        )
        request = QuorumRequest(
            replica_id=self._id,
            address=self.address(),
            store_address=self._store_addr,
            step=last.step,
            world_size=self._world_size,
            shrink_only=last.shrink_only,
            data="",
            commit_failures=last.commit_failures,
            handles=tuple(requests[rank].handle for rank in range(self._world_size) if rank in requests),
        )
        return self._replica.ask(request, deadline)

    # -- ranks in other processes: all on the mailbox's thread, but for `_reply` ----------------------------------

    def _on_call(self, channel: str, call: Call | None) -> None:
        """Raises StateError for a call that cannot be read; it is then left alone."""
        withdraw = self._remote.pop(channel, None)
        if withdraw is not None:  # a rank makes one call at a time: the last one has ended
            withdraw()
        if call is None:
            return
        kind = channel.partition("-")[0]
        if kind == KILL:
            self._on_kill(call)
        elif kind == QUORUM:
            self._on_quorum(call)
        else:
            self._on_vote(call)

    def _on_kill(self, call: Call) -> None:
        log.error("killed: %s", call.body.get("message", ""))
        try:
            # Without an answer the caller waits for this manager's lease to end. One attempt: nothing delays the end.
            self._reply(replace(call, deadline=concurrency.now()), {})
        finally:
            os._exit(1)

    def _on_quorum(self, call: Call) -> None:
        request = call.read(RankRequest)
        future, ask_for_all = self._barrier.join(request)
        self._remote[call.channel] = lambda: self._barrier.leave(request.rank, future)
        future.add_done_callback(lambda done: self._reply_later(call, _quorum_body(done)))
        if ask_for_all is not None:
            self._askers.submit(ask_for_all)  # it waits for the quorum

    def _on_vote(self, call: Call) -> None:
        vote = call.read(RankVote)
        future = self._vote_counter.cast(vote.rank, vote.step, vote.yes)
        self._remote[call.channel] = lambda: self._vote_counter.leave(vote.rank, future)
        future.add_done_callback(lambda done: self._reply_later(call, {"yes": done.result()}))

    def _reply_later(self, call: Call, body: Mapping[str, Any]) -> None:
        """From the thread that completes the future, which must not wait for etcd."""
        if not self._closed.is_set():
            self._repliers.submit(self._reply, call, body)

    def _reply(self, call: Call, body: Mapping[str, Any]) -> None:
        try:
            self._advertised.under_lease(lambda lease: self._mailbox.answer(call, body, lease), call.deadline)
        except (TimeoutError, EtcdError) as error:
            log.warning("a rank was not answered: %s", error)


class ManagerClient:
    """One rank's way to its manager, or to that of another group. Thread-safe.

    Args:
        addr: `ManagerServer.address()`.
        connect_timeout: how long to look for the manager.

    Raises RuntimeError when it is not found in that time.
    """

    def __new__(cls, addr: str, connect_timeout: timedelta) -> ManagerClient:
        # torchft's own tests rely on `mock`'s autospec not seeing the signature, as with a native class.
        client = super().__new__(cls)
        client._connect(addr, connect_timeout)
        return client

    def _connect(self, addr: str, connect_timeout: timedelta) -> None:
        self._address = checks.string("addr", addr)
        deadline = concurrency.now() + checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(self._address, connect_timeout.total_seconds())
        self._prefix = mailbox_prefix(self._job.prefix, self._job.manager)
        self._mailbox_client, self._pid = MailboxClient(self._etcd, self._prefix), os.getpid()
        concurrency.when_forgotten(self, _disconnect, self._mailbox_client, self._etcd)
        if self._address not in _managers:
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
        """Ask for a quorum, together with all other ranks of the group.

        Args:
            group_rank: this rank.
            step: the step that the group is at.
            checkpoint_metadata: what a peer needs to fetch the weights of this rank.
            shrink_only: let nobody new in.
            init_sync: whether all take the weights of one replica at step 0.
            commit_failures: steps in a row that were not committed.
            timeout: how long to wait; the time-out of the last rank to call counts for the group.
            reconfigure_handle: what peers need to rebuild their process group (nightly).

        Raises TimeoutError and RuntimeError.
        """
        request = RankRequest(
            rank=checks.integer("group_rank", group_rank),
            step=checks.integer("step", step, -checks.LARGEST - 1),
            metadata=checks.string("checkpoint_metadata", checkpoint_metadata),
            shrink_only=checks.boolean("shrink_only", shrink_only),
            commit_failures=checks.integer("commit_failures", commit_failures, -checks.LARGEST - 1),
            timeout=checks.seconds("timeout", timeout),
            handle=checks.string("reconfigure_handle", reconfigure_handle),
        )
        checks.boolean("init_sync", init_sync)
        server = self._server()
        with torchft_errors():
            quorum = server.quorum(request) if server is not None else self._remote_quorum(request)
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
            return bool(self._call(COMMIT, rank, asdict(RankVote(rank, step, should_commit)), limit)["yes"])

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """What a rank of the group last told its manager. Raises TimeoutError, RuntimeError.

        Args:
            rank: the rank.
            timeout: how long to wait for etcd.
        """
        key = mailbox_metadata_key(self._prefix, checks.integer("rank", rank))
        with torchft_errors():
            found = self._etcd.range(Get(Span(key)), timeout=max(checks.seconds("timeout", timeout), 0.05)).one
        if found is None:
            raise checks.failed("InvalidArgument", "rank not found")
        return found.value.decode()

    def kill(self, message: str, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End the manager's process with status 1. Beyond torchft's Python: there only its dashboard can.

        Returns when the manager has received it, or is gone. A successor of the same name is left alone.

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
            while (problem := self._lookup()) is not None:
                if concurrency.now() >= deadline:
                    raise unreachable(self._address, connect_timeout.total_seconds(), problem) from None
                concurrency.sleep(LOOKUP_INTERVAL)
            undo.pop_all()

    def _lookup(self) -> str | None:
        """Why the manager cannot be reached; None if it can."""
        try:
            found = self._etcd.range(Get(Span(mailbox_server_key(self._prefix)))).one
        except EtcdUnavailable as error:
            return str(error)
        return None if found is not None else "there is no manager"

    def _server(self) -> ManagerServer | None:
        """The manager, if it is in this process. Raises ForkedProcessError."""
        check_process(self._pid)
        return _managers.get(self._address)

    def _remote_quorum(self, request: RankRequest) -> QuorumRecord:
        answer = self._call(QUORUM, request.rank, asdict(request), request.timeout)
        if "error" in answer:
            raise TimeoutError(answer["error"]) if answer["timed_out"] else checks.failed("Internal", answer["error"])
        return parse_quorum(mailbox_answer_key(self._prefix, f"{QUORUM}-{request.rank}"), answer["quorum"].encode())

    def _call(self, kind: str, rank: int, body: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        try:
            return self._mailbox_client.call(f"{kind}-{rank}", body, concurrency.now() + timeout, again=True)
        except Gone as error:
            raise checks.failed("Unavailable", str(error)) from None


def _quorum_body(done: Future[QuorumRecord]) -> Mapping[str, Any]:
    error = done.exception()
    if error is None:
        return {"quorum": encode(done.result()).decode()}
    return {"error": str(error), "timed_out": isinstance(error, TimeoutError)}


def _disconnect(mailbox_client: MailboxClient, etcd: SharedClient) -> None:
    mailbox_client.close()
    etcd.close()
