"""The table of planted faults, as docs/reliability.md has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simulator.history import Report
from simulator.mutants.planted_faults import MUTANTS
from simulator.mutants.planting import Mutant

NOT_SEEN: Final = "**not seen**"
_HEAD: Final = ("| planted fault | module | profile | seed | oracle |", "|---|---|---|---|---|")


def line(mutant: Mutant, report: Report | None, seeds: int) -> str:
    """That of one of them; `seeds` are those below which nobody saw it."""
    module = mutant.module.removeprefix("ftcoord.")
    if report is None:
        return f"| {mutant.name} | `{module}` | {', '.join(mutant.profiles)} | below {seeds} | {NOT_SEEN} |"
    seed = "its own plan" if report.plan in mutant.plans else report.plan.seed
    return f"| {mutant.name} | `{module}` | {report.plan.profile} | {seed} | {report.oracle} |"


def updated(text: str, found: Mapping[str, str]) -> str:
    """A document with these lines, by the names of the mutants: the others keep theirs, and those that are planted no
    longer have none. Raises ValueError where the document has no such table."""
    lines = text.splitlines()
    try:
        start = lines.index(_HEAD[0])
    except ValueError:
        raise ValueError(f"no line {_HEAD[0]!r} in the document: add it where the table is to be") from None
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    known = {row.split(" | ")[0].removeprefix("| "): row for row in lines[start + len(_HEAD) : end]}
    rows = [row for one in MUTANTS if (row := found.get(one.name, known.get(one.name)))]
    return "\n".join([*lines[:start], *_HEAD, *rows, *lines[end:]]) + "\n"
