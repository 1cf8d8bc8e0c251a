"""The JSON record of a death, or of a farewell: why the owner of a lease is gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ftcoord.core.layout import member_of
from ftcoord.core.rendezvous_records import WorkerFailure, clipped, failures_from
from ftcoord.core.strict import build, dump, load
from ftcoord.errors import StateError

REMEMBERED_FOR: Final = 3600
"""Seconds for which etcd keeps the record of a death."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why the owner of a lease is gone: written by its sentinel, by an operator, or, when it leaves, by itself.

    Args:
        cause: one line, such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; of who left, only the reason.
        wall_ms: when, on that host's clock, in milliseconds since 1970. For people: no decision depends on it.
        left: whether it left in order.
        failures: of a node that left: how its worker failed in the round that was the last one then; else none.
    """

    cause: str
    wall_ms: int
    left: bool = False
    failures: tuple[WorkerFailure, ...] = ()


class KnownCause(NamedTuple):
    """A death as written in etcd, and etcd's revision at which it was first written."""

    cause: str
    revision: int
    left: bool = False
    failures: tuple[WorkerFailure, ...] = ()


def encode(death: Death) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(replace(death, failures=tuple(map(clipped, death.failures[:1]))))


def parse_death(key: str, value: bytes) -> Death:
    """Parse the record. Raises StateError."""
    raw = load(key, value)
    return build(Death, key, {**raw, "failures": failures_from(key, raw, "failures")})


def causes_in(kvs: Iterable[tuple[str, bytes, int]]) -> dict[str, KnownCause]:
    """The causes of death in these keys, values and revisions, by member id. What cannot be read is left out: only a
    text depends on it."""
    found = {}
    for key, value, revision in kvs:
        try:
            death = parse_death(key, value)
        except StateError:
            continue
        found[member_of(key)] = KnownCause(death.cause, revision, death.left, death.failures)
    return {member: known for member, known in found.items() if known.cause}
