"""What torch finds through the entry-point group `torchrun.handlers`.

A leaf without imports of its own: torch loads it while its own package is still being imported, where a circular
import would leave the backend unregistered with nothing but a warning.
"""

from __future__ import annotations

from typing import Any


def get_handler() -> Any:
    """The creator of handlers, which torch calls with its RendezvousParameters."""
    return _create


def _create(params: Any) -> Any:
    from ftcoord.rendezvous.create import create_handler

    return create_handler(params)
