"""torchrun's `etcd-v3` rendezvous: rounds decided through etcd, with a fresh store and bootstrap address each.

The contract is torch's `RendezvousHandler`
(https://docs.pytorch.org/docs/stable/elastic/rendezvous.html); `docs/protocol.md` says what lies behind it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final, NoReturn

import tenacity
from torch.distributed import TCPStore
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ftcoord.core import records
from ftcoord.core.records import Ask, Round
from ftcoord.core.rendezvous import Options
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.membership import Membership
from ftcoord.etcd.server import EtcdServer
from ftcoord.rendezvous.bootstrap import Reservation, own_address
from ftcoord.rendezvous.decided import Decided
from ftcoord.rendezvous.policy import RendezvousPolicy
from ftcoord.rendezvous.settings import RendezvousSettings
from ftcoord.rendezvous.signals import raised_as_exceptions
from ftcoord.rendezvous.timers import serve_timers
from ftcoord.store import EtcdStore

log = logging.getLogger(__name__)

HEED: Final = 1.0
"""Seconds until a signal is heeded that came in the moment before a wait: Python looks for those when a wait ends."""
CHECK: Final = 10.0
"""Seconds between two looks of a node that waits at whether its key is still there."""
_TRANSIENT = (EtcdUnavailable, OutcomeUnknown, LeaseLost)


class EtcdRendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous of a run.

    Promised: all who leave `next_rendezvous` with the same round have the same world and bootstrap address, and each
    a rank of its own; rounds only grow; a node that died is noticed when its lease ends (`lease_ttl` seconds), whatever
    the workers do; an etcd outage disturbs no running worker.

    Not promised: that a node which etcd cannot hear has stopped. Its writes to the store of an old round are refused.

    Args:
        settings: the run and its time-outs.
        etcd: used, and closed at the end.
        server: an embedded etcd to end with this handler.
    """

    def __init__(self, settings: RendezvousSettings, etcd: EtcdClient, server: EtcdServer | None = None) -> None:
        self._settings, self._etcd, self._ends = settings, etcd, contextlib.ExitStack()
        if server is not None:
            self._ends.callback(server.stop)
        self._ends.callback(etcd.close)
        self._decided = Decided(etcd, settings)
        self._address = own_address(settings.local_addr, etcd.config)
        self.host = f"{socket.gethostname()} (pid {os.getpid()})"
        self._node = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._member: Membership[Round] | None = None
        self._round: Round | None = None
        self._deadline = 0.0
        self._was_spare = False
        self._store: EtcdStore | None = None
        self._tcp_store: TCPStore | None = None
        self._left = False
        self._told = True
        self._called_back = 0
        self._pid = os.getpid()
        atexit.register(self._leave)

    # -- torch's interface --------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """The name it was asked for by."""
        return self._settings.backend

    def get_run_id(self) -> str:
        """The run id, as the user gave it."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's agent serves the workers' store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 turns it off)."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round; returns when it is decided.

        A surplus node waits here without limit as long as others run, and leaves with SystemExit(0) when the run closes
        (`on_spare_close=raise`: RendezvousGracefulExitError).

        Raises:
            RendezvousTimeoutError: no round came about within `join_timeout` seconds.
            RendezvousClosedError: the run is over.
            RendezvousConnectionError: etcd was out of reach for all that time, or refused.
            RendezvousStateError: the run's record in etcd is not one that this ftcoord can read.
        """
        with self._recorded("next_rendezvous"), raised_as_exceptions():
            round_, rank = self._join()
        self._record(
            "next_rendezvous", f"{self.host} is rank {rank} of {len(round_.seats)} in round {round_.number}", rank
        )
        assert self._store is not None
        bootstrap = RendezvousStoreInfo(round_.address, round_.port)
        return RendezvousInfo(self._store, rank, len(round_.seats), bootstrap)

    def num_nodes_waiting(self) -> int:
        """More than 0 when the agent should come back to `next_rendezvous`. From memory: never blocks, never raises."""
        member, mine = self._member, self._round
        if member is None or mine is None:
            return 0
        count, reason = _call_back(member, mine)
        if count and self._called_back != mine.number:
            self._called_back = mine.number
            log.warning("run %r, round %d: restarting the workers: %s", self._settings.run_id, mine.number, reason)
        return count

    def is_closed(self) -> bool:
        """Whether the run is over; from memory once this node knows of a round, as long as it has its lease."""
        with self._recorded("is_closed"):
            member = self._member
            known = (member.record if member and not member.lost else None) or self._decided.read()
        return known is not None and bool(known.closed)

    def set_closed(self) -> None:
        """End the run for all nodes. Raises RendezvousConnectionError after `close_timeout` seconds."""
        with self._recorded("set_closed"):
            self._decided.close(f"closed by {self.host}")

    def shutdown(self) -> bool:
        """Leave, and close the run if this node's workers are done or have used up their restarts.

        An agent that ends for any other reason leaves the run to the others. Idempotent. Whether closing reached etcd.
        """
        if self._left:
            return self._told
        error = sys.exc_info()[1]
        try:
            if error is None or isinstance(error, ChildFailedError):
                self._decided.close(f"{self.host} {'finished' if error is None else 'failed'}")
        except RendezvousError as problem:
            log.warning("the run could not be closed: %s", problem)
            self._told = False
        self._leave()
        return self._told

    # -- joining ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take the lease and begin the watch that the first round needs; if etcd is away for now, that does so itself.

        Serves timers from now on, if that is asked for. Raises RendezvousConnectionError when etcd refuses.
        """
        if self._settings.timers:
            self._ends.callback(serve_timers(self._settings.prefix, self._etcd))
        try:
            self._new_member()
        except _TRANSIENT as error:
            log.debug("nothing could be prepared: %s", error)
        except EtcdError as error:
            self._leave()
            raise RendezvousConnectionError(f"could not prepare for run {self._settings.run_id!r}: {error}") from error

    def _join(self) -> tuple[Round, int]:
        self._refuse_when_left()
        self._end_round()
        after = self._round.number if self._round else 0
        self._was_spare = False
        self._extend()
        while True:
            reservation = Reservation(self._address)
            try:
                member = self._enter(reservation.port, after)
                round_ = self._await_round(member, after)
                if round_ is not None and not round_.recalled and round_.rank_of(member.id) is not None:
                    return round_, self._begin_round(member, round_, reservation)
                after = round_.number if round_ else after
            except (RendezvousTimeoutError, RendezvousClosedError, RendezvousGracefulExitError, SystemExit):
                self._abandon()
                raise
            finally:
                reservation.release()

    def _extend(self) -> None:
        self._deadline = time.monotonic() + self._settings.join_timeout

    def _enter(self, port: int, after: int) -> Membership[Round]:
        """Ask for a round, as a new incarnation if the last one lost its lease."""
        ask = Ask(self._node, self._address, port, after, self.host, uuid.uuid4().hex)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TRANSIENT) & tenacity.retry_if_not_exception_type(ClientClosed),
            stop=tenacity.stop_after_delay(max(self._deadline - time.monotonic(), 0)),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        try:
            return retrying(self._try_to_enter, ask)
        except EtcdError as error:
            self._abandon()
            raise RendezvousConnectionError(f"could not join run {self._settings.run_id!r}: {error}") from error

    def _try_to_enter(self, ask: Ask) -> Membership[Round]:
        member = self._new_member() if self._member is None or self._member.lost else self._member
        member.enter(records.encode(ask))
        return member

    def _new_member(self) -> Membership[Round]:
        settings = self._settings
        options = Options(
            settings.min_nodes,
            settings.max_nodes,
            settings.last_call_timeout,
            settings.settle_timeout,
            settings.on_member_loss == "restart",
        )
        self._member = Membership(
            self._etcd,
            settings.prefix,
            RendezvousPolicy(settings.prefix, options),
            records.parse_round,
            self._changed,
            ttl=settings.lease_ttl,
            record_ttl=settings.run_ttl,
            timeout=settings.request_timeout,
        )
        return self._member

    def _await_round(self, member: Membership[Round], after: int) -> Round | None:
        """The next round that has a seat for us, or had one in a round before it that was not seen here; None when the
        lease was lost meanwhile."""
        with self._changed:
            first_look = True
            check_at = time.monotonic() + CHECK
            while not member.lost:
                self._refuse_when_left()
                found = self._judge(member, after, late=first_look and not self._was_spare)
                if found is not None:
                    return found
                first_look = False
                if self._is_spare(member):
                    self._was_spare = True
                    self._extend()
                elif time.monotonic() >= self._deadline:
                    self._give_up()
                if time.monotonic() >= check_at:
                    check_at += CHECK
                    member.check()
                self._changed.wait(min(max(self._deadline - time.monotonic(), 0), HEED))
        return None

    def _refuse_when_left(self) -> None:
        if self._left:
            raise RendezvousClosedError("this handler was shut down; make a new one")

    def _judge(self, member: Membership[Round], after: int, late: bool) -> Round | None:
        if member.problem is not None:
            raise RendezvousStateError(str(member.problem))
        now = member.record
        if now is None:
            return None
        if now.closed:
            self._raise_closed(now, spare=not late and bool(now.seats) and now.rank_of(member.id) is None)
        return now if now.last_seat_of(member.id) > after else None

    def _is_spare(self, member: Membership[Round]) -> bool:
        """Others run without us: we may wait for ever."""
        now = member.record
        return now is not None and bool(now.seats) and not now.recalled and now.rank_of(member.id) is None

    def _give_up(self) -> NoReturn:
        raise RendezvousTimeoutError(
            f"no round of run {self._settings.run_id!r} with a seat for {self.host} came about within "
            f"{self._settings.join_timeout:g} s (join_timeout); are at least {self._settings.min_nodes} nodes started, "
            f"with the same --rdzv-id and --rdzv-endpoint?"
        )

    def _raise_closed(self, now: Round, spare: bool) -> NoReturn:
        text = f"run {self._settings.run_id!r} is over: {now.closed}"
        if not spare:
            raise RendezvousClosedError(f"{text}; start a new run under another --rdzv-id")
        if self._settings.on_spare_close == "raise":
            raise RendezvousGracefulExitError(text)
        log.info("%s; this node was a spare and is not needed any more", text)
        raise SystemExit(0)

    def _abandon(self) -> None:
        """Stop asking, so that nobody counts on this node."""
        member, self._member = self._member, None
        if member is not None:
            member.leave(min(self._settings.close_timeout, self._settings.request_timeout))

    # -- rounds -------------------------------------------------------------------------------------------------

    def _begin_round(self, member: Membership[Round], round_: Round, reservation: Reservation) -> int:
        rank = round_.rank_of(member.id)
        assert rank is not None
        if rank == 0 and self.use_agent_store:
            self._tcp_store = reservation.serve()
        prefix = self._settings.prefix
        self._store = EtcdStore(
            self._etcd,
            records.store_prefix(prefix, round_.number),
            lease=member.record_lease,
            fence=records.round_key(prefix, round_.number),
        )
        self._round = round_
        return rank

    def _end_round(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = self._tcp_store = None

    # -- the end ------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Give everything up: at the end, and when the process ends on a signal, which skips `shutdown()`."""
        if self._left or os.getpid() != self._pid:
            return
        with self._changed:
            self._left = True
            self._changed.notify_all()
        atexit.unregister(self._leave)
        self._abandon()
        self._end_round()
        self._ends.close()

    # -- events -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _recorded(self, action: str) -> Iterator[None]:
        try:
            yield
        except RendezvousError as error:
            self._record(action, f"{type(error).__name__}: {error}", state=NodeState.FAILED)
            raise

    def _record(self, action: str, message: str, rank: int | None = None, state: NodeState = NodeState.RUNNING) -> None:
        log.info("%s", message)
        construct_and_record_rdzv_event(
            run_id=self._settings.run_id,
            message=message,
            node_state=state,
            name=f"{type(self).__name__}.{action}",
            hostname=self._address,
            pid=self._pid,
            rank=rank,
        )


def _call_back(member: Membership[Round], mine: Round) -> tuple[int, str]:
    """How many nodes wait for a participant of `mine` to come back for another round, and why; 0 if none."""
    now = member.record
    if now is not None and now.closed:
        return 0, ""
    if member.lost:
        return 1, "this node's lease expired"
    if now is None:
        return 0, ""
    if now.number != mine.number:
        return 1, f"round {now.number} was formed without this node"
    return (max(1, now.waiting), now.recalled) if now.recalled else (0, "")
