"""Connects to a job's etcd, and translates failures into torchft's errors: one line that says everything, without a
chain."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final

from ftcoord.coordination.address import SHORTEST_TIMEOUT_MS, Job, parse_address
from ftcoord.coordination.failure import KNOWN, Failure
from ftcoord.errors import EtcdError, ForkedProcessError
from ftcoord.etcd.client import SharedClient

log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 5.0
"""Seconds that one request to etcd may take."""


def connect(address: str, connect_timeout: float) -> tuple[Job, SharedClient]:
    """The job of an address, and a client whose etcd has answered.

    Raises ConfigError at once for a malformed address, and RuntimeError after `connect_timeout` seconds.
    """
    job = parse_address(address)
    if job.heartbeat_timeout_ms < SHORTEST_TIMEOUT_MS:
        _warn_of(job.heartbeat_timeout_ms)
    client = SharedClient(replace(job.config(), request_timeout=REQUEST_TIMEOUT))
    with contextlib.ExitStack() as undo:
        undo.callback(client.close)
        try:
            client.await_answer(max(connect_timeout, 0.05), "connect_timeout")
        except EtcdError as error:
            raise unreachable(address, connect_timeout, error) from None
        undo.pop_all()
    return job, client


@cache  # once in a process
def _warn_of(timeout_ms: int) -> None:
    log.warning(
        "heartbeat_timeout_ms=%d is raised to %d, the shortest that leases of etcd can do",
        timeout_ms,
        SHORTEST_TIMEOUT_MS,
    )


def unreachable(address: str, connect_timeout: float, problem: object, who: str = "etcd") -> RuntimeError:
    """The error for an address that nobody answers at in time. Users match the beginning of its text."""
    return RuntimeError(
        f"failed to connect to {address.partition('?')[0]} within timeout of {connect_timeout:g}s; verify the"
        f" address and that {who} is up: {problem}"
    )


def check_process(pid: int) -> None:
    """Raises ForkedProcessError in any process but `pid`. Call it before taking a lock, which a forked child may never
    get."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            f"this belongs to process {pid}, which was forked, and a child cannot use its connections: start processes"
            f" by multiprocessing's 'spawn', or fork before you use ftcoord"
        )


@contextlib.contextmanager
def torchft_errors() -> Iterator[None]:
    """Translates ftcoord's errors into TimeoutError and RuntimeError with torchft's texts."""
    try:
        yield
    except KNOWN as error:
        raise Failure.of(error).error() from None
