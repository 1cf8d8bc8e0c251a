"""Reports for operators as tests make and read them."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any


def made(kind: type, *values: Any, **named: Any) -> Any:
    """A report of this kind, with these values in the order of its fields; None for those that are not given."""
    return {**dict.fromkeys(kind.__annotations__), **dict(zip(kind.__annotations__, values, strict=False)), **named}


def seen(report: Any) -> Any:
    """A report as its JSON is read, with its fields as attributes."""
    return json.loads(json.dumps(report, default=asdict), object_hook=lambda found: SimpleNamespace(**found))
