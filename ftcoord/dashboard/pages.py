"""What one viewer is shown of a job, or of the list: a page of rows and the counts of all, for JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ftcoord.operator.told import JobList, JobStatus, plain

ROWS_OF_PAGE: Final = 50
"""Rows that are sent, and drawn, at a time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a viewer wants to see.

    Args:
        find: only rows that contain this text; empty for all.
        offset: how many of those rows to skip.
    """

    find: str = ""
    offset: int = 0


def page_of(told: JobStatus | JobList, look: Wanted) -> dict[str, Any]:
    """What is shown."""
    return _job_page(told, look) if isinstance(told, JobStatus) else _list_page(told, look)


def members_on(page: dict[str, Any]) -> list[str]:
    """The member ids of a job's page."""
    groups = [page.get("rounds"), page.get("quorum")]
    return [row.member for group in groups if group for row in group["members"]["rows"]]


def _list_page(told: JobList, look: Wanted) -> dict[str, Any]:
    states = Counter(line.state for line in told.jobs)
    return {"key_prefix": told.key_prefix, "states": states, "jobs": _rows(told.jobs, look)}


def _job_page(told: JobStatus, look: Wanted) -> dict[str, Any]:
    page = plain(told)
    if told.rounds is not None:
        page["rounds"] = _group(plain(told.rounds), told.rounds.members, look)
    if told.quorum is not None:
        page["quorum"] = _group(plain(told.quorum), told.quorum.replicas, look)
        del page["quorum"]["replicas"]
    page["timers"] = _rows(told.timers, Wanted(look.find))
    page["unreadable"] = _rows(told.unreadable, Wanted())
    return page


def _group(fields: dict[str, Any], members: Sequence[Any], look: Wanted) -> dict[str, Any]:
    standings = Counter(one.standing for one in members)
    missing = _rows(fields["missing"], Wanted(look.find))
    return {**fields, "members": _rows(members, look), "missing": missing, "standings": standings}


def _rows(all_: Sequence[Any], look: Wanted) -> dict[str, Any]:
    found = list(_found(all_, look.find)) if look.find else all_
    offset = look.offset if look.offset < len(found) else 0
    return {"total": len(all_), "found": len(found), "offset": offset, "rows": found[offset : offset + ROWS_OF_PAGE]}


def _found(all_: Iterable[Any], find: str) -> Iterable[Any]:
    wanted = find.casefold()
    for one in all_:
        texts = (value for value in plain(one).values() if isinstance(value, str))
        if any(wanted in text.casefold() for text in texts):
            yield one
