"""Fault-tolerant PyTorch coordination with nothing to run but etcd.

Rendezvous (needs torch):

- `EtcdRendezvousHandler`: one node's part in a run's rendezvous; torchrun makes it for `--rdzv-backend=etcd-v3`.
- `EtcdRendezvousBackend`: stores the state of torch's own rendezvous state machine (`etcd-v3-dynamic`).
- `register_init_methods`: lets `init_process_group` take `init_method="etcd://..."`.
- `install_legacy_names`: makes torch's backend names `etcd` and `etcd-v2` run on ftcoord.
- `AgreedStop`: tells each rank when to leave its loop, all at the same step.
- `EtcdStore`: a `torch.distributed.Store` whose keys live in etcd.

Coordination:

- `elastic`: training whose survivors go on in the same processes when others are lost; needs torch.
- `coordination`: torchft's coordination API without a lighthouse, and an `Observer` of jobs.
- `Heartbeat`: shows other processes that this one is alive, with some data.
- `watch_heartbeats`: iterates over the processes that join, change, leave and are lost.
- `timer`: expiration timers for `torch.distributed.elastic.timer`.

etcd:

- `EtcdClient`: a client of etcd's v3 API.
- `EtcdConfig`: endpoints, TLS and login of an etcd cluster.
- `Get`, `Put`, `Delete`: the operations of a transaction.
- `Compare`: a guard of a transaction.
- `Span`: the keys that a read, a deletion or a watch covers.
- `Session`: a lease that this process keeps alive.
- `SessionState`: what a session knows of its lease: CONNECTED, SUSPENDED or LOST.
- `cause_of_death`: why the process that held a lease is gone.
- `EtcdServer`: an etcd server on this machine, for development and tests.

Errors:

- `errors`: every exception that ftcoord raises; all derive from `errors.FtcoordError`.

Each name is loaded when it is first used: importing ftcoord loads neither torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ftcoord import coordination as coordination, elastic as elastic, errors as errors, timer as timer
    from ftcoord._torchrun import install_legacy_names as install_legacy_names
    from ftcoord.config import EtcdConfig as EtcdConfig
    from ftcoord.core.layout import Span as Span
    from ftcoord.core.lease import SessionState as SessionState
    from ftcoord.embedded.server import EtcdServer as EtcdServer
    from ftcoord.etcd.api import Compare as Compare, Delete as Delete, Get as Get, Put as Put
    from ftcoord.etcd.client import EtcdClient as EtcdClient
    from ftcoord.heartbeat import Heartbeat as Heartbeat, watch_heartbeats as watch_heartbeats
    from ftcoord.primitives.deaths import cause_of_death as cause_of_death
    from ftcoord.primitives.session import Session as Session
    from ftcoord.rendezvous.backend import EtcdRendezvousBackend as EtcdRendezvousBackend
    from ftcoord.rendezvous.handler import EtcdRendezvousHandler as EtcdRendezvousHandler
    from ftcoord.rendezvous.init_method import register_init_methods as register_init_methods
    from ftcoord.stop import AgreedStop as AgreedStop
    from ftcoord.store import EtcdStore as EtcdStore

_HOMES = {
    "AgreedStop": "ftcoord.stop",
    "Compare": "ftcoord.etcd.api",
    "Delete": "ftcoord.etcd.api",
    "EtcdClient": "ftcoord.etcd.client",
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
    "install_legacy_names": "ftcoord._torchrun",
    "register_init_methods": "ftcoord.rendezvous.init_method",
    "watch_heartbeats": "ftcoord.heartbeat",
}

_MODULES = ("coordination", "elastic", "errors", "timer")
__all__ = sorted([*_HOMES, *_MODULES])


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
    """The public names and the dunder names; no submodules that happen to be loaded."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
