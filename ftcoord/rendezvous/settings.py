"""The parameters that torchrun gives a rendezvous backend (endpoint, run id, ``rdzv_conf``), checked and frozen.

`_KEYS` lists all of ``rdzv_conf``: torch's own keys, those of the old etcd backends, and ftcoord's. A value may be text
(from the command line) or a number (from Python). None counts as not given, as in torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ftcoord import config
from ftcoord.config import EtcdConfig, Given, choice, seconds, text, whole
from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.core.rendezvous import RoundOptions
from ftcoord.errors import ConfigError
from ftcoord.escaping import HIDDEN, redacted


def _one_of(**choices: object) -> Callable[[str, object], object]:
    word = choice(*choices)
    return lambda key, value: choices[word(key, value)]


def _user(key: str, value: object) -> str:
    if isinstance(value, str) and ":" in value:
        allowed = "give a user name without ':'; the password goes in FTCOORD_PASSWORD or FTCOORD_PASSWORD_FILE"
        raise ConfigError(key, HIDDEN, allowed)
    return text(key, value)


_attempts = whole(1, 1000)
_lease_ttl = whole(2, 3600, " (seconds); etcd on default settings grants no lease shorter than 2 s")

_KEYS: dict[str, tuple[str, Callable[[str, object], object]]] = {
    "join_timeout": ("join_timeout", seconds),
    "timeout": ("join_timeout", seconds),  # torchrun always adds it
    "last_call_timeout": ("last_call_timeout", seconds),
    "close_timeout": ("close_timeout", seconds),
    "settle_timeout": ("settle_timeout", seconds),
    "request_timeout": ("request_timeout", seconds),
    "read_timeout": ("request_timeout", seconds),
    "heartbeat_timeout": ("request_timeout", seconds),
    "lease_ttl": ("lease_ttl", _lease_ttl),
    "keep_alive_interval": ("keep_alive_interval", seconds),
    "keep_alive_max_attempt": ("keep_alive_max_attempt", _attempts),
    "run_ttl": ("run_ttl", whole(1, 10**9, " (seconds)")),
    "on_member_loss": ("recall_on_loss", _one_of(restart=True, ignore=False)),
    "orphans": ("orphans", choice("end", "leave")),
    "restart": ("restart", choice("failed", "always", "never")),
    "on_spare_close": ("on_spare_close", choice("exit", "raise")),
    "key_prefix": ("key_prefix", config.key_path),
    "etcd_prefix": ("key_prefix", config.key_path),
    "timers": ("timers", config.switch),
    "protocol": ("secure", _one_of(http=False, https=True)),
    "ca_cert": ("ca_cert", text),
    "cacert": ("ca_cert", text),
    "cert": ("cert", text),
    "ssl_cert": ("cert", text),
    "key": ("key", text),
    "ssl_cert_key": ("key", text),
    "server_name": ("server_name", text),
    "user": ("user", _user),
}
"""By key of ``rdzv_conf``: the setting, which an earlier key may have set already, and the parser of its values."""
CONF_NAMES = tuple(_KEYS)
_LOGIN = ("ca_cert", "cert", "key", "server_name", "user")  # what EtcdConfig.load takes, and an embedded etcd does not

_REFUSED = {
    "password": "every user of this machine can read a command line; set FTCOORD_PASSWORD, or set "
    "FTCOORD_PASSWORD_FILE to the path of a file that holds it",
    "is_host": "only for c10d: no agent hosts the store here, so leave it out",
    "store_type": "only for c10d: etcd is the store here, so leave it out",
    "cas_backoff_max_seconds": "only for c10d and etcd-v2: nothing is retried in a loop here, so leave it out",
    "rank": "only for static: ranks are decided by the rendezvous, so leave it out",
}
_SECRET_KEY = re.compile("pass|pwd|secret|token|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RunTimes:
    """How long things may take, and how long they live, in seconds.

    Attributes:
        join_timeout: how long to wait for a round with enough nodes.
        close_timeout: how long closing the run may take.
        request_timeout: how long one call to etcd may take; equals that of the settings' `etcd` if that is given.
        lease_ttl: how long a silent node counts as alive. etcd may grant more.
        run_ttl: how long the run's state outlives its last agent.
    """

    join_timeout: float = 600.0
    close_timeout: float = 30.0
    request_timeout: float = 5.0
    lease_ttl: int = 5
    run_ttl: int = 3600

    def __post_init__(self) -> None:
        if self.run_ttl <= 4 * self.lease_ttl:
            allowed = f"a run must outlive short silences: give more than 4 x lease_ttl, {4 * self.lease_ttl}"
            raise ConfigError("run_ttl", self.run_ttl, allowed)


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """All settings of a rendezvous handler.

    Attributes:
        backend: torchrun's name of the backend.
        run_id: the run's id: any text but white space alone. It is taken as it is, including white space.
        min_nodes: the fewest nodes that a round may have, at least 1.
        max_nodes: the most nodes that it may have.
        local_addr: this node's address for other nodes; None to find it automatically.
        etcd: how to reach etcd; None starts an embedded one.
        times: how long things may take.
        rounds: when a round is complete or recalled, and which closed runs a new start may continue.
        orphans: when this process dies, ``end`` the processes that it started (its workers), or ``leave`` them.
        on_spare_close: how a spare ends when its run closes, and a drained node: ``exit`` with status 0, or ``raise``
            RendezvousGracefulExitError. The latter is for programs that drive an agent themselves: torchrun crashes on
            it with an AttributeError.
        key_prefix: the prefix of all runs in etcd; begins with ``/`` and does not end with it.
        timers: whether the agent reaps workers whose expiration timers have expired.
    """

    backend: str
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    etcd: EtcdConfig | None
    times: RunTimes = field(default_factory=RunTimes)
    rounds: RoundOptions = field(default_factory=RoundOptions)
    orphans: Literal["end", "leave"] = "end"
    on_spare_close: Literal["exit", "raise"] = "exit"
    key_prefix: str = KEY_PREFIX
    timers: bool = False

    def __post_init__(self) -> None:
        config.full_text("run_id", self.run_id, "give the job an id that is not empty (--rdzv-id)")
        for name, count, least in (("min_nodes", self.min_nodes, 1), ("max_nodes", self.max_nodes, self.min_nodes)):
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise ConfigError(name, redacted(count), f"give a whole number, at least {least} (--nnodes=MIN:MAX)")

    @property
    def prefix(self) -> str:
        """The key prefix of this run, without a trailing slash. All keys that the run writes are below it.

        The run id is percent-encoded (``/`` becomes ``%2F``), so it is one path segment. Under one `key_prefix`, two
        runs never share keys, and no run is below another. A character of an id takes up to 12 bytes; etcd accepts ids
        of several hundred characters. Not checked: whether one `key_prefix` is below another (``/a`` and ``/a/b``).
        """
        return run_prefix(self.key_prefix, self.run_id)

    @classmethod
    def parse(
        cls,
        *,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None,
        conf: Mapping[str, object],
        env: Mapping[str, str] | None = None,
    ) -> RendezvousSettings:
        """Check the parameters of torch's `RendezvousParameters`, before any socket is opened.

        Args:
            endpoint: as `EtcdConfig.load` takes it; ``embedded`` starts an etcd here; empty takes the environment's.
            conf: ``rdzv_conf``; see `_KEYS`. The environment supplies etcd settings that it leaves out.
            env: the variables; None reads ``os.environ``.

        Raises:
            ConfigError: names the key, its value and what is allowed.
        """
        found = _read(conf)
        if "lease_ttl" not in found and (lease := _lease_from_keep_alive(found)) is not None:
            found["lease_ttl"] = lease
        etcd = _etcd(endpoint, found, env)
        if etcd is not None:
            found["request_timeout"] = Given("request_timeout", etcd.request_timeout)
        elif isinstance(max_nodes, int) and max_nodes > 1:
            allowed = (
                "embedded serves this agent only: --nnodes must be 1, or start `ftcoord server` and name it in the"
                " --rdzv-endpoint of all nodes"
            )
            raise ConfigError("--nnodes", f"{min_nodes}:{max_nodes}", allowed)
        return cls(
            backend=text("backend", backend),
            run_id=run_id,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            local_addr=_local_addr(local_addr),
            etcd=etcd,
            times=RunTimes(**_part(found, RunTimes)),
            rounds=RoundOptions(**_part(found, RoundOptions)),
            **_part(found, cls),
        )


def _read(conf: Mapping[str, object]) -> dict[str, Given]:
    """The values of `conf`, by setting. Each is checked, even one that an earlier row of the table overrides."""
    for key in conf:
        if key not in CONF_NAMES:
            raise _unknown(key, conf[key])
    found: dict[str, Given] = {}
    for name, (setting, parse) in _KEYS.items():
        if conf.get(name) is not None:
            value = parse(name, conf[name])
            found.setdefault(setting, Given(name, value))
    return found


def _part(found: Mapping[str, Given], of: type) -> dict[str, Any]:
    """The values that are fields of this class."""
    return {one.name: found[one.name].value for one in fields(of) if one.name in found}


def _unknown(key: str, value: object) -> ConfigError:
    shown = HIDDEN if _SECRET_KEY.search(str(key)) else redacted(value)
    if key in _REFUSED:
        return ConfigError(key, shown, _REFUSED[key])
    close = difflib.get_close_matches(str(key), CONF_NAMES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    keys = ", ".join(sorted(CONF_NAMES))
    return ConfigError(key, shown, f"there is no such key in rdzv_conf; {hint}The keys are: {keys}")


def _lease_from_keep_alive(found: Mapping[str, Given]) -> Given | None:
    """The TTL in torch's terms: a node is dead after `keep_alive_max_attempt` intervals without a keep-alive."""
    given = found.get("keep_alive_interval") or found.get("keep_alive_max_attempt")
    if given is None:
        return None
    interval = found.get("keep_alive_interval", Given("", 5.0)).value
    attempts = found.get("keep_alive_max_attempt", Given("", 3)).value
    ttl = math.ceil(round(interval * attempts, 6))  # 1.1 x 10 is 11, not 11.000000000000002
    if ttl > 3600:
        allowed = f"{interval:g} s x {attempts} attempts must be at most 3600 s; or give lease_ttl"
        raise ConfigError(given.name, given.value, allowed)
    return Given(given.name, max(2, ttl))


def _etcd(endpoint: str, found: Mapping[str, Given], env: Mapping[str, str] | None) -> EtcdConfig | None:
    arguments = {name: found[name] for name in (*_LOGIN, "secure", "request_timeout") if name in found}
    if not isinstance(endpoint, str) or endpoint.strip().lower() != config.EMBEDDED:
        names = {"endpoints": "endpoint", **{name: item.name for name, item in arguments.items()}}
        given = {name: item.value for name, item in arguments.items()}
        return EtcdConfig.load(endpoint, env=env, names=names, **given)
    for name in (*_LOGIN, "secure"):
        if name in found and found[name].value is not False:
            item = found[name]
            shown = "https" if name == "secure" else redacted(item.value)
            allowed = "leave it out: the embedded etcd is local, in plaintext, and has a login of its own"
            raise ConfigError(item.name, shown, allowed)
    return None


def _local_addr(local_addr: str | None) -> str | None:
    if local_addr is None or local_addr == "":
        return None
    host = config.parse_host(local_addr.strip()) if isinstance(local_addr, str) else None
    if host is None or host in ("0.0.0.0", "::"):
        allowed = "give this node's DNS name or IP address, without a port (--local-addr)"
        raise ConfigError("local_addr", redacted(local_addr), allowed)
    return host
