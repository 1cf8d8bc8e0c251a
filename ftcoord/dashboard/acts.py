"""What may be done through the dashboard with its token: the same as by the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ftcoord.config import choice, full_text
from ftcoord.errors import ConfigError
from ftcoord.etcd.api import Etcd
from ftcoord.operator.orders import (
    because,
    close_job,
    drain,
    evict_members,
    find_members,
    kill_replica,
    nodes_of_run,
)
from ftcoord.operator.told import Done

LONGEST_WORD: Final = 1000
"""Characters of each part of an order."""
KILL_WAIT: Final = 10.0
"""Seconds to wait for a manager to exit."""


@dataclass(frozen=True, slots=True)
class PageOrder:
    """An order.

    Args:
        what: evict, drain, close or kill.
        job: the job.
        name: the member, node or replica; empty to close the job.
        who: who gives the order, in their own words.
        reason: why; empty for no reason.
        force: for drain: also if fewer nodes would stay than a round needs.
    """

    what: str
    job: str
    name: str
    who: str
    reason: str
    force: bool = False


def read_order(told: object) -> PageOrder:
    """Parse an order from JSON. Raises ConfigError."""
    if not isinstance(told, Mapping):
        raise ConfigError("order", "", "give a JSON object")
    what = choice("evict", "drain", "close", "kill")("what", told.get("what", ""))
    name = "" if what == "close" else _word("name", told.get("name"))
    reason = _word("reason", told["reason"]) if told.get("reason") else ""
    force = told.get("force", False)
    if not isinstance(force, bool) or (force and what != "drain"):
        raise ConfigError("force", str(force), "give true or false, and true only to drain")
    return PageOrder(what, _word("job", told.get("job")), name, _word("who", told.get("who")), reason, force)


def _word(key: str, value: object) -> str:
    found = full_text(key, value)
    if len(found) > LONGEST_WORD:
        raise ConfigError(key, f"{found[:20]}...", f"give at most {LONGEST_WORD} characters")
    return found


class PageActor:
    """Carries out orders.

    Args:
        etcd: the client; not closed here.
        key_prefix: the prefix of the jobs' keys.
        page: as whom the dashboard runs, such as user@host.
        timeout: seconds for one request to etcd.
    """

    def __init__(self, etcd: Etcd, key_prefix: str, page: str, timeout: float) -> None:
        self._etcd, self._key_prefix, self._page, self._timeout = etcd, key_prefix, page, timeout  # never change

    def act(self, order: PageOrder, sender: str) -> Done:
        """Carry out an order, and record who gave it. Raises NothingThere, ConfigError, StateError and EtcdError.

        Args:
            sender: the address that the order came from.
        """
        by = f"by {order.who} through the page of {self._page}, from {sender}"
        if order.what == "kill":
            message = because(f"killed {by}", order.reason)
            return kill_replica(self._etcd, self._key_prefix, order.job, order.name, message, KILL_WAIT, order.who)
        if order.what == "close":
            nodes_of_run(self._etcd, self._key_prefix, order.job)
            reason = because(f"closed {by}", order.reason)
            return close_job(self._etcd, self._key_prefix, order.job, reason, order.who, self._timeout)
        if order.what == "drain":
            reason, known = because(f"was drained {by}", order.reason), (self._etcd, self._key_prefix, order.job)
            return drain(*known, order.name, reason, order.who, self._timeout, force=order.force)
        members = find_members(self._etcd, self._key_prefix, order.job, order.name)
        return evict_members(self._etcd, order.job, members, because(f"evicted {by}", order.reason), order.who)
