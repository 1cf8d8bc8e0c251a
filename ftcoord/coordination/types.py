"""The values of torchft's coordination API (`torchft.coordination`, torchft 0.2.0 and its nightly builds).

https://docs.pytorch.org/torchft/coordination.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any


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
