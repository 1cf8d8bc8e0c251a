"""A client whose watches lag behind its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftcoord.config import EtcdConfig
from ftcoord.errors import Compacted
from ftcoord.etcd.api import Span, Watch, WatchItem
from ftcoord.etcd.client import SharedClient

Deliver = Callable[[WatchItem], None]


class Late(SharedClient):
    """Hears of nothing between `hold()` and `release()`; its requests are answered at once."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self._turn = threading.Condition()
        self._held: list[tuple[Deliver, WatchItem]] | None = None
        self._hold_from: Callable[[WatchItem], bool] = lambda item: False

    def hold(self) -> None:
        with self._turn:
            self._held = []

    def hold_from(self, condition: Callable[[WatchItem], bool]) -> None:
        """Hear of nothing any more from the first item on for which this holds, that one included."""
        self._hold_from = condition

    def await_held(self, kind: Callable[[WatchItem], bool], count: int, timeout: float) -> bool:
        """Whether there are so many items of a kind that it has not heard of yet, in `timeout` seconds."""
        with self._turn:
            return self._turn.wait_for(lambda: sum(kind(item) for _, item in self._held or []) >= count, timeout)

    def release(self) -> None:
        with self._turn:
            held, self._held = self._held or [], None
            for deliver, item in held:
                deliver(item)

    def release_first(self, kind: Callable[[WatchItem], bool], count: int = 1) -> None:
        """It hears of so many items of this kind, and of all that came before the last of them; of the others later."""
        with self._turn:
            assert self._held is not None
            last = [index for index, (_, item) in enumerate(self._held, 1) if kind(item)][count - 1]
            heard, self._held = self._held[:last], self._held[last:]
            for deliver, item in heard:
                deliver(item)

    def release_the_last(self) -> None:
        """All that it did not hear of was compacted meanwhile: it hears of that, and will list its keys again."""
        with self._turn:
            held, self._held = self._held or [], None
            for deliver in {deliver: None for deliver, _ in held}:
                deliver(Compacted(1))

    def watch(self, span: Span, start_revision: int, deliver: Deliver, **how: bool) -> Watch:
        def late(item: WatchItem) -> None:
            with self._turn:
                if self._held is None and self._hold_from(item):
                    self._held, self._hold_from = [], lambda item: False
                if self._held is None:
                    deliver(item)
                else:
                    self._held.append((deliver, item))
                    self._turn.notify_all()

        return super().watch(span, start_revision, late, **how)
