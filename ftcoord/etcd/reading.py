"""Reads of several spans as they were at one moment.

etcd answers a transaction of several reads at one revision, but its releases before 3.5.7 crash when the client of such
a transaction goes away before the answer (https://github.com/etcd-io/etcd/issues/14110 and /14891). So the first read
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
"""How often a snapshot is read before it is given up: etcd may forget its revision meanwhile."""
PAGE: Final = 1000
"""Keys of one request: some hundred kilobytes."""


class SnapshotReader:
    """Reads etcd as it is at the first read. For one thread. See `read_snapshot`."""

    def __init__(self, read: Callable[[Get], RangeResult]) -> None:
        self._read = read
        self.revision = 0
        """That of all reads; 0 before the first."""

    def range(self, get: Get) -> RangeResult:
        """What one read finds; its own `revision` does not matter. Raises EtcdError."""
        found = self._read(replace(get, revision=self.revision))
        self.revision = self.revision or found.revision
        return found

    def ranges(self, gets: Iterable[Get]) -> list[RangeResult]:
        """What each read finds, one request for each. Raises EtcdError."""
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
    """What `look` makes of etcd as it is at one revision. It is called again if etcd compacts that away meanwhile.

    Args:
        read: `Etcd.range`, or what repeats it until it is answered.
        look: reads, and changes nothing else.

    Raises EtcdError, and what the two raise.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            return look(SnapshotReader(read))
        except RequestRefused:
            if not left:
                raise
    raise AssertionError("no attempt was made")
