"""The record of a run in etcd, for readers and writers that need not be members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from ftcoord import concurrency
from ftcoord.core import layout, rendezvous_records
from ftcoord.core.history import HistoryEvent, ends_in, failure_event, read_history, told_ends
from ftcoord.core.rendezvous_records import JoinRequest, RoundHead, WorkerFailure, chunk_of, parse_chunk, parse_decided
from ftcoord.core.round_situation import RoundCandidate, ends_of
from ftcoord.core.strict import LARGEST
from ftcoord.errors import EtcdError, StateError
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, Get, KeyValue, RangeResult, Span
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.deaths import causes_known
from ftcoord.rendezvous.record_change import RecordChange, SeatsReplaced, change_record, ending, read_seats
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

HISTORY_TIMEOUT: Final = 1.0
"""Seconds that a read of the history may take: only a text depends on it."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A node that ends a run because of its own workers, and all members that it has been."""

    node: str
    members: Sequence[str]


MOST_SEATS: Final = 32
"""The seats of a round whose members are read when the run is closed: in a larger one only the decider knows them."""
MOST_HEARD: Final = 64
"""How many members' requests are read when the run is closed: more than the seats of a round that is not large, plus
those that are away."""


class RunRecord:
    """The record of one run, and the keys beside it. Thread-safe: it keeps nothing in memory.

    `read` and `close` raise RendezvousConnectionError and RendezvousStateError.
    """

    def __init__(self, etcd: Etcd, settings: RendezvousSettings) -> None:
        self._etcd, self._settings = etcd, settings
        self._key = layout.decided_key(settings.prefix)

    def read(self, timeout: float | None = None) -> RoundHead | None:
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

        def end(now: RoundHead) -> RecordChange | None:
            speaks = speaker is None or bool(now.closed) or self._speaks(now, speaker, within)
            told, ends = reason, list[HistoryEvent]()
            if speaks and not now.closed and failure is not None and speaker is not None:
                cause, ends = self._ends_with(now, failure_event(now.number, by, speaker.node, failure), for_text)
                told = f"{reason}; first cause: {cause}"
            ended = ending(settings.prefix, now, told, outcome, speaks=speaks, ends=ends)
            if ended is None:
                _log_why_not(settings.run_id, now, outcome)
            return ended

        while True:
            try:
                return change_record(self._etcd, settings.prefix, settings.times.run_ttl, end, by=by, within=within)
            except SeatsReplaced:
                log.debug("run %r went on while it was to be closed: looking again", settings.run_id)
            except StateError as error:
                raise RendezvousStateError(str(error)) from None
            except EtcdError as error:
                raise RendezvousConnectionError(f"run {settings.run_id!r} could not be closed: {error}") from None

    def _ends_with(self, now: RoundHead, mine: HistoryEvent, within: TimeLimit) -> tuple[str, list[HistoryEvent]]:
        """The first cause among all known ends of parts in this round and this node's own; and these ends."""
        known = {(end.kind, end.node): end for end in reversed(self._known_ends(now, within))}
        before = known.get((mine.kind, mine.node))
        last = {**known, (mine.kind, mine.node): replace(mine, noted=before.noted if before else LARGEST)}
        return told_ends([*last.values()]), [*({(mine.kind, mine.node): mine} | known).values()]

    def _known_ends(self, now: RoundHead, within: TimeLimit) -> list[HistoryEvent]:
        """How parts in this round ended: by the history, and as the members and their sentinels wrote it themselves
        since, or while nobody decided; of a large round only by the history. None if that cannot be read."""
        prefix = self._settings.prefix
        read: Callable[[Get], RangeResult] = lambda get: self._etcd.range(get, timeout=within.left())  # noqa: E731
        try:
            events = read(Get(layout.events_span(prefix))).kvs
            ends = ends_in(read_history((kv.key, kv.value, kv.mod_revision) for kv in events), now.number)
            if now.size > MOST_SEATS:
                return ends
            round_ = read_seats(read, prefix, now)
            asks = _asks_in(read(Get(layout.members_span(prefix), limit=MOST_HEARD)))
            members = [RoundCandidate(layout.member_of(kv.key), ask, 0.0, kv.mod_revision) for kv, ask in asks]
            causes = causes_known(self._etcd, prefix, round_.ranks, timeout=within.left())
            return ends + ends_of(round_, members, causes)
        except (SeatsReplaced, StateError, EtcdError) as error:
            log.debug("could not read how others ended: %s", error)
            return []

    def _speaks(self, now: RoundHead, speaker: Speaker, within: TimeLimit) -> bool:
        """Whether a node has a seat in this round, and the others have not gone on without it.

        Raises EtcdError, StateError, and SeatsReplaced if the round is no longer the last one.
        """
        if speaker.node in now.drained:
            return False
        for at in {chunk_of(member, now.chunks) for member in speaker.members} if now.chunks else ():
            key = layout.chunk_key(self._settings.prefix, now.name, at)
            found = self._etcd.range(Get(Span(key)), timeout=within.left()).one
            if found is not None:
                if any(seat.node == speaker.node for seat in parse_chunk(key, found.value).seats):
                    return True
            elif self.read(within.left()) == now:
                raise StateError(key, f"is gone, though {self._key} names it: delete that, so that all decide anew")
            else:
                raise SeatsReplaced
        return False

    def members(self, limit: int, timeout: float) -> tuple[list[JoinRequest], int]:
        """The requests of at most `limit` members of the run, and the number of all members.

        They are the members with the lowest ids, which are usually the oldest. To find the oldest, etcd would read all
        members, and each node of a large, slowly forming run asks for this. Raises EtcdError.
        """
        span = layout.members_span(self._settings.prefix)
        found = self._etcd.range(Get(span, limit=limit), timeout=timeout)
        return [ask for _, ask in _asks_in(found)], found.count


def _asks_in(found: RangeResult) -> Iterator[tuple[KeyValue, JoinRequest]]:
    """The requests of members whose keys can be read."""
    for kv in found.kvs:
        try:
            yield kv, rendezvous_records.parse_join_request(kv.key, kv.value)
        except StateError as error:
            log.debug("not counted as a member: %s", error)


def _log_why_not(run_id: str, now: RoundHead, outcome: str) -> None:
    """Log why this node did not close the run with this outcome."""
    if not now.closed:
        log.info("run %r is left to the others: they went on without this node", run_id)
    elif now.outcome != outcome:
        log.warning("this node has %s, but run %r is already over: %s", outcome, run_id, neutral(now.closed))
