"""How long a participant's call waits, and what it does meanwhile."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from ftcoord import concurrency
from ftcoord.core.takeover import Looking, Slot, slot
from ftcoord.core.verdict import Standing
from ftcoord.primitives.group.succession import Judged

R = TypeVar("R")
A = TypeVar("A")

SIGNAL_LATENCY: Final = 1.0
"""The most seconds until a call that waits on the main thread handles a signal."""


def signals_at() -> float:
    """The monotonic time at which a waiting call must wake up for signals; infinity if it need not.

    A signal may come in the moment before a wait, and Python handles it when the wait ends. It runs handlers on the
    main thread only, so calls on other threads need not wake up.
    """
    return concurrency.now() + SIGNAL_LATENCY if concurrency.is_main_thread() else math.inf


@dataclass(frozen=True, slots=True)
class Look(Generic[R, A]):
    """Where a member stands: its standing, the record, and its ask."""

    standing: Standing
    record: R | None
    ask: A


class Pace(Protocol[R, A]):
    """How long one call waits, and what it does meanwhile."""

    @property
    def deadline(self) -> float:
        """The monotonic time at which writes are given up."""

    @property
    def gone(self) -> concurrency.Event:
        """Set when the caller has gone away: writes are then given up at once."""

    @property
    def crowd(self) -> int:
        """How many members may wait together with this one, as far as is known. The more, the less often each repeats
        its checks."""

    def see(self, look: Look[R, A]) -> Standing:
        """Note where the member stands, before anything is done about it. Called with a lock held: must not block.
        Returns PENDING for a standing that this call chooses to wait through, else the standing."""

    def wake_at(self, standing: Standing) -> float:
        """The monotonic time at which to call `tick`. Called with a lock held, before each wait."""

    def tick(self, look: Look[R, A]) -> None:
        """Do what is due from time to time. Raises the error that ends the call, such as TimeoutError."""


class UntilDeadline(Generic[R, A]):
    """The pace of a call that only waits.

    Args:
        timeout: seconds; None waits forever.
        what: what the call waits for, for the error.
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
    """Lets one participant of this process at a time look: one is enough, and each look costs a read of all members.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("TakeoverToken._lock")
        self._holder: object | None = None  # guarded by _lock
        self.looker: TakesOver | None = None
        """The participant that looked last. Replaced as a whole by any thread."""

    def take(self, holder: object) -> bool:
        """Take it, if it is free; returns whether the holder has it. Never waits."""
        with self._lock:
            if self._holder is None:
                self._holder = holder
            return self._holder is holder

    def is_with(self, holder: object) -> bool:
        """Whether the holder has it now."""
        with self._lock:
            return self._holder is holder

    def give_back(self, holder: object) -> None:
        """Give it back. Does nothing for another than its holder."""
        with self._lock:
            if self._holder is holder:
                self._holder = None


class TakesOver(Protocol):
    """Something that can decide in place of the decider: a participant."""

    @property
    def reason(self) -> str: ...
    def take_over(self, judged: Judged) -> None: ...
    def step_back(self) -> None: ...
    def nudge(self) -> None: ...


class Takeover:
    """The looks of one call at whether a decision is due that the decider does not make; see `core.takeover`.

    For the calling thread; `see` and `at` run under the participant's lock.

    Args:
        participant: decides.
        token: shared by all participants of this process.
        slot: the time between the looks of different members.
    """

    def __init__(self, participant: TakesOver, token: TakeoverToken, slot: Slot = slot) -> None:
        self._participant, self._token, self._slot = participant, token, slot
        self._record: object = None
        self._seats = 0
        self._looking: Looking | None = None
        """None while there is nothing to wait for."""
        self._told: tuple[int, float | None] | None = None
        """The number of a look and its result. Replaced as a whole by the group's thread."""

    def see(self, record: object, seats: int, waits: bool) -> None:
        """Note the last decided record, how many seats a record has, and whether this call waits for the next one."""
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
            self._token.looker = self._participant
            self._participant.take_over(judged)

    @property
    def reason(self) -> str:
        """Why nothing is decided, as the last look in this process has shown; empty if that is not known."""
        looker = self._token.looker
        return looker.reason if looker is not None else ""

    def end(self) -> None:
        """The call no longer waits. Idempotent."""
        self._looking = None
        if self._token.is_with(self):  # else another call of this participant may be looking, and would hear of nothing
            self._participant.step_back()
            self._token.give_back(self)
