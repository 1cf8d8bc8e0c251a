"""When a call that waits wakes up."""

from __future__ import annotations

from virtual import Scheduler

from ftcoord import concurrency
from ftcoord.core.outlook import Standing
from ftcoord.primitives.group.pace import SIGNAL_LATENCY, UntilDeadline


def test_only_the_main_thread_wakes_up_for_signals() -> None:
    """Python runs their handlers on no other: a thousand nodes that wait on threads of their own sleep on."""

    def scenario() -> None:
        pace: UntilDeadline[object, object] = UntilDeadline(60.0, "a record")
        woken: list[float] = []
        other = concurrency.thread(lambda: woken.append(pace.wake_at(Standing.PENDING)), "other")
        other.start()
        other.join()
        assert woken == [pace.deadline]
        assert pace.wake_at(Standing.PENDING) <= concurrency.now() + SIGNAL_LATENCY

    Scheduler(0).run(scenario)
