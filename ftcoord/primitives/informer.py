"""A thread that keeps mirrors up to date, and reports every change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.etcd.api import Etcd, Span
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.step_thread import StepThread

BATCHES_PER_REPORT: Final = 1000
"""The most batches of changes that one report covers: they may come faster than they can be applied."""


class Informer(Closing):
    """Mirrors several spans from its creation on.

    Args:
        etcd: the etcd client.
        spans: the spans to mirror.
        report: called on the informer's thread with the spans' mirrors: once all are in sync, and then whenever one of
            them may have changed. If it raises EtcdError or StateError, it is called again half a second later.
        name: the thread's name.
        failed: called on the thread with the error that ends it: ClientClosed, or an unexpected error, which is logged.
            Nothing is reported after that. Not called for a `close()`.
        gathers: whether to report once for all that has come by then, BATCHES_PER_REPORT at most, as where a report
            costs more than a change does; else each change is reported by itself, as far as etcd tells of them one by
            one.
    """

    def __init__(
        self,
        etcd: Etcd,
        spans: Sequence[Span],
        report: Callable[..., None],
        name: str,
        failed: Callable[[BaseException], None],
        *,
        gathers: bool = False,
    ) -> None:
        # The client's threads put into the inbox, and any thread puts None there to wake the informer's. Only that one
        # takes out and touches the mirrors.
        self._inbox: concurrency.Queue[tuple[Mirror, Posted] | None] = concurrency.inbox()
        self._mirrors = [Mirror(etcd, span, lambda *item: self._inbox.put(item)) for span in spans]
        self._report, self._at_once = report, BATCHES_PER_REPORT if gathers else 1  # never change
        self._due = True  # whether there is something to report; only the thread
        self._thread = StepThread(self._step, name, self.report_again, self._end, failed)
        self._thread.start()

    def report_again(self) -> None:
        """Report once more, though no key may have changed. From any thread; does not block."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop reporting. Waits for a running report, unless that calls this. Idempotent."""
        self._thread.close()

    def _step(self) -> None:
        if not self._due:
            self._take_in()
        if self._thread.closed:
            return
        for mirror in self._mirrors:
            if not mirror.synced:
                mirror.sync()
        if all(mirror.synced for mirror in self._mirrors):
            self._report(*self._mirrors)
        self._due = False

    def _take_in(self) -> None:
        """Wait for the next item or wake, and apply it and the items that are there already."""
        for _ in range(self._at_once):
            posted = self._inbox.get()
            self._due = True  # also if what follows fails
            if posted is not None:
                mirror, item = posted
                mirror.apply(item)
            if self._inbox.empty():  # nobody else takes out of it
                return

    def _end(self) -> None:
        for mirror in self._mirrors:
            mirror.close()
