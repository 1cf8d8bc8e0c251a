"""Connects to a job's etcd, and finds the address at which others reach this host.

Failures become torchft's errors: one line that says everything, without a chain.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from ipaddress import ip_address
from typing import Final

from ftcoord.coordination.address import SHORTEST_TIMEOUT_MS, Job, parse_address
from ftcoord.coordination.checks import KNOWN, Failure
from ftcoord.errors import EtcdError, ForkedProcessError
from ftcoord.etcd.addresses import own_addresses
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


UNSET: Final = "[::]"
"""What torchft's Manager binds to, whatever its user wants: it stands for no choice."""
_EVERYWHERE: Final = ("0.0.0.0", "::", "[::]")


def own_place(bind: str, hostname: str, job: Job) -> tuple[str, str]:
    """Where to listen, as `host:port`, and the host to publish.

    One address, for whoever reaches the port takes part: that of the job's `bind=`; else that of the argument `bind`;
    else that of `hostname`. A name that is only known as loopback here (as Debian's /etc/hosts has the host's own) may
    be known to others by another address; then it is the address from which this host reaches etcd.
    """
    host, colon, port = bind.rpartition(":")
    if job.bind:
        return f"{in_url(job.bind)}:{port}", hostname if is_everywhere(job.bind) else job.bind
    if not colon or host != UNSET:
        return bind, hostname
    name = hostname.removeprefix("[").removesuffix("]")
    known = _addresses(name)
    own = [one for one in known if _is_own(one)]
    outside = [one for one in own if not ip_address(one).is_loopback]
    if outside:
        return f"{in_url(outside[0])}:{port}", hostname
    if own and name not in own and name != "localhost" and (towards := address_towards_etcd(job)):
        return f"{in_url(towards)}:{port}", towards
    if own:
        return f"{in_url(own[0])}:{port}", hostname
    log.warning(
        "the manager listens at all addresses of this host: %r is no address of it (%s). Give one with bind=ADDRESS in"
        " the job's address, or as the host name",
        hostname,
        ", ".join(known) or "it does not resolve",
    )
    return bind, hostname


def is_everywhere(bind: str) -> bool:
    """Whether it stands for all addresses of a host."""
    return bind in _EVERYWHERE


def _addresses(name: str) -> list[str]:
    """In the order in which the system prefers them, as it does for peers."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(one[4][0]).partition("%")[0] for one in found]


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards_etcd(job: Job) -> str:
    """The address from which this host reaches etcd; empty if that is on loopback."""
    found = own_addresses(job.config())
    return next((one for one in found if not ip_address(one.partition("%")[0]).is_loopback), "")


def in_url(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
