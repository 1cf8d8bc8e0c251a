"""What a plain decision rests on: the members, what they ask, and what was decided last."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Asking(Generic[A]):
    """A live member: its id, and what it asks."""

    member: str
    ask: A


@dataclass(frozen=True, slots=True)
class Situation(Generic[R, A]):
    """All that `decide` sees.

    Args:
        members: the live members, oldest first.
        previous: the last decided record.
        vanished: `previous` is known, but its key is gone from etcd.
        highest: the highest number that the decider ever heard of, also in records that etcd has lost since.
        unreadable: the ids of the live members that say what cannot be read; they are not among `members`.
    """

    members: Sequence[Asking[A]]
    previous: R | None = None
    vanished: bool = False
    highest: int = 0
    unreadable: Set[str] = frozenset()
