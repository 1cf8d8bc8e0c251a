"""What a plain decision depends on: the members, their asks, and the last decision."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Asking(Generic[A]):
    """A live member: its id and its ask."""

    member: str
    ask: A


@dataclass(frozen=True, slots=True)
class Situation(Generic[R, A]):
    """Everything that `decide` sees.

    Args:
        members: the live members, oldest first.
        previous: the last decided record.
        vanished: `previous` is known, but its key is gone from etcd.
        highest: the highest number that the decider has ever seen, including records that etcd has lost since.
        unreadable: the ids of the live members whose records cannot be read; they are not among `members`.
    """

    members: Sequence[Asking[A]]
    previous: R | None = None
    vanished: bool = False
    highest: int = 0
    unreadable: Set[str] = frozenset()
