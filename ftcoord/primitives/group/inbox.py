"""The tasks of a group's thread, and whether others may overtake them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

from ftcoord import concurrency
from ftcoord.etcd.api import Batch
from ftcoord.primitives.group.member_key import HeldAsk
from ftcoord.primitives.mirror import Mirror, Posted

Task: TypeAlias = "tuple[Mirror, Posted] | HeldAsk | Callable[[], None]"
"""Something that a watch delivered, an ask of this member, or another function to call."""


class Inbox:
    """The tasks of a group's thread, in the order in which they came. Any thread adds them."""

    def __init__(self) -> None:
        self._tasks: concurrency.Queue[Task] = concurrency.inbox()
        self._queued = 0  # only the watch's thread
        """How many changes were added here."""
        self._applied = 0  # guarded by Group._turn
        """How many of them were applied, or are about to be under the same turn."""
        self._ended = False  # only ever becomes true, by the group's thread; read anywhere
        """Whether nobody takes tasks any more."""

    def put(self, task: Task) -> None:
        """Have the group's thread do this task."""
        self._tasks.put(task)

    def put_posted(self, mirror: Mirror, posted: Posted) -> None:
        """Add something that a watch delivered. Only the watch's thread calls it; but any thread adds a Began, since a
        shared watch is established at once. So a Began must not touch the count."""
        if isinstance(posted.item, Batch):
            self._queued += 1
        self._tasks.put((mirror, posted))

    def put_ask(self, held: HeldAsk) -> None:
        """Add an ask of this member; it is refused if the group's thread has ended."""
        self._tasks.put(held)
        if self._ended:  # meanwhile: the thread may not have seen it
            self._refuse_asks()

    def get(self, timeout: float | None) -> Task:
        """The next task. Raises `concurrency.Empty` after `timeout` seconds. Only for the group's thread."""
        return self._tasks.get(timeout=timeout)

    def is_applied(self, posted: Posted) -> None:
        """This was taken from here, and nothing later can overtake it now. Under the turn."""
        self._applied += isinstance(posted.item, Batch)

    @property
    def has_changes(self) -> bool:
        """Whether changes wait to be applied. For the watch's thread, under the turn."""
        return self._applied < self._queued

    def end(self) -> None:
        """Nobody takes tasks any more: pending and later asks are refused."""
        self._ended = True  # before it is emptied: who puts an ask here later sees it
        self._refuse_asks()

    def _refuse_asks(self) -> None:
        """Refuse the asks that were left here. For any thread, after the group's has ended."""
        with contextlib.suppress(concurrency.Empty):
            while True:
                task = self._tasks.get(timeout=0)
                if isinstance(task, HeldAsk):
                    task.done(False)
