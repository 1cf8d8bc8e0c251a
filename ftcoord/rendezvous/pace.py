"""How long a node waits for its round, and what it does meanwhile."""

from __future__ import annotations

import logging
import math
import random
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousTimeoutError

from ftcoord import concurrency
from ftcoord.core.rendezvous import RETURN_FACTOR, SAY_AGAIN, contradicts, seating_time, spelled, unhurried
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, RoundHead
from ftcoord.core.verdict import Standing
from ftcoord.errors import EtcdError
from ftcoord.escaping import SHOWN, counted, named, neutral, spanned
from ftcoord.etcd.retry import TimeLimit
from ftcoord.logs import ending, log_change
from ftcoord.primitives.group.participant import Participant
from ftcoord.primitives.group.use import Look, signals_at
from ftcoord.rendezvous.run_record import RunRecord
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

FIRST_LINE: Final = 5.0
"""Seconds until a waiting node logs for the first time who is there."""
LINES_PER_SECOND: Final = 100
"""The most nodes of a run that log this in a second, and read the members for it: all begin to wait at about the same
time."""
LINE_INTERVAL: Final = 30.0
"""Seconds between two such lines of a node; longer in a large run."""
LOOK_TIMEOUT: Final = 2.0
"""Seconds that a read of the other nodes may take. Nothing depends on it."""
LAST_READ_TIMEOUT: Final = 1.0
"""The same when the node's own time is over, and it is still to leave."""
LIMITS_INTERVAL: Final = 1.0
"""Seconds between two checks of a node that has other limits than the run."""
MEMBERS_LOOKED_AT: Final = 100
"""How many members a node with other limits checks for one that has the run's limits."""
LEASES_OUTLIVED: Final = 2.0
"""How many lease TTLs must pass before a member that is still there is certain to be alive: etcd may grant more than it
was asked for, as 8 s for 5 where its election timeout is 5 s."""


class RoundPace:
    """One call of `next_rendezvous`, through all the asks that it takes.

    For the calling thread; `see` and `wake_at` are called under the participant's lock.
    """

    def __init__(
        self, participant: Participant[RoundHead, JoinRequest], settings: RendezvousSettings, run: RunRecord, host: str
    ) -> None:
        now, turns = concurrency.now(), settings.max_nodes / LINES_PER_SECOND
        self._participant, self._settings, self._run, self._host = participant, settings, run, host
        self.gone = concurrency.event()
        self.deadline = now + settings.times.join_timeout
        self.has_waited = False
        """Whether this node has waited for others: it may then be a spare."""
        self.limits = OtherLimits(settings, run)
        self._enough_since = math.inf
        """Since when there have been enough nodes for a round at the latest, as far as this node knows."""
        self._spare_of = 0
        """The last round without a seat for this node, for the log."""
        self._check_at = math.inf
        """When to write again that this node takes its seat."""
        self._seated = 0, now
        """The round in which it takes its seat, and since when."""
        self._interval = max(LINE_INTERVAL, turns)
        self._line_at = now + FIRST_LINE + random.random() * min(turns, LINE_INTERVAL)
        """When to log next who is there: each node in its turn, so that not all read that at once."""

    def see(self, look: Look[RoundHead, JoinRequest]) -> Standing:
        standing, now = look.standing, concurrency.now()
        if standing is Standing.SEATED:
            # The decider ends this by itself when a seat is not taken; nobody's time is over while others count on it.
            seating = seating_time(self._seats(look.record), self._settings.rounds.last_call_timeout)
            self.deadline = max(self.deadline, now + seating + LOOK_TIMEOUT)
            self._check_at = min(self._check_at, self._say_again_at(look.record, now))
        elif standing is Standing.SPARE:  # others run without this node: it may wait forever
            self.deadline = now + self._settings.times.join_timeout
        if standing in (Standing.PENDING, Standing.SPARE, Standing.REFUSED):
            self.has_waited = True
        return standing

    def wake_at(self, standing: Standing) -> float:
        due = self.limits.judge_at if standing is Standing.REFUSED else min(self._check_at, self._line_at)
        return min(self.deadline, due, signals_at())

    def tick(self, look: Look[RoundHead, JoinRequest]) -> None:
        """Raises RendezvousTimeoutError after the join timeout, and RendezvousStateError when the limits differ."""
        now, record = concurrency.now(), look.record
        if look.standing is Standing.REFUSED and record is not None and now >= self.limits.judge_at:
            self.limits.judge(record, look.ask, self._look_timeout)
        if now >= self.deadline:
            raise RendezvousTimeoutError(self._why_no_round())
        if now >= self._check_at:
            self._check_at = math.inf
            if record is not None and record.number == look.ask.seated:
                self._check_at = self._say_again_at(record, now)
                self._participant.reaffirm(look.ask, self)  # for what was said a while ago does not count
        is_due, run = now >= self._line_at, self._settings.run_id
        if look.standing is Standing.SPARE and record is not None and (is_due or self._spare_of != record.number):
            is_due, self._spare_of, most = True, record.number, counted(self._settings.max_nodes, "node")
            text = f"run {run!r}: round {record.number} runs on {record.size} of at most {most}; this node is a spare"
            log_change(log, text, run=run, round=record.number, host=self._host)
        elif is_due and look.standing is Standing.PENDING and log.isEnabledFor(logging.INFO):  # else nobody reads it
            there = self._attendance(self._look_timeout, says_when=True)
            log_change(log, f"run {run!r}: waits for a round: {there}", run=run, reason=there, host=self._host)
        if is_due:
            self._line_at = now + self._interval

    def _seats(self, record: RoundHead | None) -> int:
        return record.size if record is not None and record.size else self._settings.min_nodes

    def _say_again_at(self, record: RoundHead | None, now: float) -> float:
        """When to write again that this node takes its seat."""
        number = record.number if record is not None else 0
        if self._seated[0] != number:
            self._seated = number, now
        return now + SAY_AGAIN * unhurried(self._seats(record), now - self._seated[1])

    def _why_no_round(self) -> str:
        run, seconds = self._settings.run_id, self._settings.times.join_timeout
        there = self._attendance(LAST_READ_TIMEOUT)
        return (
            f"no round of run {run!r} with a seat for {self._host} came about within"
            f" {seconds:g} s (join_timeout): {there}; start the missing nodes with the same --rdzv-id and"
            " --rdzv-endpoint"
        )

    @property
    def _look_timeout(self) -> float:
        """Seconds that a read of the other nodes may take while this one waits."""
        return TimeLimit(LOOK_TIMEOUT, self.deadline).left()

    def _attendance(self, timeout: float, *, says_when: bool = False) -> str:
        try:
            asks, count = self._run.members(SHOWN, timeout)
        except EtcdError as error:
            return f"could not read who is there: {error}"
        before = self._participant.record or NO_ROUND
        if before.closed:
            nodes = {seat.node for seat in before.known.values()}
            old = [ask.host for ask in asks if ask.node in nodes or ask.seated == before.number]
            if old:
                return f"{named(old)} of the run that had ended has still to end"
        mine = self._settings.min_nodes, self._settings.max_nodes
        limits = mine if before.limits == NO_ROUND.limits else before.limits
        refused = [f"{ask.host} {contradicts(ask.limits, limits)}" for ask in asks if ask.limits != limits]
        count, hosts = count - len(refused), [ask.host for ask in asks if ask.limits == limits]
        who = f" ({named(hosts, count)})" if hosts else ""
        there = f"{count} of {spanned(limits, 'node')} {'is' if count == 1 else 'are'} there{who}"
        return "; ".join([there, *refused, *([self._when(count, limits, before)] if says_when else [])])

    def _when(self, count: int, limits: tuple[int, int], before: RoundHead) -> str:
        """Until when this node waits if no more than so many nodes come."""
        now = concurrency.now()
        if count < limits[0]:
            self._enough_since = math.inf
            return ending(self.deadline)
        self._enough_since = min(self._enough_since, now)
        # Those of the last round have longer to come back.
        last_call = self._settings.rounds.last_call_timeout * (RETURN_FACTOR if before.size else 1.0)
        left = math.ceil(self._enough_since + last_call - now)
        when = f"it starts within {left} s (last_call_timeout)" if left > 0 else "it is due"
        more = limits[1] - count
        return f"{when}, or at once with {more} more" if more > 0 else when


class OtherLimits:
    """What a node whose --nnodes differ from the run's knows about the members: it ends once it is certain that a live
    one has the run's limits. Not thread-safe.

    The delay is for a run that was killed and is restarted with other limits: the killed nodes seem alive until their
    leases expire.
    """

    def __init__(self, settings: RendezvousSettings, run: RunRecord) -> None:
        self._settings, self._run = settings, run
        self._since: float | None = None
        self.judge_at = -math.inf
        """When to judge next."""
        self.refusal = ""
        """Why this node is refused; empty while it may not be."""

    def judge(self, now: RoundHead, ask: JoinRequest, timeout: float) -> None:
        """Raises RendezvousStateError when others have had the limits of the run `now` for longer than a lease
        lasts."""
        self.judge_at = concurrency.now() + LIMITS_INTERVAL
        try:
            asks, _ = self._run.members(MEMBERS_LOOKED_AT, timeout)
        except EtcdError as error:
            log.debug("could not read who shares the run's limits: %s", error)
            return
        other = next((one for one in asks if one.limits == now.limits), None)
        if other is None:
            self._since, self.refusal = None, ""
            return
        moment = concurrency.now()
        self.refusal = (
            f"run {self._settings.run_id!r} has --nnodes={spelled(now.limits)}, as {neutral(other.host)} wants, and"
            f" this node has --nnodes={spelled(ask.limits)}: give all nodes the same, or this one another --rdzv-id"
        )
        if self._since is None:
            self._since = moment
            log.warning("%s; waiting until it is certain that the other one lives", self.refusal)
        if moment > self._since + self._settings.times.lease_ttl * LEASES_OUTLIVED:
            raise RendezvousStateError(self.refusal)
