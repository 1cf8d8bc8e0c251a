"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from natives import Natives
from rdzv_nodes import make_nodes as make_nodes


@pytest.fixture
def natives() -> Iterator[Natives]:
    """torchft's own classes, in a process of their own."""
    with Natives() as child:
        yield child
