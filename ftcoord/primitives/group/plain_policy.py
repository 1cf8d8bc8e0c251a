"""The decider's half of a plain use, whose decisions depend on the members and the last record alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from ftcoord import concurrency
from ftcoord.core.layout import Span, member_of
from ftcoord.core.outlook import Outlook
from ftcoord.core.situation import Asking, Situation
from ftcoord.core.strict import LARGEST_DECIDED_STEP, check_step
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.primitives.group.parse_cache import Naming, ParsedKey, ParsedKeys
from ftcoord.primitives.group.policy import ReadBack, View

A = TypeVar("A", bound=Naming)


class Numbered(Protocol):
    """A decided record: a dataclass with a number that only grows, and a text that names its decider."""

    @property
    def number(self) -> int: ...
    @property
    def by(self) -> str: ...


N = TypeVar("N", bound=Numbered)


class Heard(Generic[N]):
    """What one participant remembers of all records that it has seen, whatever etcd and its leases forget. Thread-safe.

    A use has one, and gives it to each `PlainPolicy` that it makes.

    Args:
        parse: parses a record. Raises StateError.
    """

    def __init__(self, parse: Callable[[str, bytes], N]) -> None:
        self._parse = parse
        self._lock = concurrency.lock("Heard._lock")  # guards highest: two threads may read a record at the same time
        self.highest = 0
        """The highest number of a record."""

    def read(self, key: str, value: bytes) -> N:
        """Parse a decided record, and remember it. Raises StateError."""
        record = self._parse(key, value)
        with self._lock:
            if self.highest:
                check_step(key, record.number, self.highest, LARGEST_DECIDED_STEP)
            self.highest = max(self.highest, record.number)
        return record


@dataclass(frozen=True, slots=True)
class Writes:
    """What changes together with a record."""

    puts: Sequence[tuple[str, bytes]] = ()
    deletes: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class PlainRules(Generic[N, A]):
    """Both halves of a plain use's protocol, and its records. All of these functions are pure.

    Args:
        decide: the decider's half.
        outlook: the member's half, as described by `ftcoord.primitives.group.use.Use.outlook`.
        parse_ask: parses a member's ask. Raises StateError.
        parse_record: parses the decided record. Raises StateError.
        encode: returns the bytes of either.
    """

    decide: Callable[[Situation[N, A]], Verdict[N]]
    outlook: Callable[[N | None, Sequence[str], A], Outlook[A]]
    parse_ask: Callable[[str, bytes], A]
    parse_record: Callable[[str, bytes], N]
    encode: Callable[[Any], bytes]


class PlainPolicy(Generic[N, A]):
    """Implements `ftcoord.primitives.group.policy.Policy`.

    Args:
        rules: the use's rules.
        heard: parses the record, and remembers its number. One for all leases of a participant.
        writes: returns what changes with a record.
    """

    def __init__(self, rules: PlainRules[N, A], heard: Heard[N], writes: Callable[[N], Writes]) -> None:
        self._rules, self._heard, self._writes = rules, heard, writes
        self._members, self._decided = ParsedKeys(rules.parse_ask), ParsedKey(heard.read)
        self._read_back = ReadBack()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record cannot be read."""
        previous = self._decided.of(view.decided) if view.decided else None
        members = [Asking(member_of(kv.key), ask) for kv, ask in self._members.of(view.members, self._heard.highest)]
        # An etcd that lost its last writes may show an older record than this participant has heard of.
        unreadable = frozenset(map(member_of, self._members.unreadable))
        situation = Situation(members, previous, view.vanished, self._heard.highest, unreadable)
        verdict = self._rules.decide(situation)
        if isinstance(verdict, Wait):
            return verdict
        # The record that it replaces makes it unlike all that were published before.
        base = view.decided.mod_revision if view.decided else 0
        record = replace(verdict.record, by=f"{me} {base}")  # type: ignore[type-var]
        writes = self._writes(record)
        value = self._rules.encode(record)
        published = Publish(value, verdict.reason, verdict.rule, writes.puts, writes.deletes)
        return self._read_back.passed(published, lambda one: self._rules.parse_record("decided", one.record), now)
