"""The values of torchft's coordination API (`torchft.coordination`, torchft 0.2.0 and its nightly builds), and how
records become them.

https://docs.pytorch.org/torchft/coordination.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord

# -- values ------------------------------------------------------------------------------------------------------------


# As with torchft's native classes, any name but a declared one raises AttributeError, and each is equal to itself only.


@dataclass(slots=True, eq=False)
class Timestamp:
    """A time on the wall clock of the process that decided. For information only: no decision depends on it.

    Args:
        seconds: seconds since 1970.
        nanos: nanoseconds within that second.
    """

    seconds: int
    nanos: int


@dataclass(slots=True, eq=False)
class QuorumMember:
    """One replica of a quorum, with the values of its request.

    Args:
        replica_id: its name, which no other replica has.
        address: the address of its manager.
        store_address: the address of its store.
        step: the training step that it is at.
        world_size: the number of its ranks.
        shrink_only: whether it asked to admit no new replicas.
        data: its other data, as read from JSON, so keys are str; None if it sent none.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Any, Any] | None = None


class Quorum:
    """The replicas that train together, equal to itself only.

    Args:
        record: the decided record.

    `quorum_id` grows whenever the members change, or one of them failed to commit; an id is never used again.
    `participants` are the members, sorted by the bytes of their replica ids. `created` is when it was decided.
    """

    def __init__(self, record: QuorumRecord) -> None:
        self.quorum_id, self.created = record.id, timestamp(record)
        self._record = record

    @cached_property
    def participants(self) -> list[QuorumMember]:  # not before somebody reads them: a step of many replicas costs less
        return [
            QuorumMember(
                one.replica_id,
                without_token(one.address),
                one.store_address,
                one.step,
                one.world_size,
                one.shrink_only,
                json.loads(one.data) if one.data else None,
            )
            for one in self._record.requests
        ]

    def __repr__(self) -> str:
        return f"Quorum(quorum_id={self.quorum_id}, participants={self.participants}, created={self.created})"


# -- addresses of managers ---------------------------------------------------------------------------------------------


MOST: Final = 100_000
"""The most tokens that are kept. Beyond that all are forgotten: a quorum brings those in use again."""

_tokens: dict[str, str] = {}  # by address; any thread, one step of a dict at a time


def without_token(address: str) -> str:
    """The address as others may see it. Its token is remembered."""
    plain, token = parted(address)
    if token:
        if len(_tokens) >= MOST:
            _tokens.clear()
        _tokens[plain] = token
    return plain


def with_known_token(address: str) -> tuple[str, str]:
    """An address without its token, and the token: that of the address, else the remembered one; empty if none is
    known."""
    plain, token = parted(address)
    return plain, token or _tokens.get(plain, "")


# -- records as values -------------------------------------------------------------------------------------------------


def timestamp(quorum: QuorumRecord) -> Timestamp:
    """When a quorum was decided, on the decider's wall clock."""
    seconds, fraction = divmod(quorum.created, 1)
    return Timestamp(int(seconds), int(fraction * 1e9))
