"""What becomes of the calls of a `MemoryClient`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

NEVER: Final = math.inf
"""In place of seconds: this does not happen."""

Method: TypeAlias = Literal["range", "txn", "grant", "renew", "revoke", "compact"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a client is about to make.

    Args:
        method: of `Etcd`.
        asked: the Get, the Transaction, or the lease that it is about.
        writes: whether it may change a key, so that a lost answer raises OutcomeUnknown.
    """

    method: Method
    asked: object
    writes: bool


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one call. All times are in seconds, and no call takes longer than its time-out.

    Args:
        arrives: how long the request is under way. NEVER: it is lost. It takes effect also where its caller has been
            told by then that nothing is known of it, as a packet that was delayed does.
        answers: how long the answer is under way. NEVER: it is lost.
        breaks: when the connection breaks, which tells the caller; NEVER: it waits until its time-out.
        refused: the client knows that the request never left: EtcdUnavailable is raised at once.
        again: how long after it arrived the request arrives once more, as where a proxy repeats it. NEVER: it does not.
    """

    arrives: float = 0.0
    answers: float = 0.0
    breaks: float = NEVER
    refused: bool = False
    again: float = NEVER


DELIVERED: Final = Fate()
"""It happens and is answered, at once."""
REFUSED: Final = Fate(refused=True)
"""It does not happen, and the caller knows."""
LOST_REQUEST: Final = Fate(arrives=NEVER, breaks=0)
"""It does not happen. A write raises OutcomeUnknown."""
LOST_ANSWER: Final = Fate(answers=NEVER, breaks=0)
"""It happens. A write raises OutcomeUnknown all the same."""


def flaky(
    seed: int,
    *,
    refused: float = 0.0,
    lost_requests: float = 0.0,
    lost_answers: float = 0.0,
    late: float = 0.0,
    delay: float = 0.0,
) -> Callable[[Call], Fate]:
    """A fate for `MemoryEtcd.client`, drawn for each call.

    Args:
        seed: the same seed draws the same fates.
        refused, lost_requests, lost_answers: how likely each is, from 0 to 1.
        late: how likely it is that a request arrives, up to 3 s later, after its caller was told that nothing is known.
        delay: seconds that a request, and an answer, takes at the most.
    """
    draw = random.Random(seed)

    def fate(_call: Call) -> Fate:
        chance = draw.random()
        for likely, drawn in ((refused, REFUSED), (lost_requests, LOST_REQUEST), (lost_answers, LOST_ANSWER)):
            if chance < likely:
                return drawn
            chance -= likely
        if chance < late:
            return Fate(arrives=draw.uniform(0, 3.0), breaks=0)
        return Fate(draw.uniform(0, delay), draw.uniform(0, delay)) if delay else DELIVERED

    return fate
