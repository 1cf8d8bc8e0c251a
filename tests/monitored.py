"""What docs/monitoring asks Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"


def dashboard() -> Any:
    return json.loads((DOCS / "monitoring" / "grafana.json").read_text(encoding="utf-8"))


def rules() -> Any:
    return yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))


def named_in(document: Any) -> set[str]:
    """The numbers that are named in anything that Prometheus is asked."""
    return {name for text in expressions(document) for name in re.findall(r"ftcoord_\w+", text)}


def expressions(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        yield from (value for key, value in document.items() if key in {"expr", "query"} and isinstance(value, str))
        yield from (found for value in document.values() for found in expressions(value))
    elif isinstance(document, list):
        yield from (found for value in document for found in expressions(value))
