"""A thread that keeps mirrors true, and tells of every change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.errors import EtcdError, StateError
from ftcoord.etcd.api import Etcd, Span
from ftcoord.primitives.mirror import Mirror, Posted

log = logging.getLogger(__name__)

RETRY: Final = 0.5
"""Seconds until a mirror that failed is tried again."""


class Informer:
    """Mirrors some spans from the moment it is made.

    Args:
        etcd: the door to etcd.
        spans: what to mirror.
        tell: called on the thread with the spans' mirrors, when all are in sync, and then whenever one of them may have
            changed. Where it raises EtcdError or StateError it is called again half a second later.
        name: of the thread.
        failed: called on the thread when that ends by an error that `tell` raised: nothing is told any more.
    """

    def __init__(
        self,
        etcd: Etcd,
        spans: Sequence[Span],
        tell: Callable[..., None],
        name: str,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._inbox: concurrency.Queue[tuple[Mirror, Posted] | None] = concurrency.inbox()
        self._mirrors = [Mirror(etcd, span, lambda *item: self._inbox.put(item)) for span in spans]
        self._tell, self._failed, self._said = tell, failed, ""
        self._thread = concurrency.thread(self._run, name)
        self._thread.start()

    def close(self) -> None:
        """Tell no more. Idempotent."""
        self._inbox.put(None)
        if self._thread is not concurrency.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:
            for mirror in self._mirrors:
                mirror.close()
            error = sys.exc_info()[1]
            if error is not None:
                log.exception("%s has failed", self._thread.name)
                self._failed(error)

    def _run_until_closed(self) -> None:
        timeout: float | None = 0.0
        while True:
            try:
                item = self._inbox.get(timeout=timeout)
                if item is None:
                    break
                item[0].apply(item[1])
            except concurrency.Empty:
                pass
            except EtcdError as error:
                self._say(error)
                timeout = RETRY
                continue
            timeout = self._settle()

    def _settle(self) -> float | None:
        """Bring the mirrors up to date and tell; seconds until that must be tried again."""
        try:
            for mirror in self._mirrors:
                if not mirror.synced:
                    mirror.sync()
            if all(mirror.synced for mirror in self._mirrors):
                self._tell(*self._mirrors)
        except (EtcdError, StateError) as error:
            self._say(error)
            return RETRY
        self._said = ""
        return None

    def _say(self, error: Exception) -> None:
        """Warn, but not of the same thing again and again."""
        if str(error) != self._said:
            self._said = str(error)
            log.warning("%s cannot go on for now: %s", self._thread.name, error)
