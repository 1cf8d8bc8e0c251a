"""The record of a run in etcd, for readers and writers that need not be members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from ftcoord import concurrency
from ftcoord.core import layout, rendezvous_records
from ftcoord.core.history import (
    UNKNOWN_PEER,
    Ends,
    HistoryEvent,
    VacantSeat,
    ends_in,
    failure_event,
    note_ends,
    read_history,
    signed,
    told_ends,
)
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest, Round, WorkerFailure, parse_chunk, parse_decided
from ftcoord.core.round_situation import RoundCandidate, vacant
from ftcoord.core.strict import LARGEST
from ftcoord.errors import EtcdError, StateError
from ftcoord.escaping import named, neutral
from ftcoord.etcd.api import Etcd, Get, KeyValue, RangeResult, Span, exists
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.deaths import causes_known
from ftcoord.primitives.group.events import event_puts
from ftcoord.rendezvous.record_change import RecordChange, change_record, ending
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

HISTORY_TIMEOUT: Final = 1.0
"""Seconds that a read of the history may take: only a text depends on it."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A node that ends a run because of its own workers, and all members that it has been."""

    node: str
    members: Sequence[str]


MOST_HEARD: Final = 64
"""How many members' requests are read when the run is closed: more than the seats of a round that is not large, plus
those that are away."""
MOST_SILENT: Final = 16
"""The most remaining members with which a leaving member checks who has reported nothing: with more, others are still
to leave."""


class _RoundReplaced(Exception):
    """Another round was decided after the record was read."""


class RunRecord:
    """The record of one run, and the keys beside it. Thread-safe: it keeps nothing in memory.

    `read` and `close` raise RendezvousConnectionError and RendezvousStateError.
    """

    def __init__(self, etcd: Etcd, settings: RendezvousSettings) -> None:
        self._etcd, self._settings = etcd, settings
        self._key = layout.decided_key(settings.prefix)

    def read(self, timeout: float | None = None) -> AnyRound | None:
        """The last decided round; None if there is none. `timeout` in seconds, the client's if None."""
        try:
            kv = self._etcd.range(Get(Span(self._key)), timeout=timeout).one
            return parse_decided(kv.key, kv.value) if kv else None
        except StateError as error:
            raise RendezvousStateError(str(error)) from None
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from None

    def close(
        self,
        reason: str,
        outcome: str,
        speaker: Speaker | None = None,
        failure: WorkerFailure | None = None,
        by: str = "",
    ) -> None:
        """End the run, within `close_timeout` seconds, unless it is over or went on without `speaker`.

        Args:
            reason: why. In the record, the first cause of the round's end follows it, if that is known.
            failure: the failure of the speaker's worker.
            by: its host.
        """
        settings = self._settings
        within = TimeLimit.of(settings.times.close_timeout)
        # What is read only for a text leaves half of the time to the write that ends the run.
        for_text = TimeLimit(HISTORY_TIMEOUT, concurrency.now() + settings.times.close_timeout / 2)

        def end(now: AnyRound) -> RecordChange | None:
            speaks = speaker is None or bool(now.closed) or self._speaks(now, speaker, within)
            told, ends = reason, list[HistoryEvent]()
            if speaks and not now.closed and failure is not None and speaker is not None:
                cause, ends = self._ends_with(now, failure_event(now.number, by, speaker.node, failure), for_text)
                told = f"{reason}; first cause: {cause}"
            ended = ending(settings.prefix, now, told, outcome, speaks=speaks, ends=ends)
            if ended is None:
                _log_why_not(settings.run_id, now, outcome)
            return ended

        try:
            while not self._is_ended(end, by, within):
                log.debug("run %r went on while it was to be closed: looking again", settings.run_id)
        except StateError as error:
            raise RendezvousStateError(str(error)) from None
        except EtcdError as error:
            raise RendezvousConnectionError(f"run {settings.run_id!r} could not be closed: {error}") from None

    def _is_ended(self, end: Callable[[AnyRound], RecordChange | None], by: str, within: TimeLimit) -> bool:
        """End the run. False if another round was decided meanwhile."""
        settings = self._settings
        try:
            change_record(self._etcd, settings.prefix, settings.times.run_ttl, end, by=by, within=within)
        except _RoundReplaced:
            return False
        return True

    def _ends_with(self, now: AnyRound, mine: HistoryEvent, within: TimeLimit) -> tuple[str, list[HistoryEvent]]:
        """The first cause among all known ends of parts in this round and this node's own; and these ends."""
        known = {**self._said_ends(now, within), **self._written_ends(now.number, within)}
        before = known.get((mine.kind, mine.node))
        last = {**known, (mine.kind, mine.node): replace(mine, noted=before.noted if before else LARGEST)}
        return told_ends([*last.values()]), [*({(mine.kind, mine.node): mine} | known).values()]

    def _written_ends(self, number: int, within: TimeLimit) -> Ends:
        """How parts in this round ended, by the history; empty if it cannot be read."""
        try:
            found = self._etcd.range(Get(layout.events_span(self._settings.prefix)), timeout=within.left()).kvs
        except EtcdError as error:
            log.debug("could not read the history: %s", error)
            return {}
        past = read_history((kv.key, kv.value, kv.mod_revision) for kv in found)
        return {(end.kind, end.node): end for end in ends_in(past, number)}

    def _said_ends(self, now: AnyRound, within: TimeLimit) -> Ends:
        """The same, as the members and their sentinels wrote it themselves: the decider, which would write it into the
        history, may have been lost with its host. In a large round only the decider knows the seats."""
        if not isinstance(now, Round):
            return {}
        prefix = self._settings.prefix
        try:
            found = self._etcd.range(Get(layout.members_span(prefix), limit=MOST_HEARD), timeout=within.left())
            members = [
                RoundCandidate(layout.member_of(kv.key), ask, 0.0, kv.mod_revision) for kv, ask in _asks_in(found)
            ]
            causes = causes_known(self._etcd, prefix, vacant(now, members), timeout=within.left())
        except EtcdError as error:
            log.debug("could not read the members: %s", error)
            return {}
        gone = [
            VacantSeat(now.seats[now.ranks[one]], known.cause, known.revision)
            for one, known in causes.items()
            if not known.left
        ]
        return note_ends({}, now, ((one.ask, one.revision) for one in members), gone)

    def _speaks(self, now: AnyRound, speaker: Speaker, within: TimeLimit) -> bool:
        """Whether a node has a seat in this round, and the others have not gone on without it.

        Raises EtcdError, StateError, and _RoundReplaced if the round is no longer the last one.
        """
        if speaker.node in now.drained:
            return False
        if isinstance(now, Round):
            return speaker.node in now.nodes
        for at in {now.chunk_of(member) for member in speaker.members}:
            key = layout.roll_key(self._settings.prefix, now.roll, at)
            found = self._etcd.range(Get(Span(key)), timeout=within.left()).one
            if found is not None:
                if speaker.node in parse_chunk(key, found.value).nodes:
                    return True
            elif self.read(within.left()) == now:
                raise StateError(key, f"is gone, though {self._key} names it: delete that, so that all decide anew")
            else:
                raise _RoundReplaced
        return False

    def members(self, limit: int, timeout: float) -> tuple[list[JoinRequest], int]:
        """The requests of at most `limit` members of the run, and the number of all members.

        They are the members with the lowest ids, which are usually the oldest. To find the oldest, etcd would read all
        members, and each node of a large, slowly forming run asks for this. Raises EtcdError.
        """
        span = layout.members_span(self._settings.prefix)
        found = self._etcd.range(Get(span, limit=limit), timeout=timeout)
        return [ask for _, ask in _asks_in(found)], found.count

    def note_last(
        self, now: AnyRound, lease: int, mine: Sequence[HistoryEvent], *, host: str, member: str, within: TimeLimit
    ) -> None:
        """For a run that ended because an unknown peer was lost: add to the history what a member that leaves it knows:
        how its own worker failed, and which members of the last round have reported nothing by then.

        `lease` is that of the record. Does not raise if etcd is unreachable.
        """
        prefix = self._settings.prefix
        if UNKNOWN_PEER not in now.closed:
            return
        try:
            found = self._etcd.range(
                Get(layout.members_span(prefix), limit=MOST_SILENT + 1), timeout=within.left(HISTORY_TIMEOUT)
            )
            asks = [ask for _, ask in _asks_in(found)]
            silent = [one for one in asks if one.seated == now.number and not one.failed and one.host != host]
            events = [*mine]
            if silent and found.count <= MOST_SILENT:
                who = (silent[0].host, silent[0].node) if len(silent) == 1 else ("", "")
                reason = f"{named(sorted(one.host for one in silent))} had reported nothing when {host} left"
                events.append(HistoryEvent("silent", now.number, *who, reason))
            events = signed(events, member, int(concurrency.wall() * 1000))
            puts = event_puts(prefix, events, lease, revision=found.revision, writer=member)
            self._etcd.txn([exists(layout.member_key(prefix, member))], puts, timeout=within.left(HISTORY_TIMEOUT))
        except EtcdError as error:
            log.debug("the history of a run that is over is incomplete: %s", error)

    def highest_round(self, timeout: float) -> int:
        """The highest round that has left a key in etcd, even if the record was deleted. Raises EtcdError."""
        number, _ = highest_round(self._etcd, self._settings.prefix, timeout)
        return number


def _asks_in(found: RangeResult) -> Iterator[tuple[KeyValue, JoinRequest]]:
    """The requests of members whose keys can be read."""
    for kv in found.kvs:
        try:
            yield kv, rendezvous_records.parse_join_request(kv.key, kv.value)
        except StateError as error:
            log.debug("not counted as a member: %s", error)


def _log_why_not(run_id: str, now: AnyRound, outcome: str) -> None:
    """Log why this node did not close the run with this outcome."""
    if not now.closed:
        log.info("run %r is left to the others: they went on without this node", run_id)
    elif now.outcome != outcome:
        log.warning("this node has %s, but run %r is already over: %s", outcome, run_id, neutral(now.closed))


def highest_round(etcd: Etcd, prefix: str, timeout: float | None = None) -> tuple[int, int]:
    """The highest round that has left its fence in etcd, even if the record was deleted; 0 for none. And at which
    revision. Raises EtcdError."""
    found = etcd.range(Get(layout.rounds_span(prefix), keys_only=True), timeout=timeout)
    return max((layout.number_of(kv.key) for kv in found.kvs), default=0), found.revision
