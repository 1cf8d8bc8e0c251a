"""`etcd://h1:2379,h2:2379/run?rank=0&world_size=4`: an init_method, checked before any socket is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ftcoord.config import whole
from ftcoord.errors import ConfigError
from ftcoord.job_url import SCHEMES, endpoints_of, parse_job_url
from ftcoord.rendezvous.settings import RendezvousSettings

NO_LIMIT: Final = 2**31 - 1
_FORM: Final = "write it as etcd://host:port,host:port/run?world_size=4"
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
    scheme, place, name, query = parse_job_url("init_method", url, _FORM)
    world_size = _world("world_size", query["world_size"]) if "world_size" in query else None
    rank = _rank("rank", query["rank"]) if "rank" in query else None
    if rank is not None and (world_size is None or rank >= world_size):
        raise ConfigError("rank", rank, "give the world_size too, and a rank below it")
    settings = RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint=endpoints_of(scheme, place),
        run_id=name,
        min_nodes=world_size or 1,
        max_nodes=world_size or NO_LIMIT,
        local_addr=query.get("local_addr"),
        conf={
            "join_timeout": timeout,
            **({"protocol": "https"} if SCHEMES[scheme] else {}),
            **{k: v for k, v in query.items() if k not in _OWN},
        },
        env=env,
    )
    return InitUrl(settings, world_size, rank)
