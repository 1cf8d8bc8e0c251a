"""A thread that keeps mirrors up to date, and reports every change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.errors import ClientClosed, EtcdError, StateError
from ftcoord.etcd.api import Etcd, Span
from ftcoord.log_once import LogOnce
from ftcoord.primitives.mirror import Mirror, Posted

log = logging.getLogger(__name__)

INFORMER_RETRY_PAUSE: Final = 0.5
"""Seconds until the mirrors are read again after that failed."""


class Informer(Closing):
    """Mirrors some spans from the moment it is made.

    Args:
        etcd: the etcd client.
        spans: what to mirror.
        report: called on the informer's thread with the spans' mirrors: once all are in sync, and then whenever one of
            them may have changed. If it raises EtcdError or StateError it is called again half a second later.
        name: of the thread.
        failed: called on the thread with the error that ends it: ClientClosed, or what nobody foresaw and is logged.
            Nothing is reported after that. Not called for a `close()`.
    """

    def __init__(
        self,
        etcd: Etcd,
        spans: Sequence[Span],
        report: Callable[..., None],
        name: str,
        failed: Callable[[BaseException], None],
    ) -> None:
        # The client's threads put into the inbox, and only the informer's thread takes out and touches the mirrors.
        self._inbox: concurrency.Queue[tuple[Mirror, Posted] | None] = concurrency.inbox()
        self._mirrors = [Mirror(etcd, span, lambda *item: self._inbox.put(item)) for span in spans]
        self._problem = LogOnce(log)  # only the thread
        self._report, self._failed = report, failed  # never change
        self._thread = concurrency.thread(self._run, name)
        self._thread.start()

    def close(self) -> None:
        """Report nothing more. Waits for a report under way, unless that is what closes it. Idempotent."""
        self._inbox.put(None)
        if self._thread is not concurrency.current_thread():
            concurrency.join(self._thread)

    def _run(self) -> None:
        try:
            self._run_until_closed()
        except ClientClosed as error:
            log.debug("%s ends: %s", self._thread.name, error)
            self._failed(error)
        finally:
            for mirror in self._mirrors:
                mirror.close()
            failure = sys.exc_info()[1]
            if failure is not None:
                log.exception("%s failed, and reports nothing more", self._thread.name)
                self._failed(failure)

    def _run_until_closed(self) -> None:
        timeout: float | None = 0.0
        while True:
            try:
                item = self._inbox.get(timeout=timeout)
                if item is None:
                    return
                item[0].apply(item[1])
            except concurrency.Empty:
                pass
            except ClientClosed:
                raise
            except EtcdError as error:
                timeout = self._pause_after(error)
                continue
            timeout = self._sync_and_report()

    def _sync_and_report(self) -> float | None:
        """Bring the mirrors up to date and report; seconds until that must be tried again, None if it need not."""
        try:
            for mirror in self._mirrors:
                if not mirror.synced:
                    mirror.sync()
            if all(mirror.synced for mirror in self._mirrors):
                self._report(*self._mirrors)
        except ClientClosed:
            raise
        except (EtcdError, StateError) as error:
            return self._pause_after(error)
        self._problem.forget()
        return None

    def _pause_after(self, error: Exception) -> float:
        self._problem.say(f"{self._thread.name} cannot go on for now: {error}")
        return INFORMER_RETRY_PAUSE
