"""The address of a job, `etcd://h1:2379,h2:2379/<job>?min_replicas=2&join_timeout_ms=60000`; the way from it to the
job's etcd, and the address at which others reach this host.

The address contains the options, so nothing has to be stored before a job starts, and nothing can be lost.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote, urlencode

from ftcoord.config import EtcdConfig, whole
from ftcoord.coordination.api import unreachable
from ftcoord.core.layout import KEY_PREFIX, quorum_prefix
from ftcoord.core.quorum import QuorumOptions
from ftcoord.errors import ConfigError, EtcdError
from ftcoord.escaping import HIDDEN, redacted
from ftcoord.etcd.addresses import own_addresses
from ftcoord.etcd.client import SharedClient
from ftcoord.job_url import SCHEMES, endpoints_of, parse_job_url

log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 5.0
"""Seconds that one request to etcd may take."""
DAY_MS: Final = 24 * 3600 * 1000
SHORTEST_TIMEOUT_MS: Final = 3000
"""The shortest heartbeat timeout that etcd's leases keep: they live for 2 s or more."""
_FORM: Final = "write it as etcd://host:port,host:port/job?min_replicas=2"
_LIGHTHOUSE: Final = (
    "this is the address of a lighthouse or a gateway, which torchft's own classes take: run the script without"
    f" ftcoord.torchft to use it; for ftcoord.torchft {_FORM}"
)


@dataclass(frozen=True, slots=True)
class Job:
    """A job, its etcd and its rules. Times are in milliseconds, as in torchft's command line.

    Args:
        scheme: etcd, or etcds for TLS; with +srv for members that DNS names.
        endpoints: a comma-separated list, or with +srv a domain; empty takes those of the environment, or
            127.0.0.1:2379.
        name: the job's name; its keys are below `/ftcoord/v2/<name>/quorum`.
        min_replicas: the fewest replicas that form a quorum.
        join_timeout_ms: how long a quorum waits for replicas that are alive but do not ask.
        heartbeat_timeout_ms: how long a replica counts as alive after its last beat; see `heartbeat_timeout`.
        allow_kill: 1 if anyone whom a manager's port serves may end its process; else 0.
        native: 1 if a manager's port serves torchft's own classes too, and so anyone who reaches it; else 0.
        bind: the address at which managers and who decides listen; empty for the one that they publish.
    """

    scheme: str
    endpoints: str
    name: str
    min_replicas: int = 1
    join_timeout_ms: int = 60_000
    heartbeat_timeout_ms: int = 5_000
    allow_kill: int = 0
    native: int = 0
    bind: str = ""

    @property
    def prefix(self) -> str:
        """The prefix of all of the job's keys."""
        return quorum_prefix(KEY_PREFIX, self.name)

    @property
    def options(self) -> QuorumOptions:
        """The rules of its quorums."""
        return QuorumOptions(self.min_replicas, self.join_timeout_ms / 1000)

    @property
    def heartbeat_timeout(self) -> float:
        """The TTL of its replicas' leases in seconds: `heartbeat_timeout_ms`, but no less than leases can do."""
        return max(self.heartbeat_timeout_ms, SHORTEST_TIMEOUT_MS) / 1000

    @property
    def silent_after(self) -> float:
        """`heartbeat_timeout_ms` in seconds, for those that get a replica's beats themselves."""
        return self.heartbeat_timeout_ms / 1000

    def config(self, env: Mapping[str, str] | None = None) -> EtcdConfig:
        """How to reach the job's etcd. User, password and TLS files come from the environment. Raises ConfigError."""
        return EtcdConfig.load(endpoints_of(self.scheme, self.endpoints), secure=SCHEMES[self.scheme], env=env)

    def at(self, config: EtcdConfig) -> Job:
        """The same job, with its etcd's endpoints in the address."""
        scheme = "etcds" if config.tls else "etcd"
        if config.endpoints[0].is_srv:
            scheme += "+srv"
        return replace(self, scheme=scheme, endpoints=",".join(one.target for one in config.endpoints))

    def __str__(self) -> str:
        query = {name: getattr(self, name) for name in _OPTIONS}
        for name, default in _UNSAID.items():
            if query[name] == default:
                del query[name]
        return f"{self.scheme}://{self.endpoints}/{quote(self.name, safe='')}?{urlencode(query)}"


def _address(key: str, value: str) -> str:
    try:
        return str(ip_address(value.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise ConfigError(key, redacted(value), "give an IP address without a port, as 10.0.0.7 or 0.0.0.0") from None


_OPTIONS: Final[dict[str, Callable[[str, str], Any]]] = {
    "min_replicas": whole(1, 2**31 - 1),
    "join_timeout_ms": whole(0, DAY_MS),
    "heartbeat_timeout_ms": whole(10, DAY_MS),
    "allow_kill": whole(0, 1),
    "native": whole(0, 1),
    "bind": _address,
}
_UNSAID: Final = {"allow_kill": 0, "native": 0, "bind": ""}
"""Options that are left out of an address when they have these values."""


def parse_address(address: str) -> Job:
    """The job of an address. Raises ConfigError, before any socket is opened."""
    if address.strip().lower().startswith(("http:", "https:")):
        raise ConfigError("address", redacted(address), _LIGHTHOUSE)
    scheme, place, name, given = parse_job_url("address", address, _FORM)
    if not name:
        raise ConfigError("address", redacted(address), f"it names no job; {_FORM}")
    for key in given:
        if key not in _OPTIONS:
            close = get_close_matches(key, _OPTIONS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(key, HIDDEN, f"{hint}An address takes {', '.join(_OPTIONS)}")
    options = {key: _OPTIONS[key](key, value) for key, value in given.items()}
    job = Job(scheme, place, name, **options)
    job.config()
    return job


# -- to etcd --------------------------------------------------------------------------------------------------------


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


# -- to this host ------------------------------------------------------------------------------------------------------


UNSET: Final = "[::]"
"""What torchft's Manager binds to, whatever its user wants: it stands for no choice."""
EVERYWHERE: Final = ("0.0.0.0", "::", "[::]")
"""What stands for all addresses of a host."""


def own_place(bind: str, hostname: str, job: Job) -> tuple[str, str]:
    """Where to listen, as `host:port`, and the host to publish.

    One address, for whoever reaches the port takes part: that of the job's `bind=`; else that of the argument `bind`;
    else that of `hostname`. A name that is only known as loopback here (as Debian's /etc/hosts has the host's own) may
    be known to others by another address; then it is the address from which this host reaches etcd.
    """
    host, colon, port = bind.rpartition(":")
    if job.bind:
        return f"{in_url(job.bind)}:{port}", hostname if job.bind in EVERYWHERE else job.bind
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
        with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
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
