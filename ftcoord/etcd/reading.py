"""Reads several spans at one revision.

etcd answers a transaction of several reads at one revision. But versions before 3.5.7 crash when the client of such a
transaction goes away before the answer (https://github.com/etcd-io/etcd/issues/14110 and /14891). So the first read
here fixes the revision, and the others name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

from ftcoord.core.layout import Span, decode_key
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Get, KeyValue, RangeResult

T = TypeVar("T")

ATTEMPTS: Final = 3
"""How often a snapshot is read before giving up: etcd may compact its revision meanwhile."""
PAGE: Final = 1000
"""Keys per request: a few hundred kilobytes."""


class SnapshotReader:
    """Reads etcd at the revision of the first read. Not thread-safe. See `read_snapshot`."""

    def __init__(self, read: Callable[[Get], RangeResult]) -> None:
        self._read = read
        self.revision = 0
        """The revision of all reads; 0 before the first."""

    def range(self, get: Get) -> RangeResult:
        """The result of one read; the Get's own `revision` is ignored. Raises EtcdError."""
        found = self._read(replace(get, revision=self.revision))
        self.revision = self.revision or found.revision
        return found

    def ranges(self, gets: Iterable[Get]) -> list[RangeResult]:
        """The result of each read, with one request for each. Raises EtcdError."""
        return [self.range(get) for get in gets]

    def pages(self, span: Span) -> list[KeyValue]:
        """All keys of a span, one request for each thousand. Raises EtcdError."""
        kvs = list[KeyValue]()
        rest = span
        while True:
            found = self.range(Get(rest, limit=PAGE))
            kvs += found.kvs
            if found.count <= len(found.kvs):
                return kvs
            rest = Span(f"{kvs[-1].key}\0", stop=decode_key(span.end))


def read_snapshot(read: Callable[[Get], RangeResult], look: Callable[[SnapshotReader], T]) -> T:
    """What `look` returns for etcd at one revision. It is called again if etcd compacts that revision meanwhile.

    Args:
        read: `Etcd.range`, or a function that repeats it until it is answered.
        look: reads, and changes nothing.

    Raises EtcdError, and what `read` and `look` raise.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            return look(SnapshotReader(read))
        except RequestRefused:
            if not left:
                raise
    raise AssertionError("no attempt was made")
