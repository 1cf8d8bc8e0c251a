"""Expiration timers under torchrun: the agent's handler runs the server for its workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ftcoord.core.timers import TimerInfo
from ftcoord.etcd.namespace import Namespace
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.orphans import bears
from ftcoord.timer.environment import VARIABLE, describe


def serve_timers(
    prefix: str, etcd: SharedClient, expiring: Callable[[TimerInfo], object], is_embedded: bool, mark: str
) -> Callable[[], None]:
    """Start a timer server for the workers with this agent's `mark`, and let those started from now on find it; returns
    the function that ends both.

    `expiring` is called on the server's thread with each timer of a worker that is about to be killed for it.

    The workers find the server through this process's environment, which torch's agent copies when it starts them:
    torch gives a handler no other way to reach them. So a process can serve only one run with timers.
    """
    from ftcoord.timer.server import EtcdTimerServer

    ends = contextlib.ExitStack()
    server = EtcdTimerServer(
        Namespace(prefix, etcd), expiring=expiring, may_reap=lambda worker: bears(worker.pid, mark)
    )
    server.start()
    ends.callback(server.stop)
    os.environ[VARIABLE] = describe(prefix, etcd.config, with_password=is_embedded)
    ends.callback(os.environ.pop, VARIABLE, None)
    return ends.close
