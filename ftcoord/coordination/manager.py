"""torchft's managers: one server in each replica group, one client in each of its ranks, and etcd between them.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar
from urllib.parse import quote

from ftcoord.coordination import checks
from ftcoord.coordination.address import Job
from ftcoord.coordination.connection import connect, torchft_errors
from ftcoord.coordination.convert import quorum_result
from ftcoord.coordination.desk import Call, Caller, Desk, put_all
from ftcoord.coordination.group import Ask, Gathering, Polling
from ftcoord.coordination.policy import LEASE_FLOOR
from ftcoord.coordination.replica import Replica
from ftcoord.coordination.types import QuorumResult
from ftcoord.core.quorum import Quorum, Request
from ftcoord.core.quorum_records import encode, parse_quorum
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Get, Put, Span
from ftcoord.etcd.understudy import Understudy

log = logging.getLogger(__name__)

T = TypeVar("T")
LEAVE_TIMEOUT: Final = 2.0
"""Seconds that a manager tries to tell the others that it goes."""
STAY: Final = 1.0
"""Seconds between two looks at whether the lease was lost."""
LOOK_AGAIN: Final = 0.1
"""Seconds between two looks for a manager that is not there yet."""
QUORUM, COMMIT, KILL = "quorum", "commit", "kill"

_here: weakref.WeakValueDictionary[str, ManagerServer] = weakref.WeakValueDictionary()
# Ranks in the manager's own process need no etcd to reach it.


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
        self._prefix = desk_prefix(self._job)
        understudy = Understudy.of_process(self._etcd.config)
        self._replica = Replica(self._etcd, job, replica_id, kept=True, understudy=understudy)
        self._closed = threading.Event()
        self._announced = 0
        self._gathering = Gathering(self._world_size, self._ask)
        self._polling = Polling(self._world_size)
        self._metadata: dict[int, tuple[int, str]] = {}
        self._remote: dict[str, Future[Any]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ftcoord-manager")
        self._begin(patience, interval if job.heartbeat_timeout < LEASE_FLOOR else STAY)
        _here[self.address()] = self

    def address(self) -> str:
        """For ManagerClient, here and in other groups."""
        return str(self._job)

    def shutdown(self) -> None:
        """Leave the job. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        _here.pop(self.address(), None)
        self._desk.close()
        self._replica.leave(LEAVE_TIMEOUT)
        self._threads.shutdown(wait=False)
        self._etcd.close()

    # -- for the ranks ------------------------------------------------------------------------------------------

    def quorum(self, ask: Ask) -> Quorum:
        """Take part in the group's next request. Raises what that ends with, or TimeoutError."""
        future, conclude = self._gathering.join(ask)
        if conclude is not None:
            conclude()
        return _wait(future, ask.timeout, lambda: self._gathering.leave(ask.rank, future))

    def commit(self, rank: int, step: int, yes: bool, timeout: float) -> bool:
        """Vote, and wait for the others. Raises TimeoutError."""
        future = self._polling.cast(rank, step, yes)
        return _wait(future, timeout, lambda: self._polling.leave(rank, future))

    # -- how ----------------------------------------------------------------------------------------------------

    def _begin(self, patience: float, interval: float) -> None:
        try:
            with torchft_errors():
                self._replica.beat(time.monotonic() + patience)
                self._announce(time.monotonic() + patience)
        except (TimeoutError, RuntimeError) as error:
            self._etcd.close()
            raise RuntimeError(f"failed to join the job at {self._job}: {error}") from error
        self._desk = Desk(self._etcd, self._prefix, self._hear)
        threading.Thread(target=self._stay, args=(interval,), name="ftcoord-beats", daemon=True).start()

    def _stay(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self._replica.stay(time.monotonic() + interval)
                self._announce(time.monotonic() + interval)
            except (TimeoutError, EtcdError) as error:
                log.info("a heartbeat was not sent: %s", error)

    def _announce(self, deadline: float) -> None:
        """Let ranks in other processes see that it is there, under the lease it lives under now."""
        lease = self._replica.lease
        if lease != self._announced:
            put_all(self._etcd, [Put(f"{self._prefix}/server", b"", lease)], deadline)
            self._announced = lease

    def _ask(self, asks: Mapping[int, Ask], last: Ask) -> Quorum:
        deadline = time.monotonic() + last.timeout
        self._publish(asks, deadline)
        request = Request(
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

    def _publish(self, asks: Mapping[int, Ask], deadline: float) -> None:
        """What peers fetch from here; mostly the same as before, and then nothing is written."""
        lease = self._replica.lease
        new = {rank: (lease, ask.metadata) for rank, ask in asks.items()}
        changed = {rank: said for rank, said in new.items() if self._metadata.get(rank) != said}
        if changed:
            puts = [Put(f"{self._prefix}/metadata/{rank}", text.encode(), lease) for rank, (_, text) in changed.items()]
            put_all(self._etcd, puts, deadline)
            self._metadata.update(changed)

    # -- ranks in other processes -------------------------------------------------------------------------------

    def _hear(self, line: str, call: Call | None) -> None:
        kind, _, rank = line.partition("-")
        gone = self._remote.pop(line, None)
        if gone is not None and kind == QUORUM:
            self._gathering.leave(int(rank), gone)
        elif gone is not None:
            self._polling.leave(int(rank), gone)
        if call is None:
            return
        if kind == KILL:
            _exit(call)
        elif kind == QUORUM:
            self._hear_ask(line, call)
        else:
            body = call.body
            future = self._polling.cast(int(rank), body["step"], body["yes"])
            self._remote[line] = future
            future.add_done_callback(lambda done: self._reply(line, call.id, {"yes": done.result()}))

    def _hear_ask(self, line: str, call: Call) -> None:
        names = ("rank", "step", "metadata", "shrink_only", "commit_failures", "timeout", "handle")
        future, conclude = self._gathering.join(Ask(**{name: call.body[name] for name in names}))
        self._remote[line] = future
        future.add_done_callback(lambda done: self._reply(line, call.id, _body(done)))
        if conclude is not None:
            self._threads.submit(conclude)

    def _reply(self, line: str, call_id: str, body: Mapping[str, Any]) -> None:
        try:
            self._desk.answer(self._replica.lease, {line: body}, {line: call_id})
        except EtcdError as error:
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
        deadline = time.monotonic() + checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(self._address, connect_timeout.total_seconds())
        self._prefix = desk_prefix(self._job)
        self._caller = Caller(self._etcd, self._prefix)
        weakref.finalize(self, self._etcd.close)
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
        """Ask for a quorum together with all other ranks of the group.

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
        ask = Ask(
            checks.integer("group_rank", group_rank),
            checks.integer("step", step, -checks.LARGEST - 1),
            checks.string("checkpoint_metadata", checkpoint_metadata),
            checks.boolean("shrink_only", shrink_only),
            checks.integer("commit_failures", commit_failures, -checks.LARGEST - 1),
            checks.seconds("timeout", timeout),
            checks.string("reconfigure_handle", reconfigure_handle),
        )
        checks.boolean("init_sync", init_sync)
        server = _here.get(self._address)
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
        server = _here.get(self._address)
        with torchft_errors():
            if server is not None:
                return server.commit(rank, step, should_commit, limit)
            return bool(self._call(COMMIT, rank, {"step": step, "yes": should_commit}, limit)["yes"])

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

        Args:
            message: why, for its log.
            timeout: how long to wait until it is gone.

        Raises TimeoutError and RuntimeError.
        """
        with torchft_errors():
            try:
                self._call(KILL, 0, {"message": checks.string("message", message)}, checks.seconds("timeout", timeout))
            except RuntimeError:
                log.debug("the manager is gone")

    def _find(self, deadline: float, connect_timeout: timedelta) -> None:
        key, pause = Get(Span(f"{self._prefix}/server")), threading.Event()
        while True:
            with torchft_errors():
                if self._etcd.range(key).one is not None:
                    return
            if time.monotonic() >= deadline:
                self._etcd.close()
                raise RuntimeError(
                    f"failed to connect to {self._address.partition('?')[0]} within timeout of"
                    f" {connect_timeout.total_seconds():g}s; verify the address: there is no manager"
                )
            pause.wait(LOOK_AGAIN)

    def _remote_quorum(self, ask: Ask) -> Quorum:
        names = ("rank", "step", "metadata", "shrink_only", "commit_failures", "handle")
        answer = self._call(QUORUM, ask.rank, {name: getattr(ask, name) for name in names}, ask.timeout)
        if "error" in answer:
            raise TimeoutError(answer["error"]) if answer["timed_out"] else checks.failed("Internal", answer["error"])
        return parse_quorum(f"{self._prefix}/out", answer["quorum"].encode())

    def _call(self, kind: str, rank: int, body: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        try:
            return self._caller.call(f"{kind}-{rank}", body, time.monotonic() + timeout)
        except ConnectionResetError as error:
            raise checks.failed("Unavailable", str(error)) from error


def desk_prefix(job: Job) -> str:
    """Where a manager's ranks and peers find it."""
    return f"{job.prefix}/managers/{quote(job.manager, safe='')}"


def _wait(future: Future[T], timeout: float, give_up: Any) -> T:
    try:
        return future.result(timeout)
    except FutureTimeout:
        if future.done():  # it ended with a TimeoutError of its own
            raise
        give_up()
        raise TimeoutError("the other ranks did not come in time") from None


def _body(done: Future[Quorum]) -> Mapping[str, Any]:
    error = done.exception()
    if error is None:
        return {"quorum": encode(done.result()).decode()}
    return {"error": str(error), "timed_out": isinstance(error, TimeoutError)}


def _exit(call: Call) -> None:
    log.error("killed: %s", call.body.get("message", ""))
    os._exit(1)
