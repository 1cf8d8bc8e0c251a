"""What clients were told, as ftcoord's own judge has it, for the one that knows nothing of etcd (tests/judge)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import store_history
from judge.history import Operation


def heard(kind: str, operations: Iterable[store_history.Operation]) -> list[Operation]:
    """Operations on objects of this kind, "store" or "rounds". What a join was told is the round's number, a space, and
    what tells its members."""
    return [
        Operation(
            one.client,
            kind,
            one.key,
            one.kind,
            tuple(given.decode("latin-1") for given in one.given),
            _told(one),
            one.began,
            one.ended if one.ended < math.inf else None,
        )
        for one in operations
    ]


def _told(one: store_history.Operation) -> Any:
    if one.told is None:
        return None
    told = one.told.decode("latin-1")
    if one.kind != "join":
        return told
    number, _, members = told.partition(" ")
    return int(number), members
