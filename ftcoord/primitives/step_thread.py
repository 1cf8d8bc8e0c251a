"""A thread that takes one step after another through outages of etcd, and reports to its owner when it fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.errors import ClientClosed, EtcdError, StateError
from ftcoord.log_once import LogOnce

log = logging.getLogger(__name__)

STEP_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed step is repeated."""


class StepThread(Closing):
    """Takes steps from `start()` to `close()`.

    Args:
        step: called on the thread again and again; it waits for events itself. After an EtcdError or a StateError,
            which is logged once, it is called again half a second later.
        name: the thread's name.
        wake: makes a waiting step, or else the next one, return. Called by `close()`, from any thread.
        end: called on the thread when it ends, for whatever reason.
        failed: called on the thread with the error that ended it: ClientClosed, or an unexpected error, which is
            logged. Not called after a `close()` that came first.
    """

    def __init__(
        self,
        step: Callable[[], None],
        name: str,
        wake: Callable[[], None],
        end: Callable[[], None],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._step, self._wake, self._end, self._failed = step, wake, end, failed  # never change
        self._closed = concurrency.event()
        self._problem = LogOnce(log)  # only the thread
        self._thread = concurrency.thread(self._run, name)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called: a step in progress must not report anything any more."""
        return self._closed.is_set()

    def start(self) -> None:
        """Start the thread; call it once. Raises ThreadNotStarted."""
        self._thread.start()

    def close(self) -> None:
        """Take no further step. Waits for one in progress, unless that calls this. Idempotent."""
        self._closed.set()
        self._wake()
        if self._thread.ident is not None and self._thread is not concurrency.current_thread():
            concurrency.join(self._thread)

    def _run(self) -> None:
        try:
            while not self.closed:
                self._try_step()
        except ClientClosed as error:
            log.debug("%s ends: %s", self._thread.name, error)
            if not self.closed:
                self._failed(error)
        finally:
            self._end()
            failure = sys.exc_info()[1]
            if failure is not None:
                if not self.closed:  # before the line: whoever has read that asks the owner
                    self._failed(failure)
                log.exception("%s failed, and does nothing more", self._thread.name)

    def _try_step(self) -> None:
        try:
            self._step()
        except ClientClosed:
            raise
        except (EtcdError, StateError) as error:
            self._problem.say(f"{self._thread.name} cannot go on for now: {error}")
            self._closed.wait(STEP_RETRY_PAUSE)
        else:
            self._problem.forget()
