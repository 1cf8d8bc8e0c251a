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
from collections.abc import Iterator

from torch.distributed import TCPStore
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ftcoord import concurrency
from ftcoord.core import rendezvous_records
from ftcoord.core.event_records import WorkerFailure
from ftcoord.core.layout import round_key, round_store_prefix
from ftcoord.core.rendezvous_records import AnyRound
from ftcoord.core.timers import TimerInfo
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdError, ThreadNotStarted
from ftcoord.etcd.retry import UNANSWERED
from ftcoord.etcd.shared import SharedClient
from ftcoord.logs import log_change
from ftcoord.metrics import process as metrics
from ftcoord.metrics.exporter import MetricsAddress, serve_process
from ftcoord.primitives.orphans import MarkedChildren
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.rendezvous.bootstrap import Reservation, address_trouble, own_address
from ftcoord.rendezvous.logs import round_line
from ftcoord.rendezvous.node import SHUT_DOWN, Node
from ftcoord.rendezvous.run_record import RunRecord
from ftcoord.rendezvous.settings import RendezvousSettings
from ftcoord.rendezvous.signals import raised_as_exceptions, reason_of, why_process_ends
from ftcoord.rendezvous.worker_failures import failure_in
from ftcoord.rendezvous.workers import WorkerWatch
from ftcoord.store import EtcdStore
from ftcoord.timer.etcd_timer import serve_timers

log = logging.getLogger(__name__)


class HandlerResources:
    """The resources of a handler. Does not refer to the handler, whose finalizer releases them."""

    def __init__(self, node: Node, ends: contextlib.ExitStack) -> None:
        self.node, self.ends = node, ends  # never change
        self.store: EtcdStore | None = None
        self.tcp_store: TCPStore | None = None
        self.watch: WorkerWatch | None = None
        self.timers: dict[int, str] = {}  # any thread
        """The scopes of the expiration timers for which workers were killed, by pid."""
        self.stopped_at: float | None = None
        """When the agent was asked to stop the workers of this round, on this host's wall clock."""
        self.left = False  # any thread; becomes True once

    def watch_workers(self, round_: AnyRound, children: MarkedChildren | None, *, starting: bool = False) -> None:
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
        self.timers.clear()
        self.stopped_at = None
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
        "the workers of this round are not watched any longer (%r): if one fails, the other nodes hear of it only when "
        "this node's agent has stopped the others",
        error,
    )


class EtcdRendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous of a run.

    torch's registry makes it for `--rdzv-backend=etcd-v3`; in a program, call
    `ftcoord.rendezvous.create.create_handler`. Do not call the constructor: its arguments are not public.

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
        self._run = RunRecord(etcd, settings)
        self._address = own_address(settings.local_addr, etcd.config, alone=settings.max_nodes == 1)
        self.host = f"{socket.gethostname()} (pid {os.getpid()})"
        self._resources = HandlerResources(Node(etcd, settings, self._address, self.host), ends)
        self._children: MarkedChildren | None = None
        self._watched: AnyRound | None = None
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

    def next_rendezvous(self) -> RendezvousInfo:
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
        bootstrap = RendezvousStoreInfo(round_.address, round_.port)
        return RendezvousInfo(self._resources.store, rank, round_.size, bootstrap)

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
            known = (member.record if member and not member.lost else None) or self._run.read()
        return known is not None and bool(known.closed)

    def set_closed(self) -> None:
        """End the run for all nodes.

        Raises RendezvousConnectionError when etcd refuses, or has not taken it after `close_timeout` seconds, and
        RendezvousStateError when the run's record cannot be read.
        """
        with self._recorded("set_closed"):
            self._run.close(f"closed by {self.host}", rendezvous_records.CLOSED, by=self.host)

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
                outcome = rendezvous_records.FINISHED if error is None else rendezvous_records.FAILED
                speaker = self._node.speaker if self._node.round else None
                self._run.close(f"{self.host} {outcome}", outcome, speaker, self._why_failed(error), self.host)
        except RendezvousError as problem:
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
            try:
                self._node.participant.prepare()
            except UNANSWERED as error:
                log.debug("nothing could be prepared: %s", error)
            except EtcdError as error:
                run = self._settings.run_id
                raise RendezvousConnectionError(f"could not prepare for run {run!r}: {error}") from None
            undo.pop_all()

    def _join(self) -> tuple[AnyRound, int]:
        if self._resources.left:
            raise RendezvousClosedError(SHUT_DOWN)
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

    def _begin_round(self, round_: AnyRound, reservation: Reservation) -> int:
        member = self._node.participant.member
        if member is None:  # another thread has shut this handler down just now
            raise RendezvousClosedError(SHUT_DOWN)
        rank = self._node.rank
        if rank == 0 and self.use_agent_store:
            self._resources.tcp_store = reservation.serve()
        prefix = self._settings.prefix
        self._resources.store = EtcdStore(
            self._etcd,
            round_store_prefix(prefix, round_.number),
            lease=member.record_lease or None,  # 0 if the record was deleted just now
            fence=(round_key(prefix, round_.number), round_.roll.encode()),
        )
        return rank

    def _expect_workers(self, round_: AnyRound) -> None:
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

    def _log(self, text: str, round_: AnyRound, reason: str, rank: int | None = None) -> None:
        """Log a change of this node's state; `round_` is the last round that it took part in."""
        member, run = self._node.participant.member, self._settings.run_id
        id_, revision = (member.id, member.record_revision or None) if member else (None, None)
        at = {"run": run, "round": round_.number, "host": self.host, "member": id_, "revision": revision}
        log_change(log, text, rank=rank, reason=reason, **at)

    @contextlib.contextmanager
    def _recorded(self, action: str) -> Iterator[None]:
        try:
            yield
        except RendezvousError as error:
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
