"""Who decides: the oldest live member, and after it the one behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core.layout import Span, member_id, member_key, members_span
from ftcoord.etcd.api import Etcd, Get, KeyValue, RangeResult
from ftcoord.primitives.group.member_key import MemberKey, is_member
from ftcoord.primitives.mirror import Mirror, Posted

Judged: TypeAlias = Callable[[float | None], None]
"""Called when there is nothing to decide: with the time until which that is known to hold, None for an event."""

FOLLOW_UP: Final = 5.0
"""Seconds that a member which took over and decided goes on, unless another one decides meanwhile: more decisions
follow, and the decider has just shown that it does not make them. As long as the lease of a dead replica lives, by
default."""


class Succession:
    """Watches the member ahead of this one; without one ahead, this member is the decider. The group's turn guards it.

    A member that is not the decider may take over: it decides too until there is nothing to decide. If it did decide,
    it goes on for `FOLLOW_UP` seconds after its last decision, or until another member decides.

    Args:
        etcd: the etcd client.
        prefix: the group's.
        mine: this member's key, which it has by the time of `begin()`.
        post: takes what the watch delivers; see `Mirror`.
        deletes_only: whether the watch leaves out what the member ahead writes. A stranger's value in a dead member's
            key is then not noticed, so somebody who waits in vain must take over.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        mine: MemberKey,
        post: Callable[[Mirror, Posted], None],
        *,
        deletes_only: bool,
    ) -> None:
        self._etcd, self._prefix, self._mine, self._post = etcd, prefix, mine, post
        self._deletes_only = deletes_only
        self._ahead: Mirror | None = None
        self.is_first = False
        """Whether no older member lives, as far as is known here."""
        self._judged: Judged | None = None
        """Set while this member looks whether something is to be decided."""
        self._stays_until = 0.0
        """Until when it decides, because it did before an older member."""

    @property
    def decides(self) -> bool:
        """Whether this member decides now."""
        return self.is_first or self._judged is not None or concurrency.now() < self._stays_until

    def take_over(self, judged: Judged) -> None:
        """Decide too, though an older member lives, until there is nothing to decide: then call `judged`."""
        self._judged = judged

    def step_back(self) -> None:
        """Nobody waits for this member's look any longer: `judged` is not called. Idempotent."""
        self._judged = None

    def has_decided(self) -> None:
        """This member has made a decision, before all others."""
        self._stays_until = concurrency.now() + FOLLOW_UP

    def was_overtaken(self) -> None:
        """Another member has made one. That ends a look: whoever hears of it late also sees late what followed."""
        self._stays_until = 0.0
        judged, self._judged = self._judged, None
        if judged is not None:
            judged(None)

    def rest(self, until: float | None) -> float | None:
        """There is nothing to decide before `until`, None for an event; returns when to look again."""
        judged, self._judged = self._judged, None
        if judged is not None:
            judged(until)
        if self.is_first:
            return until
        stays_until = max(self._stays_until, concurrency.now())
        return stays_until if until is None else min(until, stays_until)

    def begin(self, tail: KeyValue | None, members: RangeResult) -> None:
        """Use what the transaction that joined read: the tail that it found, and how many members there were then,
        this one among them.

        The tail lies under its member's lease, so it is there as long as that lives, and was written when that joined.
        It is only a shorter way to an older member: to sort all members costs etcd more, the more there are. Where it
        does not lead to one, `look` finds who was there already: the last one that joined is gone, or an earlier
        attempt of this member wrote the tail, and its answer was lost.
        """
        assert self._mine.kv is not None
        if members.count == 1:
            self.is_first = True
        elif tail is not None and tail.mod_revision < self._mine.kv.create_revision and _names_a_member(tail):
            joined = tail.mod_revision
            last = KeyValue(member_key(self._prefix, member_id(tail.lease)), b"", joined, joined, 1, tail.lease)
            self._follow(last, members.revision)

    def look(self) -> None:
        """Make sure that the member ahead is watched, or that there is none. Raises EtcdError; then call it again."""
        if self.decides:  # the member ahead may be one of which no answer comes
            return
        if self._ahead is not None:
            if not self._ahead.synced:
                self._ahead.sync()
            if not self._ahead.synced or self._is_older(self._ahead.one):
                return
            self._ahead.close()
        found = self._next_older()
        if found.one is not None:
            self._follow(found.one, found.revision)
        else:
            self._ahead, self.is_first = None, True

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()

    def _next_older(self) -> RangeResult:
        assert self._mine.kv is not None
        before = self._mine.kv.create_revision
        while True:
            found = self._etcd.range(
                Get(members_span(self._prefix), 1, keys_only=True, order="newest", created_before=before)
            )
            if found.one is None or is_member(found.one):
                return found
            before = found.one.create_revision

    def _is_older(self, kv: KeyValue | None) -> bool:
        """A member whose key was deleted and put back is the newest now, and may follow this one: a circle."""
        assert self._mine.kv is not None
        return kv is not None and is_member(kv) and kv.create_revision < self._mine.kv.create_revision

    def _follow(self, predecessor: KeyValue, revision: int) -> None:
        self._ahead = Mirror(self._etcd, Span(predecessor.key), self._post, deletes_only=self._deletes_only)
        self._ahead.adopt(RangeResult((predecessor,), 1, revision))


def _names_a_member(tail: KeyValue) -> bool:
    """Whether a member of ftcoord's wrote it, and nobody else since."""
    return tail.lease != 0 and tail.value == member_id(tail.lease).encode()
