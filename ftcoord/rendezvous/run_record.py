"""A run's record as others than its decider read and change it: who sits in the last round, who is there; and, in one
transaction each (T5), nodes and operators that end the run, and operators that drain nodes.

Commands load this too, so it needs no torch.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core import history, layout, rendezvous, rendezvous_records as records
from ftcoord.core.history import HistoryEvent
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Round, RoundHead, WorkerFailure
from ftcoord.core.strict import LARGEST
from ftcoord.errors import EtcdError, StateError
from ftcoord.escaping import named, neutral
from ftcoord.etcd.api import Delete, Etcd, Get, KeyValue, Op, Put, RangeResult, Span
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.deaths import causes_known
from ftcoord.primitives.group.record import event_puts, written_with
from ftcoord.primitives.write_once import WriteOutcome, write_once
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

HISTORY_TIMEOUT: Final = 1.0
"""Seconds that a read of the history may take: only a text depends on it."""
MOST_SEATS: Final = 32
"""The seats of a round whose members are read when the run is closed: in a larger one only the decider knows them."""
MOST_HEARD: Final = 64
"""How many members' requests are read when the run is closed: more than the seats of a round that is not large, plus
those that are away."""

RecordChange: TypeAlias = tuple[RoundHead, Sequence[HistoryEvent], Sequence[Op]]
"""The record that replaces the present one, the events for the history, and the operations that go with it."""
Speaker: TypeAlias = tuple[str, Sequence[str]]
"""A node that ends a run because of its own workers, and all members that it has been."""


# -- who sits in the last round ---------------------------------------------------------------------------------------


class SeatsReplaced(Exception):
    """The seats of a round were deleted, because there is another one by now."""


def read_seats(read: Callable[[Get], RangeResult], prefix: str, head: RoundHead) -> Round:
    """The round of this head, as etcd has it. Raises SeatsReplaced, StateError and EtcdError."""
    kvs = {kv.key: kv.value for kv in read(Get(layout.seats_span(prefix, head.name))).kvs}
    try:
        return records.seated(prefix, head, kvs)
    except StateError:
        now = read(Get(Span(layout.decided_key(prefix)))).one
        if now is None or records.parse_decided(now.key, now.value).name != head.name:
            raise SeatsReplaced from None
        raise


# -- changes of the record --------------------------------------------------------------------------------------------


def ending(
    prefix: str, now: RoundHead, reason: str, outcome: str, ends: Sequence[HistoryEvent] = ()
) -> RecordChange | None:
    """The change that ends a run; None if it is over.

    If the run did not finish, its round ends too: torch's agents wait in the round's store, in their exit barrier, for
    nodes that will not come.

    Args:
        prefix: the run's prefix.
        ends: how parts in its last round ended; the history may not have them yet.
    """
    if now.closed:
        return None
    ended = replace(now, closed=reason, outcome=outcome)
    fence = Delete(Span(layout.fence_key(prefix, now.name)))
    return ended, history.round_events(now, ended, ends), () if outcome == records.FINISHED else (fence,)


def stopping(now: RoundHead, reason: str) -> RecordChange | None:
    """The change that asks all ranks to stop at an agreed step; None if `why_not_stopped` gives a reason."""
    if rendezvous.why_not_stopped(now):
        return None
    return replace(now, stop=reason), [HistoryEvent("ordered", now.number, reason=reason)], ()


def draining(now: RoundHead, leavers: Sequence[JoinRequest], reason: str) -> RecordChange | None:
    """The change that drains nodes of a run; None to leave the record as it is: see `core.rendezvous.drain`.

    Args:
        leavers: the requests of these nodes' members.
        reason: what is written about each, after the name of its host.
    """
    hosts = {ask.node: ask.host for ask in leavers}
    drained = rendezvous.drain(now, leavers, f"{named(sorted({*hosts.values()}))} {reason}")
    if drained is None:
        return None
    told = [HistoryEvent("ordered", now.number, host, node, f"{host} {reason}") for node, host in hosts.items()]
    return drained, [*told, *history.round_events(now, drained, ())], ()


def change_record(
    etcd: Etcd,
    prefix: str,
    run_ttl: int,
    change: Callable[[RoundHead], RecordChange | None],
    *,
    by: str,
    within: TimeLimit,
) -> None:
    """Replace a run's record by what `change` returns for it, under its lease, or else a new one of `run_ttl` seconds.

    `change` gets the present record, and is called again if somebody else changes it meanwhile. If it returns None, the
    record stays as it is. Its events name `by` as their writer. Raises StateError, and OutcomeUnknown and
    EtcdUnavailable when etcd does not answer in time.
    """
    key, done = layout.decided_key(prefix), False
    while not done:
        kv = etcd.range(Get(Span(key)), timeout=within.left()).one
        changed = change(records.parse_decided(kv.key, kv.value) if kv else NO_ROUND)
        if changed is None:
            return
        record, events, also = changed
        writer = uuid.uuid4().hex
        lease = kv.lease if kv and kv.lease else etcd.grant(run_ttl, timeout=within.left()).id
        put = Put(key, records.encode(replace(record, by=writer)), lease)
        signed = history.signed(events, by, int(concurrency.wall() * 1000))
        more = event_puts(prefix, signed, lease, revision=kv.mod_revision if kv else 0, writer=writer)
        done = written_with(more, partial(_write, etcd, put, kv, also, within), prefix).done


def _write(
    etcd: Etcd, put: Put, kv: KeyValue | None, also: Sequence[Op], within: TimeLimit, more: Sequence[Op]
) -> WriteOutcome:
    return write_once(etcd, put, kv, also=[*also, *more], timeout=within.left())


class RunRecord:
    """The record of one run, and the keys beside it. Thread-safe: it keeps nothing in memory.

    Methods raise StateError and EtcdError.
    """

    def __init__(self, etcd: Etcd, settings: RendezvousSettings) -> None:
        self._etcd, self._settings = etcd, settings
        self._key = layout.decided_key(settings.prefix)

    def read(self, timeout: float | None = None) -> RoundHead | None:
        """The last decided round; None if there is none. `timeout` in seconds, the client's if None."""
        kv = self._etcd.range(Get(Span(self._key)), timeout=timeout).one
        return records.parse_decided(kv.key, kv.value) if kv else None

    def members(self, limit: int, timeout: float) -> tuple[list[JoinRequest], int]:
        """The requests of at most `limit` members of the run, and the number of all members.

        They are the members with the lowest ids, which are usually the oldest. To find the oldest, etcd would read all
        members, and each node of a large, slowly forming run asks for this.
        """
        found = self._etcd.range(Get(layout.members_span(self._settings.prefix), limit=limit), timeout=timeout)
        return [ask for _, ask in _asks_in(found)], found.count

    def close(
        self,
        reason: str,
        outcome: str,
        speaker: Speaker | None = None,
        failure: WorkerFailure | None = None,
        by: str = "",
        timeout: float = math.inf,
    ) -> None:
        """End the run, within `close_timeout` seconds or `timeout`, unless it is over or went on without `speaker`.

        Args:
            reason: why. In the record, the first cause of the round's end follows it, if that is known.
            failure: the failure of the speaker's worker.
            by: its host.
        """
        settings = self._settings
        within = TimeLimit.of(min(settings.times.close_timeout, timeout))
        # What is read only for a text leaves half of the time to the write that ends the run.
        for_text = TimeLimit(HISTORY_TIMEOUT, concurrency.now() + settings.times.close_timeout / 2)

        def end(now: RoundHead) -> RecordChange | None:
            if now.closed:
                if now.outcome != outcome:
                    what = f"this node has {outcome}, but run {settings.run_id!r} is already over"
                    log.warning("%s: %s", what, neutral(now.closed))
                return None
            if speaker is None:
                return ending(settings.prefix, now, reason, outcome)
            node, members = speaker
            if not self._has_seat(now, node, members, within):
                log.info("run %r is left to the others: they went on without this node", settings.run_id)
                return None
            if failure is None:
                return ending(settings.prefix, now, reason, outcome)
            cause, ends = self._ends_with(now, history.failure_event(now.number, by, node, failure), for_text)
            return ending(settings.prefix, now, f"{reason}; first cause: {cause}", outcome, ends)

        while True:
            try:
                return change_record(self._etcd, settings.prefix, settings.times.run_ttl, end, by=by, within=within)
            except SeatsReplaced:
                log.debug("run %r went on while it was to be closed: looking again", settings.run_id)

    def stop(self, reason: str, by: str) -> None:
        """Ask all ranks to stop at an agreed step, within `request_timeout` seconds; the first reason counts."""
        times, change = self._settings.times, partial(stopping, reason=reason)
        within = TimeLimit(times.request_timeout)
        change_record(self._etcd, self._settings.prefix, times.run_ttl, change, by=by, within=within)

    def _has_seat(self, now: RoundHead, node: str, members: Sequence[str], within: TimeLimit) -> bool:
        """Whether a node has a seat in this round, and the others have not gone on without it.

        Raises EtcdError, StateError, and SeatsReplaced if the round is no longer the last one.
        """
        if node in now.drained:
            return False
        for at in {records.chunk_of(member, now.chunks) for member in members} if now.chunks else ():
            key = layout.chunk_key(self._settings.prefix, now.name, at)
            found = self._etcd.range(Get(Span(key)), timeout=within.left()).one
            if found is not None:
                if any(seat.node == node for seat in records.parse_chunk(key, found.value).seats):
                    return True
            elif self.read(within.left()) == now:
                raise StateError(key, f"is gone, though {self._key} names it: delete that, so that all decide anew")
            else:
                raise SeatsReplaced
        return False

    def _ends_with(self, now: RoundHead, mine: HistoryEvent, within: TimeLimit) -> tuple[str, list[HistoryEvent]]:
        """The first cause among all known ends of parts in this round and this node's own; and these ends."""
        known = {(end.kind, end.node): end for end in reversed(self._known_ends(now, within))}
        before = known.get((mine.kind, mine.node))
        last = {**known, (mine.kind, mine.node): replace(mine, noted=before.noted if before else LARGEST)}
        return history.told_ends([*last.values()]), [*({(mine.kind, mine.node): mine} | known).values()]

    def _known_ends(self, now: RoundHead, within: TimeLimit) -> list[HistoryEvent]:
        """How parts in this round ended: by the history, and as the members and their sentinels wrote it themselves
        since, or while nobody decided; of a large round only by the history. None if that cannot be read."""
        prefix = self._settings.prefix
        read: Callable[[Get], RangeResult] = lambda get: self._etcd.range(get, timeout=within.left())  # noqa: E731
        try:
            events = read(Get(layout.events_span(prefix))).kvs
            ends = history.ends_in(
                history.read_history((kv.key, kv.value, kv.mod_revision) for kv in events), now.number
            )
            if now.size > MOST_SEATS:
                return ends
            round_ = read_seats(read, prefix, now)
            asks = _asks_in(read(Get(layout.members_span(prefix), limit=MOST_HEARD)))
            members = [
                rendezvous.RoundCandidate(layout.member_of(kv.key), ask, 0.0, kv.mod_revision) for kv, ask in asks
            ]
            causes = causes_known(self._etcd, prefix, round_.ranks, timeout=within.left())
            return ends + rendezvous.ends_of(round_, members, causes)
        except (SeatsReplaced, StateError, EtcdError) as error:
            log.debug("could not read how others ended: %s", error)
            return []


def _asks_in(found: RangeResult) -> Iterator[tuple[KeyValue, JoinRequest]]:
    """The requests of members whose keys can be read."""
    for kv in found.kvs:
        try:
            yield kv, records.parse_join_request(kv.key, kv.value)
        except StateError as error:
            log.debug("not counted as a member: %s", error)
