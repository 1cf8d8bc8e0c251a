"""The interface of a use of the mechanism: its keys, its records, and both halves of its protocol. docs/extending.md
walks through one."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from ftcoord.core.verdict import Outlook
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.policy import Desk, Policy

R = TypeVar("R")
A = TypeVar("A")


class Asking(Protocol):
    """A member that asks the decider itself. Its methods may be called from any thread."""

    @property
    def id(self) -> str:
        """The member's id."""

    @property
    def since(self) -> int:
        """etcd's revision at which its key was created."""

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        """A record was decided: its value in etcd, its revision, and the lease that it is attached to."""

    def gone(self) -> None:
        """Its key is gone (G5)."""


class Use(abc.ABC, Generic[R, A]):
    """One use, as one participant sees it: `R` is the decided record, `A` a member's ask. No I/O.

    `stamp` and `encode` are called by one thread at a time, the others by any.
    """

    @property
    @abc.abstractmethod
    def prefix(self) -> str:
        """The prefix of the group's keys."""

    @abc.abstractmethod
    def policy(self) -> Policy:
        """The decider's half, for a new member."""

    def desk(self) -> Desk:
        """Where a new member is asked when it decides, and learns who does."""
        return Desk()

    @abc.abstractmethod
    def parse(self, key: str, value: bytes) -> R:
        """Parse the decided record. Raises StateError."""

    def part_of(self, record: R, me: str) -> str | None:
        """The key beside the record that concerns the member `me`; None if everything about it is known. Called when
        its outlook says READ."""
        return None

    def with_part(self, record: R, me: str, part: KeyValue | None) -> R:
        """The record with that part; None if the part was deleted, because there is already another record. Raises
        StateError."""
        return record

    @abc.abstractmethod
    def stamp(self, ask: A) -> A:
        """The same ask, unlike all earlier asks of this participant."""

    @abc.abstractmethod
    def encode(self, ask: A) -> bytes:
        """The value of the member's key while it asks this."""

    def is_by_key(self, ask: A) -> bool:
        """Whether the member's key must have this ask: there is no other way to the decider now. Called right before it
        is written."""
        return True

    def resting(self, ask: A) -> A:
        """What the member's key has instead, while it asks this in another way."""
        return ask

    def call(self, ask: A, asking: Asking) -> bool:
        """Ask the decider itself, or again; False if the key must have this ask after all."""
        return False

    def nobody_asks(self) -> None:
        """Called when the last call has ended, for whatever reason: the last ask needs no answer any more. Must not
        block."""
        return

    def rank(self, record: R, me: Sequence[str]) -> int | None:
        """The place in a record of a participant that was these members; None without one, or if that is not known.
        Those with a place take a free office first, in this order."""
        return None

    @abc.abstractmethod
    def outlook(self, record: R | None, me: Sequence[str], ask: A) -> Outlook[A]:
        """The member's half: what the record means for a member with this ask.

        Args:
            me: the ids of all members that the participant has been, the present one last.
        """
