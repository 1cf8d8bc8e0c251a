"""What ends a run, in one transaction: for its nodes, and for whoever ends it by hand."""

from __future__ import annotations

import uuid
from dataclasses import replace

from ftcoord.core import rendezvous, rendezvous_records
from ftcoord.core.layout import round_key
from ftcoord.core.rendezvous_records import AnyRound
from ftcoord.etcd.api import Delete, Span
from ftcoord.primitives.write_once import Amendment


def ending(prefix: str, now: AnyRound, reason: str, outcome: str, *, speaks: bool) -> Amendment | None:
    """The record that ends a run, and what goes with it; None to leave the run as it is.

    If the run did not finish, its round ends too: torch's agents wait in the round's store, in their exit barrier, for
    nodes that will not come.

    Args:
        prefix: the run's.
        speaks: see `core.rendezvous.close`.
    """
    ended = rendezvous.close(now, reason, outcome, speaks=speaks)
    if ended is None:
        return None
    fence = Delete(Span(round_key(prefix, now.number)))
    value = rendezvous_records.encode(replace(ended, by=uuid.uuid4().hex))
    return value, () if outcome == rendezvous_records.FINISHED else (fence,)
