"""The common part of plain uses: prefix, policy, remembered records, and a nonce for each ask."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic

from ftcoord.core.outlook import Outlook
from ftcoord.primitives.group.plain_policy import A, Heard, N, PlainPolicy, PlainRules, Writes
from ftcoord.primitives.group.use import Use


class PlainUse(Use[N, A], abc.ABC, Generic[N, A]):
    """A use whose decisions depend on the members and the last record alone, not on time.

    An ask is a dataclass with a `nonce`.

    Args:
        prefix: the prefix of the group's keys.
        rules: both halves of the protocol, and the records.
    """

    def __init__(self, prefix: str, rules: PlainRules[N, A]) -> None:
        self._prefix, self._rules, self._heard = prefix, rules, Heard(rules.parse_record)  # these never change

    @abc.abstractmethod
    def tell(self, ask: A, highest: int) -> A:
        """The ask with the highest number that this participant has seen: the next decider must know it."""

    def writes(self, now: N) -> Writes:
        """What changes in the transaction that writes the record `now`: nothing, unless a use overrides this."""
        return Writes()

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> PlainPolicy[N, A]:
        return PlainPolicy(self._rules, self._heard, self.writes)

    def parse(self, key: str, value: bytes) -> N:
        return self._heard.read(key, value)

    def stamp(self, ask: A) -> A:
        return replace(ask, nonce=uuid.uuid4().hex)  # type: ignore[type-var]

    def encode(self, ask: A) -> bytes:
        return self._rules.encode(self.tell(ask, self._heard.highest))

    def outlook(self, record: N | None, me: Sequence[str], ask: A) -> Outlook[A]:
        return self._rules.outlook(record, me, ask)
