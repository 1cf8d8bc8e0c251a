"""An `Etcd` in front of another: the tests' doubles change what they need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftcoord.etcd.api import Began, Etcd, Get, Op, RangeResult, Span, TxnResult, Watch, WatchItem


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda door, *args, **kwargs: getattr(door.real, name)(*args, **kwargs)


class Door:
    """An `Etcd` in front of another; the tests' doubles change what they need of it."""

    def __init__(self, real: Etcd) -> None:
        self.real, self.config = real, real.config

    range, txn, grant, renew, revoke, watch = map(_forwarded, ("range", "txn", "grant", "renew", "revoke", "watch"))


class Watching(Door):
    """An etcd that notes what is read and watched. Of `deaf_to` it delivers no changes."""

    def __init__(self, real: Etcd, deaf_to: str = "") -> None:
        super().__init__(real)
        self.spans: list[Span] = []
        self.reads = self.stands = 0
        self._deaf_to = deaf_to

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        self.reads += 1
        return super().range(get, timeout=timeout)

    def txn(self, compares: Any, success: Sequence[Op], *rest: Any, **kwargs: Any) -> TxnResult:
        self.reads += all(isinstance(op, Get) for op in success)
        return super().txn(compares, success, *rest, **kwargs)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        def heard(item: WatchItem) -> None:
            if isinstance(item, Began):
                deliver(item)
                self.stands += 1
            elif span.start != self._deaf_to:
                deliver(item)

        self.spans.append(span)
        return super().watch(span, start_revision, heard, deletes_only=deletes_only)
