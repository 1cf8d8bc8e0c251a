"""torch's old names of its etcd backends, on ftcoord: job templates with `--rdzv-backend=etcd-v2` need no change."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ftcoord.logs import show_log_lines
from ftcoord.rendezvous.settings import is_known

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

log = logging.getLogger(__name__)
NAMES: Final = ("etcd", "etcd-v2")


def install_legacy_names() -> None:
    """Make `--rdzv-backend=etcd` and `etcd-v2` run on ftcoord in this process. Idempotent.

    Call it before torchrun makes its rendezvous handler; FTCOORD_REPLACE_LEGACY=1 in torchrun's environment does the
    same. torch refuses to register a name twice, so this replaces the entries of its registry (tested with torch 2.6
    and 2.13). The old `rdzv_conf` keys keep their meaning, and those of `etcd-v3` work too. Other keys are ignored, as
    torch's backends do, with a warning that names them.

    Raises ImportError without torch.
    """
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    for name in NAMES:
        rendezvous_handler_registry._registry[name] = _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from ftcoord.rendezvous.create import check_for_torch, create_handler, with_conf

    show_log_lines()
    check_for_torch(params)
    log.warning("--rdzv-backend=%s runs on ftcoord's etcd-v3, through etcd's v3 API", params.backend)
    foreign = [key for key in params.config if not is_known(key)]
    if foreign:  # without their values: they may be secrets
        ignored = ", ".join(foreign)
        log.warning("rdzv_conf has keys that --rdzv-backend=%s does not know; ignored: %s", params.backend, ignored)
    return create_handler(with_conf(params, {key: params.config[key] for key in params.config if is_known(key)}))
