"""The values of torchft's coordination API (`torchft.coordination`, torchft 0.2.0 and its nightly builds), and how
records become them.

https://docs.pytorch.org/torchft/coordination.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Final

from ftcoord.coordination import checks
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.recovery import recovery

# -- values ------------------------------------------------------------------------------------------------------------


class _Record:
    """Has declared attributes only: any other name raises AttributeError, as with torchft's native classes."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = [name.lstrip("_") for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ())]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Timestamp(_Record):
    """A time on the wall clock of the process that decided. For information only: no decision depends on it.

    Args:
        seconds: seconds since 1970.
        nanos: nanoseconds within that second.
    """

    __slots__ = ("nanos", "seconds")

    def __init__(self, seconds: int, nanos: int) -> None:
        self.seconds, self.nanos = seconds, nanos


class QuorumMember(_Record):
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

    __slots__ = ("address", "data", "replica_id", "shrink_only", "step", "store_address", "world_size")

    def __init__(
        self,
        replica_id: str,
        address: str,
        store_address: str,
        step: int,
        world_size: int,
        shrink_only: bool,
        data: dict[Any, Any] | None = None,
    ) -> None:
        self.replica_id, self.address, self.store_address = replica_id, address, store_address
        self.step, self.world_size, self.shrink_only, self.data = step, world_size, shrink_only, data


class Quorum(_Record):
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


class QuorumResult(_Record):
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

    __slots__ = (
        "heal",
        "max_replica_rank",
        "max_step",
        "max_world_size",
        "quorum_id",
        "reconfigure_handles",
        "recover_dst_replica_ranks",
        "recover_src_manager_address",
        "recover_src_replica_rank",
        "replica_ids",
        "replica_rank",
        "replica_world_size",
        "store_address",
    )

    def __init__(self) -> None:
        self.quorum_id = 0
        self.replica_rank, self.replica_world_size = 0, 1
        self.recover_src_manager_address = ""
        self.recover_src_replica_rank: int | None = None
        self.recover_dst_replica_ranks: list[int] = []
        self.store_address = ""
        self.max_step = 0
        self.max_replica_rank: int | None = None
        self.max_world_size = 1
        self.heal = False
        self.replica_ids: list[str] = []
        self.reconfigure_handles: list[str] = []


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
    result = QuorumResult()
    result.quorum_id = quorum.id
    result.replica_rank, result.replica_world_size = plan.replica_rank, plan.replica_world_size
    result.recover_src_manager_address = plan.recover_src_manager_address
    result.recover_src_replica_rank = plan.recover_src_replica_rank
    result.recover_dst_replica_ranks = list(plan.recover_dst_replica_ranks)
    result.store_address = plan.store_address
    result.max_step, result.max_world_size = plan.max_step, plan.max_world_size
    result.max_replica_rank, result.heal = plan.max_replica_rank, plan.heal
    result.replica_ids = list(plan.replica_ids)
    result.reconfigure_handles = list(plan.reconfigure_handles)
    return result


def result_fields(result: QuorumResult) -> dict[str, Any]:
    """The fields of a result, for JSON."""
    return {name: getattr(result, name) for name in QuorumResult.__slots__}


def result_of(fields: Mapping[str, Any]) -> QuorumResult:
    """The result with the fields that `result_fields` returned. Raises AttributeError for other names."""
    result = QuorumResult()
    for name, value in fields.items():
        setattr(result, name, value)
    return result


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
