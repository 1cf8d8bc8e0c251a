"""Fault-tolerant PyTorch coordination with nothing to run but etcd.

Public names are loaded when they are first used: importing ftcoord loads neither torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ftcoord.config import EtcdConfig
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.etcd.cluster import EtcdCluster
    from ftcoord.etcd.server import EtcdServer
    from ftcoord.etcd.session import Session
    from ftcoord.rendezvous.backend import EtcdRendezvousBackend
    from ftcoord.rendezvous.handler import EtcdRendezvousHandler
    from ftcoord.rendezvous.init_method import register_init_methods
    from ftcoord.rendezvous.legacy import install_legacy_names
    from ftcoord.store import EtcdStore

_HOMES = {
    "EtcdClient": "ftcoord.etcd.client",
    "EtcdCluster": "ftcoord.etcd.cluster",
    "EtcdConfig": "ftcoord.config",
    "EtcdRendezvousBackend": "ftcoord.rendezvous.backend",
    "EtcdRendezvousHandler": "ftcoord.rendezvous.handler",
    "EtcdServer": "ftcoord.etcd.server",
    "EtcdStore": "ftcoord.store",
    "Session": "ftcoord.etcd.session",
    "install_legacy_names": "ftcoord.rendezvous.legacy",
    "register_init_methods": "ftcoord.rendezvous.init_method",
}

__all__ = [
    "EtcdClient",
    "EtcdCluster",
    "EtcdConfig",
    "EtcdRendezvousBackend",
    "EtcdRendezvousHandler",
    "EtcdServer",
    "EtcdStore",
    "Session",
    "install_legacy_names",
    "register_init_methods",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcoord' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"ftcoord.{name} needs PyTorch: pip install 'ftcoord[torch]'") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
