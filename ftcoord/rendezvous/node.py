"""One node of a run: it asks for rounds until it has a seat in one that is ready, and holds that seat while its workers
run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NoReturn

from torch.distributed.elastic.rendezvous import api

from ftcoord import concurrency
from ftcoord.core.death_records import Death
from ftcoord.core.rendezvous import call_back, may_reopen
from ftcoord.core.rendezvous_records import STOPPED, JoinRequest, RoundHead, WorkerFailure
from ftcoord.core.verdict import Standing
from ftcoord.errors import ClientClosed, EtcdError, StateError, ThreadFailed, ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.retry import TimeLimit
from ftcoord.logs import log_change
from ftcoord.metrics import process as metrics
from ftcoord.primitives.group.participant import TAKE_BACK_TIMEOUT, Left, Participant, ParticipantOptions
from ftcoord.primitives.group.use import Look
from ftcoord.primitives.write_once import write_attempt_timeout
from ftcoord.rendezvous.pace import LOOK_TIMEOUT, RoundPace
from ftcoord.rendezvous.policy import RoundUse
from ftcoord.rendezvous.run_record import RunRecord, Speaker
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

SAY_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed write about the seat is tried again."""
SHUT_DOWN: Final = "this handler was shut down; make a new one"


class Node:
    """One node in a run, through all of its leases. Not thread-safe, but for `waiting()` and `stop()`.

    Args:
        etcd: the etcd client.
        settings: the run and its timeouts.
        address: where the other nodes reach this host.
        host: the host's name, for people.
    """

    def __init__(self, etcd: Etcd, settings: RendezvousSettings, address: str, host: str) -> None:
        options = replace(settings.rounds, return_to_seat=settings.times.lease_ttl)
        self._settings, self._address, self.host = settings, address, host
        self.id = uuid.uuid4().hex
        """The same through all of its leases, so that it keeps its rank."""
        self.round: RoundHead | None = None  # read by any thread
        """The last round that it took part in,"""
        self._seat = ""
        """and the member as which it took its seat there."""
        self.participant: Participant[RoundHead, JoinRequest] = Participant(
            etcd,
            RoundUse(settings.prefix, options, etcd),
            # A round that is ready counts, though the lease was lost: see `_ready_after_all`.
            ParticipantOptions(
                settings.times.lease_ttl, settings.times.run_ttl, settings.times.request_timeout, renews=False
            ),
            lost=self.waiting,  # which returns to the seat: an agent may look for itself only twice a minute
        )
        self.is_drained = False  # becomes True once, on the thread that asks
        """Whether it has left because an operator drained it."""
        self.failure: WorkerFailure | None = None  # written by any thread
        """How its worker failed in the last round that it took part in; None if none did."""
        self._holder = SeatHolder(self.participant, settings.times.request_timeout)
        self.run = RunRecord(etcd, settings)
        self._highest = 0  # read by any thread
        """The highest round that it knows of: it asks for a later one."""
        self._reopens = -1
        """The round that ended the run which it restarts; -1 for none."""
        self._leave_timeout = write_attempt_timeout(etcd) + TAKE_BACK_TIMEOUT
        """Seconds to leave after a call that failed, whose caller may have waited for all of its time."""
        self.begin()

    def begin(self) -> None:
        """The join timeout runs from now on."""
        self.pace = RoundPace(self.participant, self._settings, self.run, self.host)

    @property
    def speaker(self) -> Speaker:
        """The node that ends the run, if its workers do."""
        return self.id, self.participant.ids

    @property
    def rank(self) -> int:
        """Its rank in the last round that it took part in, even after it lost the lease under which it took its
        seat."""
        rank = self.round.rank_of(self._seat) if self.round is not None else None
        assert rank is not None
        return rank

    def ask(self, port: int) -> RoundHead | None:
        """The next round with a seat for this node, when all have taken their seats; None to be called again.

        Args:
            port: a port that is held open, in case this node gets rank 0. Use another one for each call.

        Raises torch's rendezvous errors, and SystemExit for a spare that is no longer needed. After that nobody counts
        on the node, unless somebody has to repair the run's record first (RendezvousStateError).
        """
        self._holder.end()
        try:
            with self.torch_errors():
                return self._ask(port, self.pace)
        except (api.RendezvousError, SystemExit) as error:
            if not isinstance(error, api.RendezvousStateError) or self.pace.limits.refusal:
                why = "drained" if self.is_drained else type(error).__name__
                self.leave("other limits" if isinstance(error, api.RendezvousStateError) else why, self._leave_timeout)
            raise

    def stop(self) -> None:
        """Make the waiting thread end with RendezvousClosedError. For any thread."""
        self.participant.stop()

    def leave(self, why: str, timeout: float = math.inf) -> None:
        """Stop asking, so that nobody counts on this node, and write why.

        Does not raise if etcd is unreachable, and then takes at most `timeout` seconds, or one request's.
        """
        self._holder.end()
        within = TimeLimit.of(min(timeout, self._settings.times.close_timeout, self._settings.times.request_timeout))
        # The rest is for the lease: while that lives the others wait, whatever they are told.
        words = TimeLimit(LOOK_TIMEOUT, within.deadline - TAKE_BACK_TIMEOUT)
        member = self.participant.member
        mine, now = self.round, member.record if member is not None else None
        is_last = mine is not None and now is not None and now.name == mine.name
        # The others' workers may still save what they have: a recall would stop them.
        if now is not None and not now.closed and (reason := self.stop_reason):
            with contextlib.suppress(EtcdError, StateError):
                why = f"{self.host} {STOPPED}: {reason}"
                self.run.close(why, STOPPED, self.speaker, by=self.host, timeout=words.left())
        failures = (self.failure,) if self.failure is not None and is_last else ()
        # Of the seat that it holds, if it holds one: the others know it by that.
        ask = self._hold(mine) if mine is not None else self._new_ask(0)
        self.participant.farewell(ask, Death(why, int(concurrency.wall() * 1000), left=True, failures=failures), words)
        self.participant.leave(within.left())

    def waiting(self) -> tuple[int, str]:
        """How many nodes wait for this one to come back to the rendezvous, and why. Costs no request; for any thread.

        0 while a node that has lost its lease returns to its seat, and while etcd does not answer it: that the others
        do not know of it says nothing about its workers.
        """
        member, mine = self.participant.member, self.round
        if member is None or mine is None:
            return 0, ""
        count, reason = call_back(member.record, mine) if member.has_read else (0, "")
        if count or (member.entered and not member.lost):
            return count, reason
        failure = member.failure or self._holder.failure
        if failure is not None:
            return 1, str(failure)
        try:
            self._holder.begin(self._hold(mine))
        except ThreadNotStarted as error:
            return 1, f"this node's lease expired, and it cannot return to its seat: {error}"
        return 0, ""

    # -- asking -------------------------------------------------------------------------------------------------

    def _ask(self, port: int, pace: RoundPace) -> RoundHead | None:
        look = self.participant.ask(self._new_ask(port), pace)
        if look.standing is Standing.ANSWERED:
            assert look.record is not None
            return self._started(look.record)
        # etcd may forget what was heard, and the round in which this node has taken its seat
        self._highest = max(self._highest, look.ask.seated, look.record.number if look.record is not None else 0)
        if look.standing is Standing.LOST:
            return self._ready_after_all(look, pace)
        if look.standing is Standing.DRAINED:
            self.is_drained = True
            run = self._settings.run_id
            self._end_without_error(f"run {run!r} goes on without this node, which was drained: `ftcoord why {run}`")
        if look.standing is Standing.CLOSED:
            assert look.record is not None
            self._go_on_or_end(look.record, pace)
        return None

    @property
    def stop_reason(self) -> str:
        """Why the ranks of its round are to stop at an agreed step; empty while they are not. For any thread."""
        member, mine = self.participant.member, self.round
        now = member.record if member is not None else None
        is_on = now is not None and mine is not None and now.name == mine.name and not now.recalled
        return now.stop if now is not None and is_on else ""

    def _new_ask(self, port: int) -> JoinRequest:
        settings, after, failure = self._settings, self._highest, self.failure
        is_next = self.round is not None and after == self.round.number
        return JoinRequest(
            self.id,
            self._address,
            port,
            after,
            host=self.host,
            nonce="",
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            reopens=self._reopens,
            failed=(failure,) if is_next and failure is not None else (),
        )

    def worker_failed(self, mine: RoundHead, failure: WorkerFailure) -> None:
        """Report to the others at once that a worker of that round failed: this node's agent comes back later, when it
        has stopped the other workers. For any thread."""
        if self.round is mine and not self.waiting()[0]:
            self.failure = failure
            run, fate = self._settings.run_id, failure.line
            metrics.WORKER_FAILURES.add(run)
            text = f"run {run!r}, round {mine.number}: {fate}; reported to the other nodes"
            log_change(log, text, logging.WARNING, run=run, round=mine.number, reason=fate, host=self.host)
            with contextlib.suppress(ThreadNotStarted):  # they hear of it later
                self._holder.begin(self._hold(mine))

    def workers_ended(self, failure: WorkerFailure | None) -> None:
        """Note the failure of the worker that failed first, now that all have ended; None if none failed. It is part of
        the node's next request."""
        if failure is not None:
            self.failure = failure

    def _hold(self, mine: RoundHead) -> JoinRequest:
        """The request by which this node holds its seat in that round, and asks for nothing."""
        return replace(self._new_ask(0), seated=mine.number, holds=self._seat)

    def _started(self, round_: RoundHead) -> RoundHead:
        self._seat = next(one for one in reversed(self.participant.ids) if round_.rank_of(one) is not None)
        self.failure = None
        self.round = round_  # first: `waiting` looks at any time
        self._highest = round_.number
        self._holder.allow()
        return round_

    def _ready_after_all(self, look: Look[RoundHead, JoinRequest], pace: RoundPace) -> RoundHead | None:
        """For a node that lost its lease: its round, if that has become ready. By then the others have started it, and
        wait until this node starts too: so it has time for that though its own is over. The round is recalled right
        afterwards."""
        known, member = look.record, self.participant.member
        if known is None or member is None or not known.ready or known.rank_of(member.id) is None:
            return None
        if known.number <= look.ask.after:
            return None
        deadline = max(pace.deadline, concurrency.now() + LOOK_TIMEOUT)
        try:
            now = self.run.read(TimeLimit(self._settings.times.request_timeout, deadline).left())
        except EtcdError as error:
            log.debug("could not read whether the round is still the last one: %s", error)
            return None
        stands = now is not None and now.name == known.name and not now.closed
        return self._started(known) if stands else None

    def _go_on_or_end(self, now: RoundHead, pace: RoundPace) -> None:
        """For a run that is over: continue it, or raise the error that ends this node."""
        settings = self._settings
        if not pace.has_waited and self.round is None and may_reopen(now, settings.rounds.restart):
            text = neutral(f"run {settings.run_id!r} is started again; it had ended: {now.closed}")
            log_change(log, text, run=settings.run_id, round=now.number, reason=now.closed, host=self.host)
            self._reopens = now.number
            return
        if pace.limits.refusal:  # it was never of this run, so it is no spare of it either
            raise api.RendezvousStateError(pace.limits.refusal)
        text = neutral(f"run {settings.run_id!r} is over: {now.closed}")
        member = self.participant.member
        has_seat = member is not None and now.rank_of(member.id) is not None
        if not (pace.has_waited and self.round is None and now.size and not has_seat):
            again = "it may be started again once all of its nodes have ended, or start"
            advice = again if may_reopen(now, settings.rounds.restart) else "start"
            raise api.RendezvousClosedError(f"{text}; {advice} a new run under another --rdzv-id")
        self._end_without_error(f"{text}; this node was a spare and is not needed any more")

    def _end_without_error(self, text: str) -> NoReturn:
        """Raise the exception that ends this node's agent as if its workers were done."""
        settings, member = self._settings, self.participant.member
        if settings.on_spare_close == "raise":
            raise api.RendezvousGracefulExitError(text)
        record = member.record if member is not None else None
        number, reason = (record.number, record.closed or record.recalled) if record is not None else (0, "")
        log_change(log, text, run=settings.run_id, round=number, reason=reason, host=self.host)
        raise SystemExit(0)

    @contextlib.contextmanager
    def torch_errors(self) -> Iterator[None]:
        """Raises torch's rendezvous errors for ftcoord's."""
        run = repr(self._settings.run_id)
        try:
            yield
        except Left:
            raise api.RendezvousClosedError(SHUT_DOWN) from None
        except StateError as error:
            raise api.RendezvousStateError(str(error)) from None
        except TimeoutError as error:
            raise api.RendezvousTimeoutError(f"run {run}: {error}") from None
        except ThreadFailed as error:
            raise api.RendezvousError(f"run {run}: {error}") from error
        except EtcdError as error:
            raise api.RendezvousConnectionError(f"run {run}: {error}") from None


class SeatHolder:
    """Writes what a node reports of its seat while its workers run: that it holds the seat under another lease (R9 in
    `core.rendezvous`), or that a worker failed (R3).

    On its own thread, until etcd has taken it or the node asks for something else. Thread-safe.

    Args:
        participant: the node's participant.
        timeout: seconds that one attempt may take.
    """

    def __init__(self, participant: Participant[RoundHead, JoinRequest], timeout: float) -> None:
        self._participant, self._timeout = participant, timeout
        self._lock = concurrency.lock("SeatHolder._lock")  # guards what follows; never held while it waits
        self._thread: concurrency.Thread | None = None
        """The thread that has something to write."""
        self._cancelled = concurrency.event()
        self._has_seat = False
        self._ask: JoinRequest | None = None
        """What to write about this seat; without a thread, what was written last."""
        self._failure: BaseException | None = None

    @property
    def failure(self) -> ThreadFailed | None:
        """The unexpected error that ended a thread of this seat."""
        failure = self._failure
        return None if failure is None else ThreadFailed("reports that this node holds its seat", failure)

    def allow(self) -> None:
        """The node has a seat from now on."""
        with self._lock:
            self._has_seat, self._ask, self._failure = True, None, None

    def begin(self, ask: JoinRequest) -> None:
        """Write this ask, under another lease if the last one is lost, unless the node has ended its round.

        A worker's failure is written again with each later ask, whatever that is for, because the others must learn of
        it.

        Raises ThreadNotStarted.
        """
        with self._lock:
            if not self._has_seat:
                return
            if self._ask is None or not self._ask.failed:
                self._ask = ask
            if self._thread is not None:
                return  # which says it next
            self._cancelled = concurrency.event()
            thread = concurrency.thread(self._run, "ftcoord-seat", self._cancelled)
            thread.start()
            self._thread = thread

    def end(self) -> None:
        """Stop writing: the node's next request must not be overwritten. Waits for an attempt in progress."""
        with self._lock:
            self._has_seat = False
            self._cancelled.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            concurrency.join(thread)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self, cancelled: concurrency.Event) -> None:
        said: JoinRequest | None = None
        try:
            while not cancelled.is_set() and (ask := self._next(said)) is not None:
                said = ask if self._say(ask, cancelled) else None
        except (Left, ClientClosed):  # the node was stopped
            self._end_thread()
        finally:
            failure = sys.exc_info()[1]
            if failure is not None:
                log.exception("the thread that reports this node's seat failed: its changes are no longer published")
                self._end_thread(failure)

    def _next(self, said: JoinRequest | None) -> JoinRequest | None:
        """What to write next. None if it was just written: the thread has then ended for `begin`.

        Not None if the lease that it was written under is already lost: `begin` was called for that while this thread
        was busy.
        """
        with self._lock:
            if self._ask != said or not self._participant.joined:
                return self._ask
            self._thread = None
            return None

    def _end_thread(self, failure: BaseException | None = None) -> None:
        with self._lock:
            if self._thread is concurrency.current_thread():
                self._thread, self._failure = None, failure

    def _say(self, ask: JoinRequest, cancelled: concurrency.Event) -> bool:
        """Whether etcd has taken it. Raises Left, ClientClosed."""
        try:
            self._participant.say(ask, concurrency.now() + self._timeout, cancelled)
        except ClientClosed:
            raise
        except (EtcdError, StateError, ThreadNotStarted, TimeoutError) as error:
            log.debug("could not publish the seat of round %d: %s", ask.seated, error)
            cancelled.wait(SAY_RETRY_PAUSE)
            return False
        if not ask.failed:
            log.warning(
                "this node lost its lease, as happens when etcd is away for long; it is in round %d again under another"
                " one, and its workers run on unless the others went on without it",
                ask.seated,
            )
        return True
