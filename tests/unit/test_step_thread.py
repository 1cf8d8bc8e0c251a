"""Who is told that a thread of steps failed, in virtual time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from virtual import Scheduler

from ftcoord import concurrency
from ftcoord.concurrency import StepThread
from ftcoord.errors import ClientClosed


@pytest.mark.parametrize("error", [MemoryError("made by the test"), ClientClosed("closed")])
@pytest.mark.parametrize("is_closed", [False, True])
def test_an_owner_that_has_closed_it_is_not_told_that_it_failed(error: BaseException, is_closed: bool) -> None:
    """Though the step under way fails while the owner waits for it."""
    told: list[BaseException] = []
    ended: list[bool] = []

    def play() -> None:
        fails = concurrency.event()

        def step() -> None:
            fails.wait()
            raise error

        thread = StepThread(step, "steps", fails.set, lambda: ended.append(True), told.append)
        thread.start()
        concurrency.sleep(1)
        if not is_closed:
            fails.set()
            concurrency.sleep(1)
        thread.close()

    with nullcontext() if isinstance(error, ClientClosed) else pytest.raises(MemoryError):  # which is logged, too
        Scheduler(0).run(play)
    assert told == ([] if is_closed else [error])
    assert ended == [True]
