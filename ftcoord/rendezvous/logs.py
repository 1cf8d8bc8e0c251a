"""What torchrun's users read about a rendezvous: log lines with time and level, and texts that name nodes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from ftcoord.core.rendezvous_records import AnyRound, Round

SHOWN: Final = 8
"""Hosts that a message names; it counts the others."""
_FORMAT: Final = "%(levelname).1s%(asctime)s %(process)d %(name)s] %(message)s"
_TIME: Final = "%m%d %H:%M:%S"


def show_log_lines() -> None:
    """Print ftcoord's log lines on stderr, if the process has set up no logging of its own. Idempotent.

    LOGLEVEL, torch's variable (https://docs.pytorch.org/docs/stable/elastic/run.html), sets the lowest level. Without
    it, warnings are printed, one line of the rendezvous for each round, and where this process tells its metrics.
    """
    package = logging.getLogger("ftcoord")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    package.addHandler(handler)
    level = os.environ.get("LOGLEVEL", "").strip().upper()
    if isinstance(logging.getLevelName(level), int):
        package.setLevel(level)
    else:
        package.setLevel(logging.WARNING)
        for name in ("rendezvous", "metrics"):
            logging.getLogger(f"ftcoord.{name}").setLevel(logging.INFO)


def round_line(run_id: str, round_: AnyRound, rank: int) -> str:
    """The log line of a participant for a round that is ready. Of a large one it does not know who else is in it."""
    where = f"on {named(seat.host for seat in round_.seats)}" if isinstance(round_, Round) else f"with {round_.address}"
    before = f"; the round before ended: {round_.before}" if round_.before else ""
    return f"run {run_id!r}, round {round_.number}: this node is rank {rank} of {round_.size}, {where}{before}"


def attendance(hosts: Sequence[str], count: int, least: int) -> str:
    """How many nodes came, of at least `least`, and which; `hosts` are the first of them."""
    who = f" ({named(hosts, count)})" if hosts else ""
    return f"{count} of at least {least} nodes came{who}"


def named(hosts: Iterable[str], count: int | None = None) -> str:
    """The first hosts by name, and how many more there are."""
    names = list(hosts)
    more = max(len(names) if count is None else count, len(names)) - SHOWN
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
