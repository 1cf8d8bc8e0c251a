"""What torch finds through the entry-point group `torchrun.handlers`.

A leaf without imports of its own: torch loads it while its own package is still being imported. A circular import would
leave the backend unregistered, with only a warning.
"""

from __future__ import annotations

import os
from typing import Any


def get_handler() -> Any:
    """The creator of `etcd-v3` handlers, which torch calls with its RendezvousParameters.

    With FTCOORD_REPLACE_LEGACY=1 in the environment, `etcd` and `etcd-v2` become names of it too.
    """
    if os.environ.get("FTCOORD_REPLACE_LEGACY", "").strip().lower() in ("1", "true", "yes", "on"):
        from ftcoord.rendezvous.torchelastic import install_legacy_names

        install_legacy_names()
    return _create


def get_dynamic_handler() -> Any:
    """The creator of `etcd-v3-dynamic` handlers."""
    return _create_dynamic


def _create(params: Any) -> Any:
    from ftcoord.rendezvous.handler import check_for_torch, create_handler

    check_for_torch(params)
    return create_handler(params)


def _create_dynamic(params: Any) -> Any:
    from ftcoord.rendezvous.backend import create_dynamic_handler
    from ftcoord.rendezvous.handler import check_for_torch

    check_for_torch(params)
    return create_dynamic_handler(params)
