"""Fault-tolerant PyTorch coordination with nothing to run but etcd.

Public names are loaded when they are first used: importing ftcoord loads neither torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ftcoord import coordination, errors, timer
    from ftcoord.config import EtcdConfig
    from ftcoord.core.layout import Span
    from ftcoord.core.lease import SessionState
    from ftcoord.embedded.cluster import EtcdCluster
    from ftcoord.embedded.server import EtcdServer
    from ftcoord.etcd.api import Compare, Delete, Get, Put
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.heartbeat import Heartbeat, watch_heartbeats
    from ftcoord.primitives.deaths import cause_of_death
    from ftcoord.primitives.session import Session
    from ftcoord.recipes.barrier import Barrier
    from ftcoord.recipes.election import Election
    from ftcoord.rendezvous.backend import EtcdRendezvousBackend
    from ftcoord.rendezvous.handler import EtcdRendezvousHandler
    from ftcoord.rendezvous.init_method import register_init_methods
    from ftcoord.rendezvous.legacy import install_legacy_names
    from ftcoord.store import EtcdStore

_HOMES = {
    "Barrier": "ftcoord.recipes.barrier",
    "Compare": "ftcoord.etcd.api",
    "Delete": "ftcoord.etcd.api",
    "Election": "ftcoord.recipes.election",
    "EtcdClient": "ftcoord.etcd.client",
    "EtcdCluster": "ftcoord.embedded.cluster",
    "EtcdConfig": "ftcoord.config",
    "EtcdRendezvousBackend": "ftcoord.rendezvous.backend",
    "EtcdRendezvousHandler": "ftcoord.rendezvous.handler",
    "EtcdServer": "ftcoord.embedded.server",
    "EtcdStore": "ftcoord.store",
    "Get": "ftcoord.etcd.api",
    "Heartbeat": "ftcoord.heartbeat",
    "Put": "ftcoord.etcd.api",
    "Session": "ftcoord.primitives.session",
    "SessionState": "ftcoord.core.lease",
    "Span": "ftcoord.core.layout",
    "cause_of_death": "ftcoord.primitives.deaths",
    "install_legacy_names": "ftcoord.rendezvous.legacy",
    "register_init_methods": "ftcoord.rendezvous.init_method",
    "watch_heartbeats": "ftcoord.heartbeat",
}

__all__ = [
    "Barrier",
    "Compare",
    "Delete",
    "Election",
    "EtcdClient",
    "EtcdCluster",
    "EtcdConfig",
    "EtcdRendezvousBackend",
    "EtcdRendezvousHandler",
    "EtcdServer",
    "EtcdStore",
    "Get",
    "Heartbeat",
    "Put",
    "Session",
    "SessionState",
    "Span",
    "cause_of_death",
    "coordination",
    "errors",
    "install_legacy_names",
    "register_init_methods",
    "timer",
    "watch_heartbeats",
]


_MODULES = ("coordination", "errors", "timer")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ftcoord.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcoord' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"ftcoord.{name} needs PyTorch: pip install torch") from error


def __dir__() -> list[str]:
    """What is public, and what every module has; not what else happens to be loaded."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
