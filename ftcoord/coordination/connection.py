"""A client of a job's etcd, and its failures in torchft's words: one line that says all, with no chain before it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

from ftcoord.concurrency import detached
from ftcoord.coordination import checks
from ftcoord.coordination.address import Job, parse_address
from ftcoord.errors import ConfigError, EtcdError, ForkedProcessError, StateError
from ftcoord.etcd.shared import SharedClient

ATTEMPT: float = 5.0
"""Seconds that one request to etcd may take."""


def connect(address: str, connect_timeout: float) -> tuple[Job, SharedClient]:
    """The job of an address, and a client whose etcd has answered. Raises RuntimeError after `connect_timeout` seconds.

    Also for a malformed address, as torchft does; but at once.
    """
    try:
        job = parse_address(address)
        client = SharedClient(replace(job.config(), request_timeout=ATTEMPT))
    except ConfigError as error:
        raise unreachable(address, connect_timeout, error) from None
    with contextlib.ExitStack() as undo:
        undo.callback(client.close)
        try:
            client.status(timeout=max(connect_timeout, 0.05))
        except EtcdError as error:
            raise unreachable(address, connect_timeout, error) from None
        undo.pop_all()
    return job, client


def when_forgotten(owner: object, close: Callable[..., None], *arguments: object) -> None:
    """Has `close(*arguments)` called when nobody holds `owner` any more; not at the end of the process.

    On a thread of its own, as `detached` says.
    """
    weakref.finalize(owner, detached, close, *arguments).atexit = False


def unreachable(address: str, connect_timeout: float, problem: object) -> RuntimeError:
    """What is raised where nobody is found at an address in time; users match the beginning of its text."""
    return RuntimeError(
        f"failed to connect to {address.partition('?')[0]} within timeout of {connect_timeout:g}s; verify the"
        f" address and that etcd is up: {problem}"
    )


def check_process(pid: int) -> None:
    """Raises ForkedProcessError in any other process than that of this `pid`, before a lock of its is touched."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            f"this belongs to process {pid}, which was forked: a child can use none of its connections; start"
            f" processes by multiprocessing's 'spawn', or fork before anything of ftcoord is made"
        )


@contextlib.contextmanager
def torchft_errors() -> Iterator[None]:
    """Raises TimeoutError and RuntimeError with torchft's texts."""
    try:
        yield
    except TimeoutError as error:
        raise checks.timed_out(str(error)) from None
    except StateError as error:
        raise checks.failed("Internal", str(error)) from None
    except EtcdError as error:
        raise checks.failed("Unavailable", str(error)) from None
