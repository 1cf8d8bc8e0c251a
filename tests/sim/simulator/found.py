"""Histories that found something, by what they found, as `python -m simulator plan` tells them: kept for ever, whatever
becomes of the profiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from simulator.plan import Plan

FOUND: Final[Mapping[str, Plan]] = {
    name: Plan.loaded(plan)
    for name, plan in json.loads((Path(__file__).parents[1] / "found.json").read_text(encoding="utf-8")).items()
}
