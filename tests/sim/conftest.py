"""Of all tests in memory."""

from __future__ import annotations

from collections.abc import Iterator

import invariants
import pytest
from portless import portless


@pytest.fixture(autouse=True)
def decisions_are_checked() -> Iterator[None]:
    """Each decision, against the invariants."""
    with invariants.checked(), portless():
        yield
