"""Expiration timers under torchrun: the agent's handler serves those of its workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.namespace import Namespace
from ftcoord.timer.environment import VARIABLE, describe


def serve_timers(prefix: str, etcd: EtcdClient) -> Callable[[], None]:
    """Start a server for this host, and tell the workers that are started from now on; what ends both."""
    from ftcoord.timer.server import EtcdTimerServer

    ends = contextlib.ExitStack()
    server = EtcdTimerServer(Namespace(prefix, etcd))
    server.start()
    ends.callback(server.stop)
    os.environ[VARIABLE] = describe(prefix, etcd.config)
    ends.callback(os.environ.pop, VARIABLE, None)
    return ends.close
