"""Expiration timers under torchrun: the agent's handler runs the server for its workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ftcoord.core.timers import TimerInfo
from ftcoord.etcd.namespace import Namespace
from ftcoord.etcd.shared import SharedClient
from ftcoord.timer.environment import VARIABLE, describe


def serve_timers(prefix: str, etcd: SharedClient, expiring: Callable[[TimerInfo], object]) -> Callable[[], None]:
    """Start a server for this host, and let workers that are started from now on find it; returns what ends both.

    `expiring` is called with each timer of a worker that is about to be killed for it, on the server's thread.

    The workers find it through this process's environment, which torch's agent copies when it starts them: torch gives
    a handler no other way to reach them. So only one run with timers can be served by a process.
    """
    from ftcoord.timer.server import EtcdTimerServer

    ends = contextlib.ExitStack()
    server = EtcdTimerServer(Namespace(prefix, etcd), expiring=expiring)
    server.start()
    ends.callback(server.stop)
    os.environ[VARIABLE] = describe(prefix, etcd.config)
    ends.callback(os.environ.pop, VARIABLE, None)
    return ends.close
