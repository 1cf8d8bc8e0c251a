"""The table of planted faults, as docs/reliability.md has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simulator.history import Report
from simulator.mutants.planted_faults import MUTANTS
from simulator.mutants.planting import Mutant

NOT_SEEN: Final = "**not detected**"
_HEAD: Final = ("| planted fault | detected by |", "|---|---|")


def line(mutant: Mutant, report: Report | None, seeds: int) -> str:
    """The row of a mutant: the first history in which an oracle detects it, or the seeds that did not, all below
    `seeds`."""
    if report is None:
        found = f"{NOT_SEEN} by seeds below {seeds} of {', '.join(mutant.profiles)}"
    elif report.plan in mutant.plans:
        found = f"own plan: {report.oracle}"
    else:
        found = f"{report.plan.profile} {report.plan.seed}: {report.oracle}"
    return f"| {mutant.name} | {found} |"


def updated(text: str, found: Mapping[str, str]) -> str:
    """A document with these rows, by the names of the mutants. Other mutants keep their rows, and rows of mutants that
    no longer exist are removed. Raises ValueError if the document has no such table."""
    lines = text.splitlines()
    try:
        start = lines.index(_HEAD[0])
    except ValueError:
        raise ValueError(f"no line {_HEAD[0]!r} in the document: add it where the table is to be") from None
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    known = {row.split(" | ")[0].removeprefix("| "): row for row in lines[start + len(_HEAD) : end]}
    rows = [row for one in MUTANTS if (row := found.get(one.name, known.get(one.name)))]
    return "\n".join([*lines[:start], *_HEAD, *rows, *lines[end:]]) + "\n"
