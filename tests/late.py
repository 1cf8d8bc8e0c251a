"""A client whose watches lag behind its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftcoord.config import EtcdConfig
from ftcoord.errors import Compacted
from ftcoord.etcd.api import Began, Span, Watch, WatchItem
from ftcoord.etcd.client import SharedClient

Deliver = Callable[[WatchItem], None]


class Late(SharedClient):
    """Hears of nothing between `hold()` and `release()`; its requests are answered at once."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self._turn = threading.RLock()
        self._held: list[tuple[Deliver, WatchItem]] | None = None

    def hold(self) -> None:
        with self._turn:
            self._held = []

    def release(self) -> None:
        with self._turn:
            held, self._held = self._held or [], None
            for deliver, item in held:
                deliver(item)

    def release_the_last(self) -> None:
        """All that it did not hear of was compacted meanwhile: it hears of that, and will list its keys again."""
        with self._turn:
            held, self._held = self._held or [], None
            for deliver in {deliver: None for deliver, _ in held}:
                deliver(Compacted(1))

    def watch(self, span: Span, start_revision: int, deliver: Deliver, **how: bool) -> Watch:
        begins = [True]

        def late(item: WatchItem) -> None:
            with self._turn:
                is_first, begins[:] = bool(begins), []
                if self._held is None or (is_first and isinstance(item, Began)):  # else nobody could join now
                    deliver(item)
                else:
                    self._held.append((deliver, item))

        return super().watch(span, start_revision, late, **how)
