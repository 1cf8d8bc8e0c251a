"""Who decides: the oldest live member, and after it the one behind."""

from __future__ import annotations

from collections.abc import Callable

from ftcoord.core.layout import Span
from ftcoord.etcd.api import Etcd, Get, KeyValue, RangeResult
from ftcoord.primitives.group.member_key import MemberKey, is_member
from ftcoord.primitives.mirror import Mirror, Posted


class Succession:
    """Watches the member ahead of this one; without one ahead, this member is the decider. The group's turn guards it.

    Args:
        etcd: the etcd client.
        members: the span of all members' keys.
        mine: this member's key, which it has by the time of `begin()`.
        post: takes what the watch delivers; see `Mirror`.
        deletes_only: whether the watch leaves out what the member ahead writes. A stranger's value in a dead member's
            key is then not noticed, so somebody who waits in vain must take over.
    """

    def __init__(
        self,
        etcd: Etcd,
        members: Span,
        mine: MemberKey,
        post: Callable[[Mirror, Posted], None],
        *,
        deletes_only: bool,
    ) -> None:
        self._etcd, self._members, self._mine, self._post = etcd, members, mine, post
        self._deletes_only = deletes_only
        self._ahead: Mirror | None = None
        self.is_first = False
        """Whether no older member lives, as far as is known here."""

    def begin(self, newest: RangeResult) -> None:
        """Use what the transaction that joined read: the two newest members, this one among them."""
        assert self._mine.kv is not None
        others = [kv for kv in newest.kvs if kv.key != self._mine.key]
        if not others:
            self.is_first = True
        elif others[0].create_revision > self._mine.kv.create_revision:
            pass  # it came before this member's write was known: `look` finds who was there already
        elif is_member(others[0]):
            self._follow(others[0], newest.revision)

    def look(self) -> None:
        """Make sure that the member ahead is watched, or that there is none. Raises EtcdError; then call it again."""
        if self.is_first:
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
            found = self._etcd.range(Get(self._members, 1, keys_only=True, order="newest", created_before=before))
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
