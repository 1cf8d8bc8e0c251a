"""Who decides: the oldest live member, and after it the next one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core.layout import Span, member_id, member_key, members_span
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Etcd, Get, KeyValue, RangeResult, is_member
from ftcoord.primitives.group.member_key import MemberKey
from ftcoord.primitives.mirror import Mirror, Posted

Judged: TypeAlias = Callable[[float | None], None]
"""Called when there is nothing to decide, with the time until which that is certain; None for the next event."""

READ_INTERVAL: Final = 60.0
"""About how many seconds pass between two reads of the key of the member ahead."""
FIRST_READ_AFTER: Final = 5.0
"""About how many seconds after joining a member first reads that key. The tail may name a member whose key somebody has
deleted before, and no watch reports that."""
READS_MORE: Final = 16
"""How many times as many keys a member reads that has found no older member, but keys."""
FOLLOW_UP: Final = 5.0
"""Seconds that a member that took over keeps deciding after its last decision, unless another member decides: more
decisions follow, and the decider has just shown that it does not make them. As long as the lease of a dead replica
lives, by default."""


class Succession:
    """Watches the member ahead of this one; without one, this member is the decider. Only for the group's
    thread, once that runs.

    A member that is not the decider may take over: it also decides, until there is nothing to decide. If it made a
    decision, it continues for `FOLLOW_UP` seconds after its last one, or until another member decides.

    The watch leaves out puts by the member ahead. So it does not notice a stranger who writes into that key, which then
    outlives its member. A member that waits in vain takes over; the others read the key from time to time.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        mine: this member's key, which exists when `begin()` is called.
        post: takes what the watch delivers; see `Mirror`.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        mine: MemberKey,
        post: Callable[[Mirror, Posted], None],
    ) -> None:
        self._etcd, self._prefix, self._mine, self._post = etcd, prefix, mine, post
        self._ahead: Mirror | None = None
        self._reads_at = 0.0
        """When to read the key of the member ahead again."""
        self.is_first = False
        """Whether no older member is alive, as far as is known here."""
        self.before: KeyValue | None = None
        """The last value of the previous decider, after this one has succeeded it; None if that is not known."""
        self._judged: Judged | None = None
        """Set while this member checks whether a decision is due."""
        self._stays_until = 0.0
        """Until when it decides, because it has decided before an older member."""

    @property
    def decides(self) -> bool:
        """Whether this member decides now."""
        return self.is_first or self._judged is not None or concurrency.now() < self._stays_until

    def take_over(self, judged: Judged) -> None:
        """Decide too, although an older member is alive, until there is nothing to decide; then call `judged`."""
        self._judged = judged

    def step_back(self) -> None:
        """Nobody waits for this member's look any more: `judged` is not called. Idempotent."""
        self._judged = None

    def has_decided(self) -> None:
        """This member has made a decision, before all others."""
        self._stays_until = concurrency.now() + FOLLOW_UP

    def was_overtaken(self) -> None:
        """Another member has decided. That ends a look: a member that learns of it late also sees late what
        followed."""
        self._stays_until = 0.0
        judged, self._judged = self._judged, None
        if judged is not None:
            judged(None)

    def rest(self, until: float | None) -> float | None:
        """There is nothing to decide before `until`, None for the next event; returns when to check again."""
        judged, self._judged = self._judged, None
        if judged is not None:
            judged(until)
        if self.is_first:
            return until
        stays_until = max(self._stays_until, concurrency.now())
        return stays_until if until is None else min(until, stays_until)

    def begin(self, found: RangeResult) -> None:
        """Use the tail that the joining transaction found.

        The tail is attached to its member's lease, so it exists as long as that lease, and was written when that member
        joined. It is only a shortcut to an older member: sorting all members costs etcd more, the more there are. If it
        leads to none, `look` finds the older members: there may be none, or the last one that joined is gone, or an
        earlier attempt of this member wrote the tail, and its answer was lost.
        """
        assert self._mine.kv is not None
        tail = found.one
        if tail is not None and tail.mod_revision < self._mine.kv.create_revision and _names_a_member(tail):
            joined = tail.mod_revision
            last = KeyValue(member_key(self._prefix, member_id(tail.lease)), b"", joined, joined, 1, tail.lease)
            self._follow(last, found.revision, FIRST_READ_AFTER)

    def look(self) -> None:
        """Make sure that the member ahead is watched, or that there is none. Raises EtcdError; then call it again."""
        if self.decides:  # the member ahead may be one of which no answer comes
            return
        if self._ahead is not None:
            if concurrency.now() >= self._reads_at:
                self._ahead.forget()
                self._read_after(READ_INTERVAL)
            if not self._ahead.synced:
                self._ahead.sync()
            if not self._ahead.synced or self._is_older(self._ahead.one):
                return
            self._ahead.close()
        older, revision = self._next_older()
        if older is not None:
            self._follow(older, revision, READ_INTERVAL)
        else:
            self.before = self._last_word_of(self._ahead) if self._ahead is not None else None
            self._ahead, self.is_first = None, True

    def looks_at(self) -> float | None:
        """When a member that does not decide must `look` again without an event; None if it decides."""
        return None if self.decides else self._reads_at

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()

    def _last_word_of(self, gone: Mirror) -> KeyValue | None:
        """The last value of a decider that is gone: perhaps only that decider has read it. Raises EtcdError."""
        try:
            return self._etcd.range(Get(gone.span, revision=gone.revision - 1)).one
        except RequestRefused:  # etcd has forgotten it
            return None

    def _next_older(self) -> tuple[KeyValue | None, int]:
        """The member that joined last before this one, and etcd's revision. Others may have written keys there that are
        no members: each read is larger, for each makes etcd sort all of them."""
        assert self._mine.kv is not None
        span, before, limit = members_span(self._prefix), self._mine.kv.create_revision, 1
        while True:
            found = self._etcd.range(Get(span, limit, keys_only=True, order="newest", created_before=before))
            older = next(filter(is_member, found.kvs), None)
            if older is not None or len(found.kvs) < limit:
                return older, found.revision
            limit *= READS_MORE

    def _is_older(self, kv: KeyValue | None) -> bool:
        """A member whose key was deleted and put back is now the newest, and may follow this one: a circle."""
        assert self._mine.kv is not None
        return kv is not None and is_member(kv) and kv.create_revision < self._mine.kv.create_revision

    def _follow(self, predecessor: KeyValue, revision: int, read_after: float) -> None:
        self._ahead = Mirror(self._etcd, Span(predecessor.key), self._post, deletes_only=True)
        self._read_after(read_after)
        self._ahead.adopt(RangeResult((predecessor,), 1, revision))

    def _read_after(self, seconds: float) -> None:
        """At random times: the members of a round join at the same moment."""
        self._reads_at = concurrency.now() + seconds * random.uniform(0.5, 1.5)


def _names_a_member(tail: KeyValue) -> bool:
    """Whether a member of ftcoord wrote it, and nobody else since."""
    return tail.lease != 0 and tail.value == member_id(tail.lease).encode()
