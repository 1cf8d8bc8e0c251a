"""All members of a group, as its decider sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from ftcoord import concurrency
from ftcoord.core.layout import Span
from ftcoord.etcd.api import Etcd, KeyValue, is_member
from ftcoord.primitives.mirror import Mirror, Posted

log = logging.getLogger(__name__)

DEPARTED: Final = 1000
"""How many members that are gone are remembered with their last values."""


class MembersView:
    """A mirror of `members/` while this member decides, and when it first saw each member's present value.

    These times are remembered while the mirror is closed, so that no timeout starts again. Only for the group's thread.
    """

    def __init__(self, etcd: Etcd, span: Span, post: Callable[[Mirror, Posted], None]) -> None:
        self._etcd, self._span, self._post = etcd, span, post
        self.mirror: Mirror | None = None
        self.changed_at = concurrency.now()
        """When a member last came, changed or went."""
        self.changes = 0
        """How often that happened."""
        self.read_at = concurrency.now()
        """When all members were last read. Values found by that read may be old."""
        self._kvs: dict[str, KeyValue] = {}
        """The values that were seen last,"""
        self._seen_at: dict[str, float] = {}
        """and when each was seen first."""
        self._members: dict[str, KeyValue] = {}
        """Those of them that are members. A change costs O(1): they come in the order in which they are kept."""
        self._is_in_order = True
        self._has_warned = False
        self.departed: dict[str, KeyValue] = {}
        """The last values, by key, of members that were seen alive and are gone."""

    @property
    def synced(self) -> bool:
        return self.mirror is not None and self.mirror.synced

    @property
    def revision(self) -> int:
        """The revision of etcd up to which it has seen everything."""
        return self.mirror.revision if self.mirror is not None else 0

    def open(self) -> None:
        """Start to watch. Idempotent."""
        if self.mirror is None:
            self.mirror = Mirror(self._etcd, self._span, self._post)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    def forget(self) -> None:
        """Have the next `sync()` read all members: they may have been seen before what was read meanwhile."""
        if self.mirror is not None:
            self.mirror.forget()

    def doubt(self) -> None:
        """Have the next `sync()` check whether etcd's history has this copy: etcd may have been restored from a backup.

        If it has, the present watch goes on, so no member's last word is missed. If not, all members are watched and
        read anew.
        """
        if self.mirror is not None:
            self.mirror.doubt()

    def sync(self) -> None:
        """Make one step towards a true copy. Raises EtcdError, and may then be called again."""
        assert self.mirror is not None
        if not self.mirror.synced:
            self.mirror.sync()
            if self.mirror.synced:
                self.read_at = concurrency.now()
                self._note({*self.mirror.kvs, *self._kvs}, self.read_at)
                self._warn_of_strangers(len(self.mirror.kvs) - len(self._members))

    def _warn_of_strangers(self, count: int) -> None:
        if count and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d keys below %r are ignored: they are no members, which have the names of their leases; find out who"
                " writes them",
                count,
                self._span.start,
            )

    def apply(self, posted: Posted) -> None:
        """Bring the copy up to date."""
        assert self.mirror is not None
        changes = self.mirror.apply(posted)
        for change in changes:
            if change.now is None and change.was is not None:  # which may have been written in the same moment
                self._note_departure(change.was)
        if self.mirror.synced:
            self._note((change.key for change in changes), concurrency.now())

    def in_order(self) -> tuple[KeyValue, ...]:
        """The members' keys, oldest first."""
        if not self._is_in_order:
            self._members = dict(sorted(self._members.items(), key=lambda item: item[1].create_revision))
            self._is_in_order = True
        return tuple(self._members.values())

    def get(self, key: str) -> KeyValue | None:
        """The member with this key, if there is one."""
        return self._members.get(key)

    def seen(self) -> dict[str, float]:
        """For each key, when its present value was first seen."""
        return self._seen_at.copy()

    def _note(self, keys: Iterable[str], now: float) -> None:
        assert self.mirror is not None
        for key in keys:
            kv, before = self.mirror.kvs.get(key), self._kvs.get(key)
            if kv is None:
                if before is not None and key not in self.departed:
                    self._note_departure(before)
                self._kvs.pop(key, None)
                self._seen_at.pop(key, None)
            elif before != kv:
                self._kvs[key], self._seen_at[key] = kv, now
            else:
                continue
            self._list(key, kv)
            self.changed_at = now
            self.changes += 1

    def note_departed(self, last: KeyValue) -> None:
        """Note the last value of a member that is gone, from another source than this mirror."""
        self._note_departure(last)

    def _note_departure(self, last: KeyValue) -> None:
        self.departed[last.key] = last
        if len(self.departed) > DEPARTED:
            del self.departed[next(iter(self.departed))]

    def _list(self, key: str, kv: KeyValue | None) -> None:
        """Note the new state of a key among the members."""
        before = self._members.get(key)
        if before is not None and (kv is None or kv.create_revision != before.create_revision):
            del self._members[key]
        if kv is None or not is_member(kv):
            self._members.pop(key, None)
            return
        if key not in self._members and self._members:
            newest = next(reversed(self._members.values()))
            self._is_in_order &= newest.create_revision < kv.create_revision
        self._members[key] = kv
