"""Which rules and guards a history reaches: one that no seed reaches is not tested by any."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from virtual import keyspace

from ftcoord.coordination import policy as quorums
from ftcoord.core import quorum, rendezvous
from ftcoord.core.verdict import Publish
from ftcoord.etcd.api import Compare, KeyValue
from ftcoord.rendezvous import policy as rounds
from simulator.stubs import replacing

KINDS: Final = ("members", "rounds", "ops", "timers", "heartbeats", "decided", "decider")
"""Keys that guards name. The others are a user's, in a store."""


def kind_of(key: str) -> str:
    """What a key is for, as docs/protocol.md names it."""
    return next((part for part in reversed(key.split("/")) if part in KINDS), "store")


@contextlib.contextmanager
def counted(counts: Counter[str], before: Callable[[], None]) -> Iterator[None]:
    """Count the verdicts of each rule, and each guard that does not hold. Each decision calls `before` first."""

    def deciding(decide: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decide)
        def counting(*given: Any) -> Any:
            before()
            verdict = decide(*given)
            kind = "publish" if isinstance(verdict, Publish) else "wait"
            counts[f"{decide.__module__.rpartition('.')[2]}: {verdict.rule or 'no rule'}: {kind}"] += 1
            return verdict

        return counting

    fits = keyspace._fits

    def fitting(compare: Compare, kv: KeyValue | None) -> bool:
        held = fits(compare, kv)
        if not held:
            counts[f"guard: {kind_of(compare.key)} {compare.target} {compare.relation}"] += 1
        return held

    with replacing() as put:
        for module in (rounds, quorums):
            put(module, "decide", deciding(module.decide))
        put(keyspace, "_fits", fitting)
        yield


NO_VERDICT: Final = frozenset({"R1 asking", "R5 ranks", "R8 leaving", "Q1 asking", "Q5 id"})
"""Rules that others rest on."""
GUARDS: Final = (
    "decided mod =", "decider mod =", "decider value =", "members mod =", "rounds create >",
    "ops mod =", "store value =", "heartbeats mod =", "timers mod =",
)  # fmt: skip
"""That a transaction may find not to hold."""
FEWEST: Final = 100
"""Seeds that reach each rule and guard once, on average."""


def unreached(counts: Counter[str], seeds: int) -> list[str]:
    """The rules and guards that too few of so many seeds reach."""
    rules = [rule for rule in (*rendezvous.RULES, *quorum.RULES) if rule not in NO_VERDICT]
    of_rule = {rule: sum(count for name, count in counts.items() if f": {rule}: " in name) for rule in rules}
    of_guard = {name: counts[f"guard: {name}"] for name in GUARDS}
    return [f"{name} ({count})" for name, count in {**of_rule, **of_guard}.items() if count * FEWEST < seeds]
