"""What torch finds through the entry-point group `torchrun.handlers`, and the names of its older etcd backends.

A leaf without imports of its own: torch loads it while its own package is still being imported. A circular import would
leave the backend unregistered, with only a warning.
"""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger(__name__)


def get_handler() -> Any:
    """The creator of `etcd-v3` handlers, which torch calls with its RendezvousParameters.

    With FTCOORD_REPLACE_LEGACY=1 in the environment, `etcd` and `etcd-v2` become names of it too.
    """
    if os.environ.get("FTCOORD_REPLACE_LEGACY", "").strip().lower() in ("1", "true", "yes", "on"):
        install_legacy_names()
    return _create


def get_dynamic_handler() -> Any:
    """The creator of `etcd-v3-dynamic` handlers."""
    return _create_dynamic


def install_legacy_names() -> None:
    """Make `--rdzv-backend=etcd` and `etcd-v2` run on ftcoord in this process. Idempotent.

    Call it before torchrun makes its rendezvous handler; FTCOORD_REPLACE_LEGACY=1 in torchrun's environment does the
    same. torch refuses to register a name twice, so this replaces the entries of its registry (tested with torch 2.6
    and 2.13). The old `rdzv_conf` keys keep their meaning, and those of `etcd-v3` work too. Other keys are ignored, as
    torch's backends do, with a warning that names them.

    Raises ImportError without torch.
    """
    from torch.distributed.elastic.rendezvous import api

    for name in ("etcd", "etcd-v2"):
        api.rendezvous_handler_registry._registry[name] = _create_legacy


def _create(params: Any) -> Any:
    from ftcoord.rendezvous.handler import check_for_torch, create_handler

    check_for_torch(params)
    return create_handler(params)


def _create_legacy(params: Any) -> Any:
    from ftcoord.logs import show_log_lines
    from ftcoord.rendezvous.handler import check_for_torch, create_handler
    from ftcoord.rendezvous.settings import CONF_NAMES

    show_log_lines()
    log.warning("--rdzv-backend=%s runs on ftcoord's etcd-v3, through etcd's v3 API", params.backend)
    known = {key: value for key, value in params.config.items() if key in CONF_NAMES}
    if foreign := [key for key in params.config if key not in known]:  # without their values: they may be secrets
        ignored = ", ".join(foreign)
        log.warning("rdzv_conf has keys that --rdzv-backend=%s does not know; ignored: %s", params.backend, ignored)
    check_for_torch(params)
    return create_handler(params, known)


def _create_dynamic(params: Any) -> Any:
    from ftcoord.rendezvous.backend import create_dynamic_handler
    from ftcoord.rendezvous.handler import check_for_torch

    check_for_torch(params)
    return create_dynamic_handler(params)
