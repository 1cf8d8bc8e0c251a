"""The values of members, each parsed once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ftcoord.core.strict import LARGEST_COUNT, LARGEST_STEP, check_step
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue

log = logging.getLogger(__name__)


class Naming(Protocol):
    """What a member asks: it names numbers that the next decision counts on from."""

    @property
    def highest(self) -> int: ...


M = TypeVar("M", bound=Naming)


class ParsedKeys(Generic[M]):
    """The value of each member, as parsed by `parse(key, value)`. Members for which it raises StateError are kept
    apart, and so are those that name a number to which nobody has counted."""

    def __init__(self, parse: Callable[[str, bytes], M]) -> None:
        self._parse = parse
        self._known: dict[str, tuple[bytes, M | None]] = {}
        self.unreadable: Sequence[str] = ()
        """The keys of the members that could not be read in the last call of `of`: they are alive, but their asks are
        unknown."""

    def of(self, members: Sequence[KeyValue], highest: int = LARGEST_COUNT) -> list[tuple[KeyValue, M]]:
        """The members that can be read, in the order given. `highest`: the highest number that is known here, for
        whoever counts on from theirs."""
        before, self._known, said, unreadable = self._known, {}, [], []
        problems: list[StateError] = []
        for kv in members:
            known = before.get(kv.key)
            if known is None or known[0] != kv.value:
                known = kv.value, self._read(kv, highest, problems)
            self._known[kv.key] = known
            if known[1] is not None:
                said.append((kv, known[1]))
            else:
                unreadable.append(kv.key)
        self.unreadable = unreadable
        if problems:  # one line, however many there are
            many = f"{len(problems)} members count as alive, and as asking for nothing; the first"
            log.warning(
                "%s: %s", many if problems[1:] else "a member counts as alive, and as asking for nothing", problems[0]
            )
        return said

    def _read(self, kv: KeyValue, highest: int, problems: list[StateError]) -> M | None:
        try:
            parsed = self._parse(kv.key, kv.value)
            check_step(kv.key, parsed.highest, highest, LARGEST_STEP)
            return parsed
        except StateError as error:
            problems.append(error)
            return None
