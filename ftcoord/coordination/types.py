"""The values of torchft's coordination API (`torchft.coordination`, torchft 0.2.0 and its nightly builds), and how
records become them.

https://docs.pytorch.org/torchft/coordination.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from ftcoord.coordination import checks
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.recovery import recovery

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
    """The replicas that train together.

    Args:
        quorum_id: grows whenever the members change, or one of them failed to commit. An id is never used again.
        participants: the members, sorted by the bytes of their replica ids.
        created: when the quorum was decided.
    """

    __slots__ = ("_participants", "created", "quorum_id")

    def __init__(
        self,
        quorum_id: int,
        participants: Sequence[QuorumMember] | Callable[[], Sequence[QuorumMember]],
        created: Timestamp,
    ) -> None:
        self.quorum_id, self.created = quorum_id, created
        self._participants = participants

    @property
    def participants(self) -> list[QuorumMember]:
        """Copies of the members, made at each read. A caller may change them."""
        if callable(self._participants):
            self._participants = self._participants()
        return [copy(member) for member in self._participants]

    @participants.setter
    def participants(self, participants: Sequence[QuorumMember]) -> None:
        self._participants = participants

    def __repr__(self) -> str:
        return f"Quorum(quorum_id={self.quorum_id}, participants={self.participants}, created={self.created})"


@dataclass(slots=True, eq=False)
class QuorumResult:
    """What a quorum means for one rank: its place, and which replicas heal from which.

    Args:
        quorum_id: see `Quorum`.
        replica_rank, replica_world_size: this replica's rank among all members, and their number.
        recover_src_manager_address, recover_src_replica_rank: the replica to fetch the weights from, if `heal`.
        recover_dst_replica_ranks: the replicas that fetch the weights from this one.
        store_address: the store where the ranks of all replicas meet; the same for all with this group rank.
        max_step: the highest step of any member.
        max_replica_rank, max_world_size: this replica's rank among the members at that step (None if it is at an
            earlier one), and their number.
        heal: whether this replica must fetch the weights first.
        replica_ids: the ids of all members, in rank order.
        reconfigure_handles: the handle that this rank of each member sent, in rank order (torchft's nightly builds).
    """

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)
    store_address: str = ""
    max_step: int = 0
    max_replica_rank: int | None = None
    max_world_size: int = 1
    heal: bool = False
    replica_ids: list[str] = field(default_factory=list)
    reconfigure_handles: list[str] = field(default_factory=list)


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


def quorum_reply(quorum: QuorumRecord) -> Quorum:
    """A quorum as a value of torchft's API."""
    return Quorum(quorum.id, partial(_members, quorum), timestamp(quorum))


def timestamp(quorum: QuorumRecord) -> Timestamp:
    """When a quorum was decided, on the decider's wall clock."""
    seconds, fraction = divmod(quorum.created, 1)
    return Timestamp(int(seconds), int(fraction * 1e9))


def _members(quorum: QuorumRecord) -> list[QuorumMember]:
    return [_member(request) for request in quorum.requests]


def _member(request: QuorumRequest) -> QuorumMember:
    return QuorumMember(
        request.replica_id,
        without_token(request.address),
        request.store_address,
        request.step,
        request.world_size,
        request.shrink_only,
        json.loads(request.data) if request.data else None,
    )


def quorum_result(quorum: QuorumRecord, replica_id: str, rank: int, init_sync: bool) -> QuorumResult:
    """What a quorum means for one rank of a replica. Raises NotInQuorum."""
    plan = recovery(quorum.requests, replica_id, rank, init_sync)
    fields: dict[str, Any] = {name: getattr(plan, name) for name in QuorumResult.__slots__ if name != "quorum_id"}
    fields |= {name: [*value] for name, value in fields.items() if isinstance(value, tuple)}
    return QuorumResult(quorum.id, **fields)


def result_fields(result: QuorumResult) -> dict[str, Any]:
    """The fields of a result, for JSON. `QuorumResult(**fields)` is the result again."""
    return {name: getattr(result, name) for name in QuorumResult.__slots__}


def json_text(data: Mapping[Any, Any] | None) -> str:
    """The `data` of a request as JSON. Raises TypeError if it is not a dict, RuntimeError if JSON cannot represent
    it."""
    if data is None:
        return ""
    if not isinstance(data, dict):
        raise TypeError(f"argument 'data': {type(data).__name__!r} object cannot be converted to 'PyDict'")
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise checks.failed("Internal", f"{type(error).__name__}: {error}") from None
