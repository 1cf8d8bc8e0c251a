"""Expiration timers in etcd, for torch's `configure()` and `expires()`. They survive restarts; every host sees them.

    import torch.distributed.elastic.timer as timer
    timer.configure(ftcoord.timer.EtcdTimerClient())     # in a worker of torchrun, with rdzv_conf timers=1
    with timer.expires(after=60):
        ...

See `docs/timers.md`. `EtcdTimerClient` and `EtcdTimerServer` need torch, and load it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftcoord.core.timers import TimerInfo
from ftcoord.timer.listing import Subscription, active, on_expired

if TYPE_CHECKING:
    from ftcoord.timer.client import EtcdTimerClient
    from ftcoord.timer.server import EtcdTimerServer

_HOMES = {"EtcdTimerClient": "ftcoord.timer.client", "EtcdTimerServer": "ftcoord.timer.server"}

__all__ = ["EtcdTimerClient", "EtcdTimerServer", "Subscription", "TimerInfo", "active", "on_expired"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcoord.timer' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"ftcoord.timer.{name} needs PyTorch: pip install torch") from error
