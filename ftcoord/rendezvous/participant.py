"""A node that asks for rounds: through lost answers and lost leases, until it has a seat in one that is ready."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import tenacity
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from ftcoord.core import rendezvous_records
from ftcoord.core.outlook import Standing
from ftcoord.core.rendezvous import SEATING, RoundOptions, may_reopen, outlook, spelled
from ftcoord.core.rendezvous_records import JoinRequest, Round
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown
from ftcoord.etcd.api import Etcd
from ftcoord.primitives.group.membership import Membership
from ftcoord.rendezvous.logs import SHOWN, attendance, named
from ftcoord.rendezvous.policy import RendezvousPolicy
from ftcoord.rendezvous.run_record import RunRecord
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

HEED: Final = 1.0
"""Seconds until a signal is heeded that came in the moment before a wait: Python looks for those when a wait ends."""
CHECK: Final = 10.0
"""Seconds between two looks of a node that waits at whether its key is still there."""
SAY_AGAIN: Final = 1.0
"""Seconds until a node that waits for others says again that it takes its seat; see `core.rendezvous.FRESH`."""
FAREWELL: Final = 0.5
"""Seconds that a node which leaves waits for that word to be read."""
SAY_FIRST: Final = 5.0
"""Seconds until a node that waits says so for the first time."""
SAY: Final = 30.0
"""Seconds between two lines of a node that waits about who is there."""
LOOK: Final = 2.0
"""Seconds that a look at the other nodes may take, and a word of parting. Nothing depends on either."""
LOOK_AGAIN: Final = 1.0
"""Seconds between two such looks of a node that has other limits than the run."""
OUTLIVED: Final = 1.5
"""How many times the TTL of a lease must pass until whoever is still there does live."""
SHARERS: Final = 100
"""Members, the oldest, among which a node with other limits than the run's looks for one that shares those."""
_UNANSWERED: Final = (EtcdUnavailable, OutcomeUnknown)
SHUT_DOWN: Final = "this handler was shut down; make a new one"
TRANSIENT: Final = (*_UNANSWERED, LeaseLost)
_FINAL: Final = (
    RendezvousTimeoutError,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousConnectionError,
)

T = TypeVar("T")


@dataclass
class _Request:
    """What the node asks, and what it knows of that.

    Args:
        tolerated: a record with other limits, which nobody else alive shares, as far as is known.
    """

    member: Membership[Round]
    ask: JoinRequest
    tolerated: Round | None = None


class Participant:
    """One node in a run, through all of its incarnations. For one thread, but for `member` and `stop()`.

    Args:
        etcd: the door to etcd.
        settings: the run and its time-outs.
        address: where the other nodes reach this host.
        host: its name, for people.
        changed: notified whenever there may be news; `member` says which.
    """

    def __init__(
        self, etcd: Etcd, settings: RendezvousSettings, address: str, host: str, changed: threading.Condition
    ) -> None:
        self.settings, self.host = settings, host
        self.node = uuid.uuid4().hex
        self.member: Membership[Round] | None = None
        """The incarnation that lives now."""
        self.round: Round | None = None
        """The last round that it took part in."""
        self._etcd, self._address, self._changed = etcd, address, changed
        self._run = RunRecord(etcd, settings)
        self._after = 0
        self._reopens = -1
        self._numbers_known = self._has_waited = self._stopped = False
        self._deadline = self._check_at = self._say_at = 0.0
        self._refused_since: float | None = None
        self._refusal = ""

    def prepare(self) -> Membership[Round]:
        """Take a lease, and begin the watch that the next ask needs. Raises EtcdError."""
        settings = self.settings
        options = RoundOptions(
            settings.last_call_timeout, settings.settle_timeout, settings.on_member_loss == "restart", settings.restart
        )
        self.member = Membership(
            self._etcd,
            settings.prefix,
            RendezvousPolicy(settings.prefix, options),
            rendezvous_records.parse_round,
            self._changed,
            ttl=settings.lease_ttl,
            record_ttl=settings.run_ttl,
            timeout=settings.request_timeout,
        )
        return self.member

    def begin(self) -> None:
        """From now on the join time-out runs."""
        now = time.monotonic()
        self._has_waited, self._refused_since, self._refusal = False, None, ""
        self._deadline, self._check_at, self._say_at = now + self.settings.join_timeout, now + CHECK, now + SAY_FIRST

    def ask(self, port: int) -> Round | None:
        """The next round with a seat for this node, when all of it have taken theirs; None to be called again.

        Args:
            port: one that is held open, for the case that this node gets rank 0. Another one for each call.

        Raises torch's rendezvous errors, and SystemExit for a spare that is not needed any more. After that nobody
        counts on the node, but where somebody has to repair the run's record first (RendezvousStateError).
        """
        try:
            return self._see_through(port)
        except (*_FINAL, SystemExit) as error:
            self.leave(type(error).__name__)
            raise

    def stop(self) -> None:
        """Have the thread that waits end with RendezvousClosedError. From any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def leave(self, why: str) -> None:
        """Stop asking, so that nobody counts on this node, and say why. Never raises for an etcd that is away."""
        member, self.member = self.member, None
        if member is None:
            return
        if member.entered and not member.lost:
            with contextlib.suppress(EtcdError):  # then the others see only that its lease ends
                member.enter(rendezvous_records.encode(replace(self._new_ask(0), leaving=why)), LOOK)
                self._await_farewell(member)
        member.leave(min(self.settings.close_timeout, self.settings.request_timeout))

    def _see_through(self, port: int) -> Round | None:
        request = self._insist(lambda: self._enter(port), TRANSIENT)
        while True:
            look, now = self._await(request)
            if request.member.lost:
                return self._ready_after_all(request)
            if now is None or look in (Standing.PENDING, Standing.SPARE):
                self._while_waiting(request, look, now)
            elif look is Standing.ANSWERED:
                return self._started(now)
            elif look is Standing.SEATED:
                self._take_seat(request, now)
            elif look is Standing.REFUSED:
                self._judge_limits(request, now)
            else:
                self._after = max(self._after, now.number)
                if look is Standing.CLOSED:
                    self._go_on_or_end(request, now)
                return None

    def _await_farewell(self, member: Membership[Round]) -> None:
        """Until somebody has read the word of parting: if this member is the decider, its own thread is to."""

        def heard() -> bool:
            now = member.record
            counts = now is not None and not (now.recalled or now.closed) and now.rank_of(member.id) is not None
            return not counts or member.lost

        if self.settings.on_member_loss == "restart":  # else nobody does anything about it
            with self._changed:
                self._changed.wait_for(heard, FAREWELL)

    # -- writing ------------------------------------------------------------------------------------------------

    def _enter(self, port: int) -> _Request:
        """Ask for a round, as a new incarnation if the last one lost its lease."""
        if self._stopped:
            raise RendezvousClosedError(SHUT_DOWN)
        member = self.prepare() if self.member is None or self.member.lost else self.member
        if not self._numbers_known:
            # Behind all rounds that have left something, though the record that would tell of them may be gone.
            self._after = max(self._after, self._run.highest_round(self.settings.request_timeout))
            self._numbers_known = True
        ask = self._new_ask(port)
        member.enter(rendezvous_records.encode(ask))
        return _Request(member, ask)

    def _new_ask(self, port: int) -> JoinRequest:
        settings = self.settings
        return JoinRequest(
            self.node,
            self._address,
            port,
            self._after,
            self.host,
            uuid.uuid4().hex,
            settings.min_nodes,
            settings.max_nodes,
            reopens=self._reopens,
        )

    def _take_seat(self, request: _Request, now: Round) -> None:
        """Say that this node takes its seat. Without effect when it has lost its lease, and the seat with it."""
        ask = replace(request.ask, seated=now.number, nonce=uuid.uuid4().hex)
        moment = time.monotonic()
        self._check_at = min(self._check_at, moment + SAY_AGAIN)
        # The decider ends this by itself when a seat is not taken; nobody's time is over while others count on it.
        self._deadline = max(self._deadline, moment + max(self.settings.last_call_timeout, SEATING) + LOOK)

        def enter() -> None:
            if request.member.lost or self._stopped:  # it listens no more, so it must not say that it does
                raise LeaseLost(f"the lease of member {request.member.id} is lost")
            request.member.enter(rendezvous_records.encode(ask))

        with contextlib.suppress(LeaseLost):
            self._insist(enter, _UNANSWERED)
            request.ask = ask

    def _insist(self, attempt: Callable[[], T], transient: tuple[type[Exception], ...]) -> T:
        """Repeat what etcd does not answer, until the deadline. Raises RendezvousConnectionError, and LeaseLost if that
        is not among the `transient`."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(transient) & tenacity.retry_if_not_exception_type(ClientClosed),
            stop=tenacity.stop_after_delay(max(self._deadline - time.monotonic(), 0)),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except EtcdError as error:
            if isinstance(error, LeaseLost) and LeaseLost not in transient:
                raise
            raise RendezvousConnectionError(f"could not join run {self.settings.run_id!r}: {error}") from None

    # -- waiting ------------------------------------------------------------------------------------------------

    def _await(self, request: _Request) -> tuple[Standing, Round | None]:
        """What becomes of the request; PENDING or SPARE if something is to be done meanwhile, or the lease is lost."""
        with self._changed:
            while True:
                if self._stopped:
                    raise RendezvousClosedError(SHUT_DOWN)
                if request.member.problem is not None:
                    raise RendezvousStateError(str(request.member.problem))
                now = request.member.record
                if request.member.lost:
                    return Standing.PENDING, now
                look = outlook(now, request.member.id, request.ask).standing
                if look is Standing.REFUSED and now is request.tolerated:
                    look = Standing.PENDING
                if look is Standing.SPARE:  # others run without us: we may wait for ever
                    self._deadline = time.monotonic() + self.settings.join_timeout
                left = min(self._deadline, self._check_at, self._say_at) - time.monotonic()
                if look not in (Standing.PENDING, Standing.SPARE) or left <= 0:
                    return look, now
                self._has_waited = True
                self._changed.wait(min(left, HEED))

    def _while_waiting(self, request: _Request, look: Standing, record: Round | None) -> None:
        """What a node does from time to time while it waits. Raises RendezvousTimeoutError after the join time-out."""
        now, settings = time.monotonic(), self.settings
        if now >= self._deadline:
            raise RendezvousTimeoutError(
                f"no round of run {settings.run_id!r} with a seat for {self.host} came about within"
                f" {settings.join_timeout:g} s (join_timeout): {self._attendance()}; start the missing nodes with the"
                f" same --rdzv-id and --rdzv-endpoint"
            )
        if now >= self._check_at:
            self._check_at = now + CHECK
            request.tolerated = None
            if record is not None and record.number == request.ask.seated:
                self._take_seat(request, record)  # for what was said a while ago does not count
            else:
                request.member.check()
        if now >= self._say_at:
            self._say_at = now + SAY
            if look is Standing.PENDING:
                log.info("run %r: waiting for a round: %s", settings.run_id, self._attendance())

    def _attendance(self) -> str:
        try:
            asks, count = self._run.members(SHOWN, LOOK)
        except EtcdError as error:
            return f"cannot tell who is there: {error}"
        before = self.member.record if self.member else None
        if before is not None and before.closed:
            old = [ask.host for ask in asks if any(seat.node == ask.node for seat in before.seats)]
            if old:
                return f"{named(old)} of the run that had ended has still to end"
        return attendance([ask.host for ask in asks], count, self.settings.min_nodes)

    def _started(self, round_: Round) -> Round:
        self.round, self._after = round_, round_.number
        return round_

    def _ready_after_all(self, request: _Request) -> Round | None:
        """Of a node that lost its lease: its round, if that has become ready. The others have started it by then, and
        hear nothing before this node has, too. It is called back at once afterwards."""
        known = request.member.record
        if known is not None:
            self._after = max(self._after, known.number)  # etcd may forget what was heard
        if known is None or outlook(known, request.member.id, request.ask).standing is not Standing.ANSWERED:
            return None
        try:
            now = self._run.read()
        except RendezvousConnectionError as error:
            log.debug("whether a round still stands cannot be told: %s", error)
            return None
        stands = now is not None and (now.number, now.seats) == (known.number, known.seats) and not now.closed
        return self._started(known) if stands else None

    def _judge_limits(self, request: _Request, now: Round) -> None:
        """Raises RendezvousStateError when other members share the run's limits, which are not this node's.

        Not before a lease is over: they may be of an earlier start that was killed, and only seem to live.
        """
        moment, settings = time.monotonic(), self.settings
        request.tolerated, self._check_at = now, min(self._check_at, moment + LOOK_AGAIN)
        try:
            asks, _ = self._run.members(SHARERS, LOOK)
        except EtcdError as error:
            log.debug("who shares the run's limits cannot be told: %s", error)
            return
        other = next((ask for ask in asks if ask.limits == now.limits and not ask.leaving), None)
        if other is None:
            self._refused_since, self._refusal = None, ""
            return
        text = (
            f"run {settings.run_id!r} has --nnodes={spelled(now.limits)}, as {other.host} wants, and this node has"
            f" --nnodes={spelled(request.ask.limits)}: give all nodes the same, or this one another --rdzv-id"
        )
        if self._refused_since is None:
            self._refused_since = moment
            log.warning("%s; waiting until it is certain that the other one lives", text)
        self._refusal = text
        if moment > self._refused_since + settings.lease_ttl * OUTLIVED:
            self.leave("other limits")
            raise RendezvousStateError(text)

    def _go_on_or_end(self, request: _Request, now: Round) -> None:
        """Of a run that is over: go on from it, or raise what ends this node."""
        settings = self.settings
        if not self._has_waited and self.round is None and may_reopen(now, settings.restart):
            log.info("run %r is started again; it had ended: %s", settings.run_id, now.closed)
            self._reopens = now.number
            return
        if self._refusal:  # it was never of this run, so it is no spare of it either
            self.leave("other limits")
            raise RendezvousStateError(self._refusal)
        text = f"run {settings.run_id!r} is over: {now.closed}"
        is_spare = self._has_waited and self.round is None and now.seats and now.rank_of(request.member.id) is None
        if not is_spare:
            again = "it may be started again once all of its nodes have ended, or start"
            advice = again if may_reopen(now, settings.restart) else "start"
            raise RendezvousClosedError(f"{text}; {advice} a new run under another --rdzv-id")
        if settings.on_spare_close == "raise":
            raise RendezvousGracefulExitError(text)
        log.info("%s; this node was a spare and is not needed any more", text)
        raise SystemExit(0)
