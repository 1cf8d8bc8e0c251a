"""Expiration timers under torchrun: the agent's handler runs the server for its workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ftcoord.core.timer_records import Worker
from ftcoord.core.timers import TimerInfo
from ftcoord.etcd.namespace import Namespace
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.orphans import bears
from ftcoord.primitives.watched_process import parent_of
from ftcoord.rendezvous.orphans import ProcessMark
from ftcoord.timer.environment import VARIABLE, describe


def serve_timers(
    prefix: str, etcd: SharedClient, expiring: Callable[[TimerInfo], object], is_embedded: bool
) -> Callable[[], None]:
    """Start a timer server for this agent's workers, and let workers started from now on find it; returns the function
    that ends both.

    `expiring` is called on the server's thread with each timer of a worker that is about to be killed for it.

    The workers find the server through this process's environment, which torch's agent copies when it starts them:
    torch gives a handler no other way to reach them. So a process can serve only one run with timers.
    """
    from ftcoord.timer.server import EtcdTimerServer

    ends = contextlib.ExitStack()
    server = EtcdTimerServer(Namespace(prefix, etcd), expiring=expiring, may_reap=_is_of_this_agent)
    server.start()
    ends.callback(server.stop)
    os.environ[VARIABLE] = describe(prefix, etcd.config, with_password=is_embedded)
    ends.callback(os.environ.pop, VARIABLE, None)
    return ends.close


def _is_of_this_agent(worker: Worker) -> bool:
    """Whether a process has this agent's mark, or descends from one that has it: an agent reaps nothing else, whatever
    a timer names. Another agent of this host has a server of its own.

    A process that hides its environment, even from its own user, counts if it descends from this agent.
    """
    pid, mark, hides = worker.pid, ProcessMark.of_process().text, False
    while pid > 1 and pid != os.getpid():
        try:
            if bears(pid, mark):
                return True
        except OSError:
            hides = True
        pid = parent_of(pid)
    return hides and pid == os.getpid()
