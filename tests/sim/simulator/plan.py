"""What one seed brings: which processes there are, what befalls them and when, and how bad their network is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ftcoord.core.rendezvous import Restart


@dataclass(frozen=True)
class Network:
    """How likely it is, from 0 to 1, that a call is refused, loses its request or its answer, has its request arrive
    late or twice, or is answered slowly; and the seconds that a request, and an answer, takes at the most."""

    refused: float = 0.0
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    delay: float = 0.0
    slow: float = 0.0

    @property
    def loses_nothing(self) -> bool:
        """Whether each call gets through, once, and in time."""
        return not any((self.refused, self.lost_requests, self.lost_answers, self.late, self.twice, self.slow))


@dataclass(frozen=True)
class Profile:
    """What the seeds of one kind have in common.

    Args:
        cast: how many processes of each role there are: the fewest and the most.
        faults: how often each kind of fault is drawn, next to the others.
        mean_pause: seconds between two faults, on average.
        seconds: how long faults go on.
        slow: how likely it is that an answer takes long, where the network is bad; it arrives all the same.

    Short histories that are full of faults find nearly as many planted faults as histories of three times their length
    with as many faults, in less than half of the time.
    """

    cast: Mapping[str, tuple[int, int]]
    faults: Mapping[str, float]
    mean_pause: float = 1.5
    seconds: tuple[float, float] = (5.0, 16.0)
    slow: float = 0.0


PROCESSES: Final = {"kill": 4.0, "stop": 2.0, "slow": 2.0, "stick": 2.0, "clock": 1.0}
NETWORK: Final = {"cut_port": 1.0, "cut": 2.0, "cut_requests": 1.0, "cut_answers": 1.0}
ETCD: Final = {
    "leader": 1.0,
    "compact": 2.0,
    "outage": 1.0,
    "hang": 0.5,
    "no_space": 0.7,
    "expire": 2.0,
    "lost_event": 1.0,
}
ACCIDENTS: Final = {"restore": 2.0, "wipe": 1.0, "delete_key": 1.5, "overwrite": 1.5}
ENDS: Final = {"worker_fails": 1.0, "job_fails": 2.0, "job_finishes": 2.0}
ALL: Final = {**PROCESSES, **NETWORK, **ETCD, "garbage": 1.0}

PROFILES: Final[Mapping[str, Profile]] = {
    "rounds": Profile({"agent": (2, 5)}, {**ALL, "worker_fails": 3.0, "drain": 2.0}),
    "accidents of rounds": Profile(
        {"agent": (2, 4)}, {**PROCESSES, **NETWORK, **ACCIDENTS, "leader": 1.0, "worker_fails": 2.0}
    ),
    "quorums": Profile({"trainer": (2, 5)}, ALL),
    "accidents of quorums": Profile({"trainer": (2, 4)}, {**PROCESSES, **NETWORK, **ACCIDENTS}),
    "heartbeats": Profile({"beater": (1, 3)}, {**PROCESSES, **NETWORK, **ETCD}),
    "stores": Profile({"store": (2, 4), "agent": (0, 2)}, {**PROCESSES, **NETWORK, **ETCD}),
    "whole jobs": Profile(
        {"agent": (2, 3), "trainer": (1, 3), "store": (1, 2), "beater": (0, 1)},
        {**ALL, "worker_fails": 1.0, "drain": 1.0},
    ),
    "timers": Profile(
        {"worker": (1, 3), "watchdog": (1, 2)},
        {**PROCESSES, **NETWORK, **ETCD, "restore": 0.3, "kill_claimer": 2.0},
        mean_pause=4.0,
        seconds=(15.0, 45.0),  # timers last for seconds, and little else happens
    ),
    "votes": Profile({"group": (1, 3)}, ALL),
    "ends": Profile({"agent": (2, 4)}, {**PROCESSES, **NETWORK, **ETCD, **ENDS}, seconds=(10.0, 30.0)),
    "late": Profile(
        {"agent": (0, 3), "trainer": (0, 3), "store": (0, 2)},
        {**PROCESSES, **NETWORK, **ETCD, "lag": 6.0, "worker_fails": 1.0},
        slow=0.03,
    ),
}

KINDS_A_SEED: Final = 2, 5
"""The fewest and the most kinds of faults of one history."""

BY_KEY: Final = 0.4
"""How many histories have no ask ports."""
STATEMENTS: Final = 0.1
"""How many histories have threads that change over between any two statements: they take several times as long."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault: `at` virtual seconds after the beginning, of this kind. `draw` decides whom it hits."""

    at: float
    kind: str
    draw: int

    def __str__(self) -> str:
        return f"{self.at:.3f}:{self.kind}:{self.draw}"

    @classmethod
    def parse(cls, text: str) -> PlannedFault:
        """What `str` made. Raises ValueError."""
        at, kind, draw = text.split(":")
        return cls(float(at), kind, int(draw))


@dataclass(frozen=True)
class Plan:
    """One history, but for the order in which threads take turns: that is the scheduler's, which has the same seed.

    Args:
        pace: how much longer than in a busy job everybody pauses between two steps.
        by_key: whether replicas cannot ask the decider but through etcd.
        any_statement: whether threads change over between any two statements.
        small_chunks: whether two seats fill a chunk, so that rounds have several.
        restart: which runs that are over new agents may go on from.
    """

    seed: int
    profile: str
    cast: Mapping[str, int]
    faults: tuple[PlannedFault, ...]
    network: Network
    seconds: float
    nnodes: tuple[int, int] = (1, 1)
    small_chunks: bool = False
    any_statement: bool = False
    by_key: bool = False
    drifts: bool = False
    options: Mapping[str, float] = field(default_factory=dict)
    pace: float = 1.0
    restart: Restart = "failed"

    def dumped(self) -> dict[str, Any]:
        """As JSON can hold it: what a seed brings changes with the profiles, this does not."""
        return {**asdict(self), "faults": [str(one) for one in self.faults]}

    @classmethod
    def loaded(cls, dumped: Mapping[str, Any]) -> Plan:
        """What `dumped` made."""
        faults = tuple(map(PlannedFault.parse, dumped["faults"]))
        nnodes = tuple(dumped["nnodes"])
        return cls(**{**dumped, "faults": faults, "network": Network(**dumped["network"]), "nnodes": nnodes})

    def without(self, *faults: PlannedFault) -> Plan:
        """The same with fewer faults."""
        return replace(self, faults=tuple(one for one in self.faults if one not in faults))


def plan_of(seed: int, profile: str | None = None) -> Plan:
    """The plan of a seed; of one profile, or of the one that the seed chooses."""
    draw = random.Random(f"plan {seed}")
    draw.randrange(7)  # so was the profile drawn once: what a seed brings of each of those stays what it was
    name = profile or random.Random(f"profile {seed}").choice(list(PROFILES))
    of = PROFILES[name]
    cast = {role: draw.randint(*counts) for role, counts in of.cast.items()}
    seconds = draw.uniform(*of.seconds)
    faults, at = [], 0.0
    # A few kinds each: where all come at once, most histories are of the strongest one.
    kinds = draw.sample(list(of.faults), draw.randint(*KINDS_A_SEED))
    weights = [of.faults[kind] for kind in kinds]
    mean_pause = of.mean_pause * draw.choice((0.4, 1.0, 2.5))
    while (at := at + draw.expovariate(1 / mean_pause)) < seconds:
        faults.append(PlannedFault(round(at, 3), draw.choices(kinds, weights)[0], draw.randrange(2**16)))
    agents = max(cast.get("agent", 0), 1)
    least = draw.randint(1, agents)
    return Plan(
        seed,
        name,
        cast,
        tuple(faults),
        _network(draw, of.slow),
        seconds,
        nnodes=(least, draw.randint(least, agents + 1)),
        small_chunks=draw.random() < 0.3,
        by_key=random.Random(f"by key {seed}").random() < BY_KEY,
        any_statement=random.Random(f"statements {seed}").random() < STATEMENTS,
        drifts=draw.random() < 0.3,
        options={"join_timeout": draw.choice((1.0, 4.0)), "min_replicas": float(draw.choice((1, 1, 2)))},
        pace=draw.choice((1.0, 3.0, 3.0)),
        restart=draw.choice(("failed", "failed", "always")),
    )


def _network(draw: random.Random, slow: float) -> Network:
    """Half of the networks are good: a bad one hides what needs luck to be seen."""
    if draw.random() < 0.5:
        return Network(delay=draw.choice((0.0, 0.0, 0.002)))
    bad = draw.choice((0.01, 0.05))
    return Network(bad, bad, bad, bad, draw.choice((0.0, bad)), draw.choice((0.002, 0.05, 0.3)), slow)
