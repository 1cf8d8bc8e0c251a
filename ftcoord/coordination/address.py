"""The address of a job: `etcd://h1:2379,h2:2379/<job>?min_replicas=2&join_timeout_ms=60000`.

The address contains the options, so nothing has to be stored before a job starts, and nothing can be lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote, urlencode

from ftcoord.config import EtcdConfig, whole
from ftcoord.core.layout import KEY_PREFIX, quorum_prefix
from ftcoord.core.quorum import QuorumOptions
from ftcoord.errors import ConfigError
from ftcoord.escaping import HIDDEN, redacted
from ftcoord.job_url import SCHEMES, endpoints_of, parse_job_url

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


def fresh_name() -> str:
    """A name for a job that no other job has."""
    return uuid.uuid4().hex


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
