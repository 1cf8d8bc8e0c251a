"""How long a participant's call waits, and what it does meanwhile."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from ftcoord import concurrency
from ftcoord.core.outlook import Standing
from ftcoord.core.takeover import Looking, Slot, slot
from ftcoord.primitives.group.succession import Judged

R = TypeVar("R")
A = TypeVar("A")

SIGNAL_LATENCY: Final = 1.0
"""Seconds until a call that waits on the main thread heeds a signal at the latest."""


def signals_at() -> float:
    """The monotonic time at which a call that waits must wake up for signals; infinity where it need not.

    A signal may come in the moment before a wait, and Python looks for it when the wait ends. It runs handlers on the
    main thread only, so calls on other threads sleep on.
    """
    return concurrency.now() + SIGNAL_LATENCY if concurrency.is_main_thread() else math.inf


@dataclass(frozen=True, slots=True)
class Look(Generic[R, A]):
    """Where a member stands: by which record, and with what it asks."""

    standing: Standing
    record: R | None
    ask: A


class Pace(Protocol[R, A]):
    """How long one call waits, and what it does meanwhile."""

    @property
    def deadline(self) -> float:
        """The monotonic time at which writing is given up."""

    @property
    def gone(self) -> concurrency.Event:
        """Set when the caller has gone away: writing is given up at once."""

    @property
    def crowd(self) -> int:
        """How many members may wait together with this one, as far as it can tell: the more, the less each repeats."""

    def see(self, look: Look[R, A]) -> Standing:
        """Take note of where the member stands, before anything is done about it. Called with a lock held: must not
        block. Returns PENDING for what this call chooses to wait through, else the same."""

    def wake_at(self, standing: Standing) -> float:
        """The monotonic time at which to call `tick`. Called with a lock held, before each wait."""

    def tick(self, look: Look[R, A]) -> None:
        """What is to be done from time to time. Raises whatever ends the call, such as TimeoutError."""


class UntilDeadline(Generic[R, A]):
    """The pace of a call that only waits.

    Args:
        timeout: seconds; None for as long as it takes.
        what: what is waited for, for the error.
    """

    crowd = 1

    def __init__(self, timeout: float | None, what: str) -> None:
        self.deadline = math.inf if timeout is None else concurrency.now() + timeout
        self.gone = concurrency.event()
        self._what = what

    def see(self, look: Look[R, A]) -> Standing:
        return look.standing

    def wake_at(self, standing: Standing) -> float:
        return min(self.deadline, signals_at())

    def tick(self, look: Look[R, A]) -> None:
        """Raises TimeoutError."""
        if concurrency.now() >= self.deadline:
            raise TimeoutError(f"{self._what}: not in time")


class TakeoverToken:
    """Lets one participant at a time look, of all in this process: one is enough, and each costs a read of all members.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("TakeoverToken._lock")
        self._holder: object | None = None  # guarded by _lock

    def take(self, holder: object) -> bool:
        """Whether the holder has it now. Never waits."""
        with self._lock:
            if self._holder is None:
                self._holder = holder
            return self._holder is holder

    def is_with(self, holder: object) -> bool:
        """Whether the holder has it now."""
        with self._lock:
            return self._holder is holder

    def give_back(self, holder: object) -> None:
        """Without effect for whoever does not have it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None


class TakesOver(Protocol):
    """Whoever can decide in place of the decider: a participant."""

    def take_over(self, judged: Judged) -> None: ...
    def step_back(self) -> None: ...
    def nudge(self) -> None: ...


class Takeover:
    """One call's looks at whether a decision is due that the decider does not make; see `core.takeover`.

    For the thread that calls; `see` and `at` run under the participant's lock.

    Args:
        participant: decides.
        token: shared by all participants of this process.
        slot: how far apart the looks of all members are.
    """

    def __init__(self, participant: TakesOver, token: TakeoverToken, slot: Slot = slot) -> None:
        self._participant, self._token, self._slot = participant, token, slot
        self._record: object = None
        self._seats = 0
        self._looking: Looking | None = None
        """None while there is nothing to wait for."""
        self._told: tuple[int, float | None] | None = None
        """The number of a look and what it told. Replaced as a whole by the group's thread."""

    def see(self, record: object, seats: int, waits: bool) -> None:
        """The last decided record, how many seats a record has, and whether this call waits for the next one."""
        if not waits:
            self._looking = None
        elif self._looking is None or record is not self._record:
            self._looking = Looking.begin(concurrency.now(), seats, random.random(), self._slot)
        self._record, self._seats = record, seats

    def at(self) -> float:
        """The monotonic time at which to call `tick`."""
        looking, told = self._looking, self._told
        if looking is None:
            return math.inf
        return looking.told(told[1]).due if told is not None and told[0] == looking.attempt else looking.due

    def tick(self) -> None:
        """Look, if it is time."""
        now = concurrency.now()
        if self._looking is None or now < self.at():
            return
        self._looking = self._looking.looked(now, self._seats, random.random(), self._slot)
        attempt = self._looking.attempt

        def judged(until: float | None) -> None:  # on the group's thread
            self._told = attempt, until
            self._token.give_back(self)
            self._participant.nudge()

        if self._token.take(self):
            self._participant.take_over(judged)

    def end(self) -> None:
        """The call waits no longer. Idempotent."""
        self._looking = None
        if self._token.is_with(self):  # else another call of this participant may be looking, and would hear of nothing
            self._participant.step_back()
            self._token.give_back(self)
