"""A job's history in etcd: events beside a decision, in the same transaction and under the lease of the record.

Nothing depends on it. If etcd refuses a decision with its events (space, size, permission), it is made without.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.core.history import HistoryEvent, encode
from ftcoord.core.layout import Span, decided_key, event_key, events_span, is_event_key
from ftcoord.errors import ClientClosed, EtcdError
from ftcoord.etcd.api import Delete, Etcd, Get, Op, Put
from ftcoord.etcd.retry import UNANSWERED
from ftcoord.log_once import LogOnce
from ftcoord.primitives.write_once import WriteOutcome

log = logging.getLogger(__name__)
_refusals: Final = LogOnce(log)
"""Of any thread: at worst, one of them repeats a line."""

KEPT_EVENTS: Final = 300
"""The most events of one run, or of one job's quorums. The oldest are deleted first."""
READ_TIMEOUT: Final = 1.0
"""Seconds that a read for the history alone may take."""


def event_puts(prefix: str, events: Sequence[HistoryEvent], lease: int, *, revision: int, writer: str) -> list[Put]:
    """The operations that write these events.

    Args:
        prefix: the prefix of the group whose history it is.
        lease: that of the group's record.
        revision: etcd's highest known revision.
        writer: a name that is unique to these events.
    """
    return [Put(event_key(prefix, revision, writer, at), encode(one), lease) for at, one in enumerate(events)]


def written_with(events: Sequence[Op], write: Callable[[Sequence[Op]], WriteOutcome], prefix: str) -> WriteOutcome:
    """Have `write` make its transaction with these operations; once more without them, if etcd refuses it.

    Raises what `write` raises.
    """
    try:
        return write(events)
    except (*UNANSWERED, ClientClosed):
        raise
    except EtcdError as error:
        if not events:
            raise
        refused = error
    outcome = write(())
    _refusals.say(f"etcd takes no history below {prefix}, so the job runs on without one: {refused}")
    return outcome


class EventLog:
    """What one decider adds to a history, and the bound of that. Not thread-safe.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        writer: a unique name, such as a member id.
    """

    def __init__(self, etcd: Etcd, prefix: str, writer: str) -> None:
        self._etcd, self._prefix, self._writer = etcd, prefix, writer  # never change
        self._calls = itertools.count()
        self._keys: list[str] | None = None
        """The known keys of the history, in order; None before the first event."""

    def ops(self, events: Sequence[HistoryEvent], lease: int, revision: int) -> list[Op]:
        """The operations that add these events to a transaction and delete the oldest. The first time costs a read."""
        if not events:
            return []
        if self._keys is None:
            self._keys = self._existing()
        puts = event_puts(self._prefix, events, lease, revision=revision, writer=f"{self._writer}-{next(self._calls)}")
        known = [*self._keys, *(put.key for put in puts)]
        self._keys = known[-KEPT_EVENTS:]
        too_many = len(known) > KEPT_EVENTS
        return [*puts, Delete(Span(events_span(self._prefix).start, stop=self._keys[0]))] if too_many else [*puts]

    def _existing(self) -> list[str]:
        get = Get(events_span(self._prefix), limit=2 * KEPT_EVENTS, keys_only=True, order="newest")
        try:
            found = self._etcd.range(get, timeout=READ_TIMEOUT).kvs
        except EtcdError as error:
            log.debug("the history below %s cannot be read: %s", self._prefix, error)
            return []
        return sorted(kv.key for kv in found if is_event_key(kv.key))


def ordered(etcd: Etcd, prefix: str, what: str, *, target: str, by: str) -> list[Put]:
    """The operations that record, in a transaction, what somebody does by hand; none where nothing was decided yet.

    Args:
        prefix: the prefix of the group whose history it is.
        what: in one line, with the target's name and the reason.
        target: the node or replica that it is about; empty for all.
        by: who does it.

    Raises EtcdError.
    """
    record = etcd.range(Get(Span(decided_key(prefix)))).one
    if record is None:
        return []
    event = HistoryEvent("ordered", 0, target, "", what, by=by, wall_ms=int(concurrency.wall() * 1000))
    return event_puts(prefix, [event], record.lease, revision=record.mod_revision, writer=uuid.uuid4().hex)
