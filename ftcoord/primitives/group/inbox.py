"""What lies before a group's thread, and whether it may be overtaken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

from ftcoord import concurrency
from ftcoord.etcd.api import Batch
from ftcoord.primitives.group.member_key import HeldAsk
from ftcoord.primitives.mirror import Mirror, Posted

Task: TypeAlias = "tuple[Mirror, Posted] | HeldAsk | Callable[[], None]"
"""What a watch delivered, what this member asks, or what else the thread is to do."""


class Inbox:
    """What a group's thread is to do, in the order in which it came. Any thread puts it there."""

    def __init__(self) -> None:
        self._tasks: concurrency.Queue[Task] = concurrency.inbox()
        self._queued = 0  # only the watch's thread
        """Changes that were put here."""
        self._applied = 0  # guarded by Group._turn
        """How many of them were applied, or are about to be under the same turn."""
        self._ended = False  # only ever becomes true, by the group's thread; read anywhere
        """Whether nobody takes anything out any more."""

    def put(self, task: Task) -> None:
        """Have the group's thread do this."""
        self._tasks.put(task)

    def put_posted(self, mirror: Mirror, posted: Posted) -> None:
        """What a watch delivered. Only the watch's thread; a Began on any, since a watch that others share stands at
        once. So that one must not touch the count."""
        if isinstance(posted.item, Batch):
            self._queued += 1
        self._tasks.put((mirror, posted))

    def put_ask(self, held: HeldAsk) -> None:
        """What this member asks; refused if the group's thread has ended."""
        self._tasks.put(held)
        if self._ended:  # meanwhile: the thread may not have seen it
            self._refuse_asks()

    def get(self, timeout: float | None) -> Task:
        """The next. Raises `concurrency.Empty` after `timeout` seconds. Only the group's thread."""
        return self._tasks.get(timeout=timeout)

    def is_applied(self, posted: Posted) -> None:
        """This came from here, and nothing that comes later can overtake it now. Under the turn."""
        self._applied += isinstance(posted.item, Batch)

    @property
    def has_changes(self) -> bool:
        """Whether changes wait to be applied. For the watch's thread, under the turn."""
        return self._applied < self._queued

    def end(self) -> None:
        """Nobody takes anything out any more: whoever asks, or has asked, hears that it did not work."""
        self._ended = True  # before it is emptied: who puts an ask here later sees it
        self._refuse_asks()

    def _refuse_asks(self) -> None:
        """Tell those whose asks were left here. Any thread, once that of the group has ended."""
        with contextlib.suppress(concurrency.Empty):
            while True:
                task = self._tasks.get(timeout=0)
                if isinstance(task, HeldAsk):
                    task.done(False)
