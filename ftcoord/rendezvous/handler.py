"""torchrun's `etcd-v3` rendezvous: rounds decided through etcd, each with a fresh store and bootstrap address.

The contract is torch's `RendezvousHandler` (https://docs.pytorch.org/docs/stable/elastic/rendezvous.html);
`docs/protocol.md` describes the protocol.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from torch.distributed import TCPStore
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import api

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.core import rendezvous_records
from ftcoord.core.layout import fence_key, round_store_prefix
from ftcoord.core.rendezvous_records import STOPPED, RoundHead, WorkerFailure
from ftcoord.core.timers import TimerInfo
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ConfigError, EtcdError, ThreadNotStarted
from ftcoord.escaping import named, redacted
from ftcoord.etcd.client import SharedClient, unusable
from ftcoord.etcd.retry import UNANSWERED
from ftcoord.logs import log_change, show_log_lines
from ftcoord.metrics import process as metrics
from ftcoord.metrics.exporter import MetricsAddress, serve_process
from ftcoord.primitives.orphans import MarkedChildren
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.rendezvous.bootstrap import Reservation, address_trouble, check_local_addr, own_address
from ftcoord.rendezvous.node import SHUT_DOWN, Node
from ftcoord.rendezvous.settings import RendezvousSettings
from ftcoord.rendezvous.workers import WorkerWatch, failure_in, raised_as_exceptions, reason_of, why_process_ends
from ftcoord.stop import StopRelay
from ftcoord.store import EtcdStore
from ftcoord.timer.etcd_timer import serve_timers

log = logging.getLogger(__name__)

NO_ID: Final = "none"
"""The id that torchrun gives a job without `--rdzv-id`."""
LONGEST_FOLDER: Final = 255 - 9
"""Bytes of an id that a name of torch's log folder can contain: torch adds nine more."""


class HandlerResources:
    """The resources of a handler. Does not refer to the handler, whose finalizer releases them."""

    def __init__(self, node: Node, ends: contextlib.ExitStack) -> None:
        self.node, self.ends = node, ends  # never change
        self.store: EtcdStore | None = None
        self.tcp_store: TCPStore | None = None
        self.watch: WorkerWatch | None = None
        self.stop_relay: StopRelay | None = None
        self.timers: dict[int, str] = {}  # any thread
        """The scopes of the expiration timers for which workers were killed, by pid."""
        self.stopped_at: float | None = None
        """When the agent was asked to stop the workers of this round, on this host's wall clock."""
        self.left = False  # any thread; becomes True once

    def watch_workers(self, round_: RoundHead, children: MarkedChildren | None, *, starting: bool = False) -> None:
        """Report a failed worker at once. If they cannot be watched, the other nodes learn of it from the agent.

        Args:
            starting: the agent is about to start them. Call this once more when it has.
        """
        if children is None:
            return
        if self.watch is not None:
            self.watch.all_started()
            return
        try:
            failed = functools.partial(self.node.worker_failed, round_)
            self.watch = WorkerWatch(
                children.mark, failed, _unwatched, lambda pid: self.timers.get(pid, ""), starting=starting
            )
        except (OSError, ThreadNotStarted) as error:
            log.debug("the workers are not watched: %s", error)

    def note_expiring(self, timer: TimerInfo) -> None:
        """Note a timer for which a worker is about to be killed."""
        self.timers[timer.pid] = timer.scope

    def judge_workers(self) -> None:
        """Note which worker failed first, now that all have ended."""
        if self.watch is not None:
            self.node.workers_ended(self.watch.failure(self.stopped_at))

    def end_round(self) -> None:
        """Close the round's stores, and stop watching its workers."""
        self.judge_workers()
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.end()
        if self.stop_relay is not None:
            self.stop_relay.close()
        self.timers.clear()
        self.stopped_at = self.stop_relay = None
        if self.store is not None:
            self.store.close()
        self.store = self.tcp_store = None

    def leave(self, why: str = "") -> None:
        """Release everything. An empty `why` stands for the end of this process. Idempotent; does not raise if etcd is
        unreachable."""
        if self.left:
            return
        self.left = True
        self.node.stop()
        self.node.leave(why or why_process_ends())
        self.end_round()
        self.ends.close()


def _unwatched(error: BaseException) -> None:
    log.warning(
        "the workers of this round are not watched any longer (%r): if one fails, the other nodes learn of it only"
        " when this node's agent has stopped its other workers",
        error,
    )


class EtcdRendezvousHandler(api.RendezvousHandler):
    """One node's part in the rendezvous of a run.

    torch's registry makes it for `--rdzv-backend=etcd-v3`; in a program, call
    `ftcoord.rendezvous.handler.create_handler`. Do not call the constructor: its arguments are not public.

    Promised: all nodes that `next_rendezvous` returns the same round to have the same world and bootstrap address, and
    each has its own rank. Round numbers only grow. A dead agent is noticed at once, and a lost host when its lease
    expires (`lease_ttl` seconds), whatever the workers do. An etcd outage disturbs no running worker.

    Not promised: that a node that etcd cannot reach has stopped. Its writes to the store of an old round are refused.

    A handler that nobody refers to leaves the run to the others, and its store is closed. The same happens when the
    process ends without `shutdown()`.

    Args:
        settings: the run and its timeouts.
        etcd: the client; closed with this handler.
        server: an embedded etcd that ends with this handler.
    """

    def __init__(self, settings: RendezvousSettings, etcd: SharedClient, server: EtcdServer | None = None) -> None:
        self._settings, self._etcd = settings, etcd
        ends = contextlib.ExitStack()
        if server is not None:
            ends.callback(server.stop)
        ends.callback(etcd.close)
        self._address = own_address(settings.local_addr, etcd.config, alone=settings.max_nodes == 1)
        self.host = f"{socket.gethostname()} (pid {os.getpid()})"
        self._resources = HandlerResources(Node(etcd, settings, self._address, self.host), ends)
        self._children: MarkedChildren | None = None
        self._watched: RoundHead | None = None
        self._users_error: BaseException | None = None
        self._told = True
        self._called_back = 0
        self._pid = os.getpid()
        self._cancel_finalizer = concurrency.when_forgotten(self, self._resources.leave)

    @property
    def _node(self) -> Node:
        return self._resources.node

    # -- torch's interface --------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """The name of the backend that was asked for, such as ``etcd-v3``."""
        return self._settings.backend

    def get_run_id(self) -> str:
        """The run id, as the user gave it."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's agent serves the workers' store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 turns it off)."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> api.RendezvousInfo:
        """Take part in the next round; returns when the round is decided and all its nodes have taken their seats.

        A spare node waits here without limit while others run. When the run closes it raises SystemExit(0), or
        RendezvousGracefulExitError with `on_spare_close=raise`. So does a node that an operator drains.

        Raises:
            RendezvousTimeoutError: no round was decided within `join_timeout` seconds.
            RendezvousClosedError: the run is over. A failed run may be restarted (see `restart`): a new handler waits
                until no node of the old run is left.
            RendezvousConnectionError: etcd was unreachable all that time, or refused.
            RendezvousStateError: this version of ftcoord cannot read the run's record in etcd, or the run has other
                limits (--nnodes) than this node.
        """
        self._users_error = sys.exc_info()[1]  # of whoever calls from an except block: no reason of ours to end
        began = concurrency.now()
        with self._recorded("next_rendezvous"), raised_as_exceptions():
            round_, rank = self._join()
            self._expect_workers(round_)
        metrics.note_round(self._settings.run_id, round_.number, rank, round_.size, concurrency.now() - began)
        self._log(round_line(self._settings.run_id, round_, rank), round_, round_.before, rank)
        if trouble := address_trouble(round_, self.host, self._address):
            log.warning("run %r, round %d: %s", self._settings.run_id, round_.number, trouble)
        ended = f"; the round before ended: {round_.before}" if round_.before else ""
        place = f"{self.host} is rank {rank} of {round_.size} in round {round_.number}{ended}"
        self._record("next_rendezvous", place, rank)
        assert self._resources.store is not None
        bootstrap = api.RendezvousStoreInfo(round_.address, round_.port)
        return api.RendezvousInfo(self._resources.store, rank, round_.size, bootstrap)

    def num_nodes_waiting(self) -> int:
        """More than 0 if the agent should call `next_rendezvous` again. Costs no request, never blocks, never raises.

        Also if the run was closed by a failure or by hand: `next_rendezvous` then raises the reason.
        """
        count, reason = self._node.waiting()
        mine = self._node.round
        if mine is not None and mine is not self._watched:
            self._watched = mine  # the agent asks this only when the workers run
            self._resources.watch_workers(mine, self._children)
        if count and mine is not None and self._called_back != mine.number:
            self._called_back = mine.number
            self._resources.stopped_at = concurrency.wall()
            metrics.RECALLS.add(self._settings.run_id)
            run = self._settings.run_id
            self._log(f"run {run!r}, round {mine.number}: the workers are stopped: {reason}", mine, reason)
            self._record("num_nodes_waiting", f"round {mine.number} is over: {reason}", state=NodeState.FAILED)
        return count

    def is_closed(self) -> bool:
        """Whether the run is over. Costs no request while this node has its lease and knows of a round.

        Otherwise it reads etcd, and raises RendezvousConnectionError when etcd does not answer within
        `request_timeout` seconds, or RendezvousStateError when the run's record cannot be read.
        """
        with self._recorded("is_closed"):
            member = self._node.participant.member
            known = (member.record if member and not member.lost else None) or self._node.run.read()
        return known is not None and bool(known.closed)

    def set_closed(self) -> None:
        """End the run for all nodes.

        Raises RendezvousConnectionError when etcd refuses, or has not taken it after `close_timeout` seconds, and
        RendezvousStateError when the run's record cannot be read.
        """
        with self._recorded("set_closed"):
            self._node.run.close(f"closed by {self.host}", rendezvous_records.CLOSED, by=self.host)

    def shutdown(self) -> bool:
        """Leave, and close the run if this node's workers have finished or have used up their restarts.

        An agent that ends for any other reason leaves the run to the others. So does one that the others went on
        without. Idempotent; never raises for etcd. Returns False if the run should have been closed, but etcd did not
        take it.
        """
        if self._resources.left:
            return self._told
        error = sys.exc_info()[1]
        if error is self._users_error:
            error = None
        try:
            # Who catches torch's RendezvousGracefulExitError calls this without one.
            if not self._node.is_drained and (error is None or isinstance(error, ChildFailedError)):
                done = STOPPED if self._node.stop_reason else rendezvous_records.FINISHED
                outcome = done if error is None else rendezvous_records.FAILED
                why = f"{self.host} {outcome}" + (f": {self._node.stop_reason}" if outcome == STOPPED else "")
                speaker = self._node.speaker if self._node.round else None
                with self._node.torch_errors():
                    self._node.run.close(why, outcome, speaker, self._why_failed(error), self.host)
        except api.RendezvousError as problem:
            log.warning("the run could not be closed: %s", problem)
            self._told = False
        self._leave("finished" if error is None else reason_of(error))
        return self._told

    def _why_failed(self, error: ChildFailedError | None) -> WorkerFailure | None:
        """The worker whose failure makes this agent give up, if one does."""
        if error is None:
            return None
        self._resources.judge_workers()
        return self._node.failure or failure_in(error)

    # -- joining ------------------------------------------------------------------------------------------------

    def prepare(self, metrics_at: MetricsAddress | None = None) -> None:
        """Take the lease and start the watch that the first round needs. If etcd is unreachable, the round does both.

        From now on the handler serves timers, if the settings ask for it, and this process's metrics at `metrics_at`.

        Raises RendezvousConnectionError when etcd refuses, and ThreadNotStarted; the handler has then left.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave, "it could not prepare")
            serve_process(metrics_at)
            children = self._children = MarkedChildren()
            self._resources.ends.callback(children.close)
            if self._settings.timers:
                is_embedded = self._settings.etcd is None
                expiring = self._resources.note_expiring
                self._resources.ends.callback(
                    serve_timers(self._settings.prefix, self._etcd, expiring, is_embedded, mark=children.mark)
                )
            with self._node.torch_errors():
                try:
                    self._node.participant.prepare()
                except UNANSWERED as error:
                    log.debug("the lease and the watch of the first round were not prepared: %s", error)
            undo.pop_all()

    def _join(self) -> tuple[RoundHead, int]:
        if self._resources.left:
            raise api.RendezvousClosedError(SHUT_DOWN)
        self._resources.end_round()
        self._node.begin()
        while True:
            reservation = Reservation(self._address)
            try:
                round_ = self._node.ask(reservation.port)
                if round_ is not None:
                    return round_, self._begin_round(round_, reservation)
            finally:
                reservation.release()

    # -- rounds -------------------------------------------------------------------------------------------------

    def _begin_round(self, round_: RoundHead, reservation: Reservation) -> int:
        member = self._node.participant.member
        if member is None:  # another thread has shut this handler down just now
            raise api.RendezvousClosedError(SHUT_DOWN)
        rank = self._node.rank
        if rank == 0 and self.use_agent_store:
            store = self._resources.tcp_store = reservation.serve()
            node = self._node  # the relay's thread must not refer to this handler, which may be dropped
            ask = functools.partial(node.run.stop, by=self.host)
            self._resources.stop_relay = StopRelay(store, lambda: node.stop_reason, ask)
        prefix = self._settings.prefix
        self._resources.store = EtcdStore(
            self._etcd,
            round_store_prefix(prefix, round_.name),
            lease=(member.record_kv and member.record_kv.lease) or None,  # None if the record was deleted just now
            fence=fence_key(prefix, round_.name),
        )
        return rank

    def _expect_workers(self, round_: RoundHead) -> None:
        """Prepare for workers, before the agent starts the first one: this process may be killed right after that, and
        the worker may end before the agent looks at it."""
        children, member = self._children, self._node.participant.member
        if children is not None and self._settings.orphans == "end":
            if (sentinel := Sentinel.of_process()) is not None:
                sentinel.end_orphans(children.mark)
            if member is not None:
                member.session.introduce()
        if concurrency.is_main_thread():  # as an agent's: the watch looks for its workers again and again
            self._resources.watch_workers(round_, children, starting=True)

    # -- the end ------------------------------------------------------------------------------------------------

    def _leave(self, why: str = "") -> None:
        """Release everything. An empty `why` stands for the end of this process. Does nothing in a forked child."""
        if os.getpid() == self._pid:
            why = why or why_process_ends()
            self._cancel_finalizer()
            mine = self._node.round
            if mine is not None and not self._resources.left:
                run = self._settings.run_id
                self._log(f"run {run!r}, round {mine.number}: this node leaves: {why}", mine, why)
            self._resources.leave(why)

    # -- events -------------------------------------------------------------------------------------------------

    def _log(self, text: str, round_: RoundHead, reason: str, rank: int | None = None) -> None:
        """Log a change of this node's state; `round_` is the last round that it took part in."""
        member, run = self._node.participant.member, self._settings.run_id
        id_, revision = (member.id, member.record_kv and member.record_kv.mod_revision) if member else (None, None)
        at = {"run": run, "round": round_.number, "host": self.host, "member": id_, "revision": revision}
        log_change(log, text, rank=rank, reason=reason, **at)

    @contextlib.contextmanager
    def _recorded(self, action: str) -> Iterator[None]:
        try:
            with self._node.torch_errors():
                yield
        except api.RendezvousError as error:
            self._record(action, f"{type(error).__name__}: {error}", state=NodeState.FAILED)
            raise

    def _record(self, action: str, message: str, rank: int | None = None, state: NodeState = NodeState.RUNNING) -> None:
        construct_and_record_rdzv_event(
            run_id=self._settings.run_id,
            message=message,
            node_state=state,
            name=f"{type(self).__name__}.{action}",
            hostname=self._address,
            pid=self._pid,
            rank=rank,
        )


# -- from torchrun's parameters -------------------------------------------------------------------------------------


def create_handler(params: api.RendezvousParameters, conf: Mapping[str, object] | None = None) -> api.RendezvousHandler:
    """Make the handler that `torchrun --rdzv-backend=etcd-v3` uses. It has joined no round yet.

    `conf` replaces the parameters' own ``rdzv_conf``.

    Raises:
        ConfigError (a ValueError): bad settings, before any socket is opened.
        RendezvousConnectionError: etcd refuses, or does not answer within `join_timeout` seconds.
        ServerError: the embedded etcd cannot be started.
    """
    show_log_lines()
    metrics_at = MetricsAddress.of_environment()
    handler = EtcdRendezvousHandler(*open_run(params, conf))
    handler.prepare(metrics_at)
    return handler


def check_for_torch(params: api.RendezvousParameters) -> None:
    """Raises ConfigError for an id that torch's agent cannot use: it names its log folder after it.

    For an agent that torch starts: it would end with another exception, after it has joined.
    """
    run_id = params.run_id
    if isinstance(run_id, str) and ("/" in run_id or len(os.fsencode(run_id)) > LONGEST_FOLDER):
        allowed = f"torch names a log folder after it: give an id without '/', of at most {LONGEST_FOLDER} bytes"
        raise ConfigError("run_id", redacted(run_id), f"{allowed} (--rdzv-id)")


def open_run(
    params: api.RendezvousParameters, conf: Mapping[str, object] | None = None
) -> tuple[RendezvousSettings, SharedClient, EtcdServer | None]:
    """A run's settings, checked, a client whose etcd has answered, and the embedded etcd if there is one.

    `conf` replaces the parameters' own ``rdzv_conf``. Raises what `create_handler` raises.
    """
    settings = RendezvousSettings.parse(
        backend=params.backend,
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        conf=params.config if conf is None else conf,
    )
    check_local_addr(settings.local_addr)
    if settings.etcd is not None:
        return _with_id(settings), connect(settings.etcd, settings.times.join_timeout), None
    server = EtcdServer(login=True)
    server.start()
    try:
        return settings, connect(server.config(settings.times.request_timeout)), server
    except api.RendezvousConnectionError:
        server.stop()
        raise


def _with_id(settings: RendezvousSettings) -> RendezvousSettings:
    """The settings of a run of its own. Raises ConfigError if other nodes would have to know its id."""
    if settings.run_id != NO_ID:
        return settings
    if settings.max_nodes > 1:
        allowed = (
            "give all nodes of a job the same --rdzv-id, and each job another: all jobs without one would be one run"
        )
        raise ConfigError("run_id", NO_ID, allowed)
    run_id = str(uuid.uuid4())
    log.info("no --rdzv-id was given: the id of this run is %s", run_id)
    return replace(settings, run_id=run_id)


def connect(config: EtcdConfig, join_timeout: float = 0.0) -> SharedClient:
    """Make a client whose etcd has answered. Raises RendezvousConnectionError.

    An etcd that is not there yet is awaited for `join_timeout` seconds; 0: for one request.

    It shares the process's connection, because each connection with a watch costs three threads and a stream in etcd.
    """
    client = SharedClient(config)
    try:
        client.await_answer(join_timeout or config.request_timeout, "join_timeout")
    except EtcdError as error:
        client.close()
        raise api.RendezvousConnectionError(unusable(config, error)) from None
    return client


# -- for people -----------------------------------------------------------------------------------------------------


def round_line(run_id: str, round_: RoundHead, rank: int) -> str:
    """A participant's log line for a round that is ready. In a large round it does not know the other participants."""
    hosts = [seat.host for _, seat in sorted(round_.known.items())]
    where = f"on {named(hosts)}" if len(hosts) == round_.size else f"with {round_.address}"
    before = f"; the round before ended: {round_.before}" if round_.before else ""
    who = f"decided by {decider_of(round_)}"
    return f"run {run_id!r}, round {round_.number}: this node is rank {rank} of {round_.size}, {where}, {who}{before}"


def decider_of(round_: RoundHead) -> str:
    """The host of the member that decided a round; that member's id if it has no seat, or the round is large."""
    hosts = {seat.member: seat.host for seat in round_.known.values()}
    return hosts.get(round_.by, f"member {round_.by}")
