"""Which call looks, of several that wait in one process."""

from __future__ import annotations

import math

from virtual import Scheduler

from ftcoord import concurrency
from ftcoord.core.verdict import Standing
from ftcoord.primitives.group.pace import SIGNAL_LATENCY, Takeover, TakeoverToken, UntilDeadline
from ftcoord.primitives.group.succession import Judged


class Takes:
    """A participant that looks for whoever asked last, until it steps back."""

    def __init__(self) -> None:
        self.judged: Judged | None = None

    def take_over(self, judged: Judged) -> None:
        self.judged = judged

    def step_back(self) -> None:
        self.judged = None

    def nudge(self) -> None:
        pass


def test_a_call_that_ends_leaves_the_look_of_another_one_alone() -> None:
    """Two calls of one participant wait; one of them looks, and the other one gives up."""

    def scenario() -> None:
        participant, token, record = Takes(), TakeoverToken(), object()
        looks, gives_up = Takeover(participant, token), Takeover(participant, token)
        for call in (looks, gives_up):
            call.see(record, 2, waits=True)
        concurrency.sleep(looks.at() - concurrency.now())
        looks.tick()
        gives_up.end()
        assert participant.judged is not None
        participant.judged(None)
        assert token.take("anybody")
        token.give_back("anybody")
        looks.end()
        assert looks.at() == math.inf

    Scheduler(0).run(scenario)


def test_a_call_that_ends_takes_its_own_look_back() -> None:
    def scenario() -> None:
        participant, token = Takes(), TakeoverToken()
        call = Takeover(participant, token)
        call.see(object(), 2, waits=True)
        concurrency.sleep(call.at() - concurrency.now())
        call.tick()
        assert participant.judged is not None
        call.end()
        assert participant.judged is None
        assert token.take("anybody")

    Scheduler(0).run(scenario)


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
