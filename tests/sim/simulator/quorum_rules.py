"""torchft's rules of a quorum, as its lighthouse applies them (`quorum_compute`), with what docs/protocol.md changes.

Written apart from `ftcoord.core.quorum`, and from nothing but those two texts: it judges that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A member as etcd has it.

    Args:
        name: its replica's.
        asked: which of its requests that is; 0 for none.
        since: when it said so first, in virtual seconds.
        came, said, wrote: the revisions at which it became a member, first said what it asks, and last wrote that.
    """

    id: str
    name: str
    asked: int
    shrink_only: bool
    since: float
    came: int
    said: int
    wrote: int


@dataclass(frozen=True)
class Last:
    """The last quorum: its replicas, which request of each member it answered, and when it was
    decided."""

    names: frozenset[str]
    answered: Mapping[str, int]
    at: float


def asking(members: Sequence[Member], last: Last) -> dict[str, Member]:
    """The member whose request counts, of each replica that asks."""
    found: dict[str, Member] = {}
    for name in {one.name: None for one in members}:
        mine = [one for one in members if one.name == name]
        open_ = [one for one in mine if one.asked > last.answered.get(one.id, 0)]
        quiet = [one for one in mine if one not in open_]
        if not open_:
            continue
        newest_write = max(one.wrote for one in open_)
        if any(one.came > newest_write for one in quiet):  # a new process, which has not asked yet
            continue
        found[name] = max(open_, key=lambda one: (one.said, one.came))
    return found


def _candidates(asks: Mapping[str, Member], last: Last) -> frozenset[str]:
    """The replicas that ask and may be in: while one of them sets `shrink_only`, only those of the last quorum."""
    shrinks = any(one.shrink_only for one in asks.values()) and bool(last.names)
    return frozenset(name for name in asks if not shrinks or name in last.names)


class KeptOut:
    """How long replicas that asked were kept out, because one that asked had set `shrink_only`.

    That need not be one of the last quorum: then it keeps itself out too. As long as it asks, no quorum of all is due.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        """The periods that are over."""
        self._since: float | None = None

    def see(self, members: Iterable[Member], last: Last, now: float) -> None:
        """From now on these are the members, and that is the last quorum."""
        asks = asking([*members], last)
        self._seconds = self.seconds(now)
        self._since = now if _candidates(asks, last) != asks.keys() else None

    def seconds(self, now: float) -> float:
        """Virtual seconds in all, until now."""
        return self._seconds + (now - self._since if self._since is not None else 0.0)


def may_decide(
    members: Sequence[Member], last: Last, min_replicas: int, join_timeout: float, now: float
) -> frozenset[str] | None:
    """The replicas of the quorum that may be decided of these members; None for none.

    `join_timeout` as the fastest clock counts it: who decides saw everything later than etcd did.
    """
    asks = asking(members, last)
    candidates = _candidates(asks, last)
    if last.names and last.names <= asks.keys():
        return candidates
    alive = {one.name for one in members}
    if len(asks) < max(min_replicas, 1) or len(candidates) < max(min_replicas, 1):
        return None
    if 2 * len(asks) <= len(alive):
        return None
    first = max(min(one.since for one in asks.values()), last.at)
    if len(asks) < len(alive) and now < first + join_timeout:
        return None
    return candidates
