"""When a call is repeated, and when not; in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown
from ftcoord.etcd.retry import ATTEMPT_TIMEOUT, SHORTEST_TIMEOUT, UNANSWERED, backoff, retry, retry_until_answered


class VirtualTime:
    """Events that nobody sets: waiting for one takes no time, and moves the clock."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.waits: list[float] = []

    def now(self) -> float:
        return self.time

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)


class VirtualEvent:
    def __init__(self, runtime: VirtualTime) -> None:
        self._runtime = runtime
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._runtime.waits.append(timeout)
        self._runtime.time += timeout
        return self._set


@pytest.fixture
def clock() -> Iterator[VirtualTime]:
    runtime = VirtualTime()
    with concurrency.use(runtime):
        yield runtime


def failing(error: Exception, times: int, before: Callable[[], None] = lambda: None) -> Callable[[], int]:
    """An attempt that fails so often, and then returns how often it was made."""
    made = [0]

    def attempt() -> int:
        before()
        made[0] += 1
        if made[0] <= times:
            raise error
        return made[0]

    return attempt


def test_what_is_not_answered_is_tried_again(clock: VirtualTime) -> None:
    assert retry(failing(EtcdUnavailable("away"), 3), UNANSWERED, clock.time + 60, concurrency.event()) == 4
    assert len(clock.waits) == 3


@pytest.mark.parametrize("error", [ClientClosed("closed"), LeaseLost("gone"), EtcdError("no")])
def test_anything_else_is_raised_at_once(clock: VirtualTime, error: EtcdError) -> None:
    with pytest.raises(type(error)):
        retry(failing(error, 1), UNANSWERED, clock.time + 60, concurrency.event())
    assert not clock.waits


def test_a_closed_client_is_not_an_etcd_that_is_away() -> None:
    """Else everything that waits for etcd to come back would wait for a closed client too."""
    assert not issubclass(ClientClosed, (EtcdUnavailable, OutcomeUnknown))


def test_the_last_error_is_raised_after_the_deadline_and_not_long_after(clock: VirtualTime) -> None:
    deadline = clock.time + 10

    def pass_a_second() -> None:
        clock.time += 1

    with pytest.raises(OutcomeUnknown):
        retry(failing(OutcomeUnknown("?"), 1000, pass_a_second), UNANSWERED, deadline, concurrency.event())
    assert deadline <= clock.time <= deadline + 1


def test_cancelling_ends_it_with_the_last_error(clock: VirtualTime) -> None:
    cancelled = concurrency.event()
    with pytest.raises(EtcdUnavailable):
        retry(failing(EtcdUnavailable("away"), 1000, cancelled.set), UNANSWERED, clock.time + 60, cancelled)
    assert not clock.waits


def test_the_pauses_grow_to_a_second_and_are_random() -> None:
    first, late = [backoff(1) for _ in range(500)], [backoff(100) for _ in range(500)]
    assert 0 <= min(first) < max(first) <= 0.05
    assert max(first) < max(late) <= 1.0


def test_etcd_gets_time_to_answer_even_if_the_caller_has_none(clock: VirtualTime) -> None:
    given = list[float]()

    def attempt(left: float) -> None:
        given.append(left)
        clock.time += left
        raise EtcdUnavailable("away")

    begun = clock.time
    with pytest.raises(EtcdUnavailable):
        retry_until_answered(attempt, begun, concurrency.event())
    assert given[0] == min(ATTEMPT_TIMEOUT, SHORTEST_TIMEOUT)
    assert clock.time - begun < SHORTEST_TIMEOUT + ATTEMPT_TIMEOUT
