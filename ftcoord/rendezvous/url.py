"""`etcd://h1:2379,h2:2379/run?rank=0&world_size=4`: an init_method, checked before any socket is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from ftcoord.config import redacted, url_name, whole
from ftcoord.errors import ConfigError
from ftcoord.rendezvous.settings import RendezvousSettings

INIT_METHODS: Final[dict[str, dict[str, str]]] = {"etcd": {}, "etcds": {"protocol": "https"}}
NO_LIMIT: Final = 2**31 - 1
_OWN: Final = ("rank", "world_size", "local_addr")
_world = whole(1, NO_LIMIT)
_rank = whole(0, NO_LIMIT)


@dataclass(frozen=True, slots=True)
class InitUrl:
    """A run, its number of members (None: all that join before the last call ends), and this member's rank."""

    settings: RendezvousSettings
    world_size: int | None
    rank: int | None


def parse_url(url: str, timeout: float, env: Mapping[str, str] | None = None) -> InitUrl:
    """Parse the URL. `timeout`, in seconds, is the join timeout if the URL has none.

    The path is the run id, percent-encoded. Besides `rank`, `world_size` and `local_addr` the query takes the keys of
    `rdzv_conf`. The default port is 2379; without a host, the endpoints come from FTCOORD_ENDPOINTS.

    Raises ConfigError.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError("init_method", redacted(url), f"{error}; write an IPv6 address as [::1]:2379") from None
    if parts.fragment:
        raise ConfigError("init_method", redacted(url), "write a # in the run id as %23")
    if parts.scheme not in INIT_METHODS:
        raise ConfigError(
            "init_method", redacted(url), f"begin it with {' or '.join(f'{name}://' for name in INIT_METHODS)}"
        )
    query = _query(url, parts.query)
    world_size = _world("world_size", query["world_size"]) if "world_size" in query else None
    rank = _rank("rank", query["rank"]) if "rank" in query else None
    if rank is not None and (world_size is None or rank >= world_size):
        raise ConfigError("rank", rank, "give the world_size too, and a rank below it")
    settings = RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint=parts.netloc,
        run_id=url_name(parts.path),
        min_nodes=world_size or 1,
        max_nodes=world_size or NO_LIMIT,
        local_addr=query.get("local_addr"),
        conf={
            "join_timeout": timeout,
            **INIT_METHODS[parts.scheme],
            **{k: v for k, v in query.items() if k not in _OWN},
        },
        env=env,
    )
    return InitUrl(settings, world_size, rank)


def _query(url: str, text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise ConfigError("init_method", redacted(url), "write its query as key=value&key=value") from None
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(twice, "given twice", "give it once in the init_method")
    return dict(pairs)
