"""The orders of a process to its sentinel: JSON, one object per line, through a pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypedDict

from ftcoord.config import Credentials, Endpoint, EtcdConfig, Tls


class Order(TypedDict, total=False):
    """One line.

    Fields:
        etcd, config: the number of an etcd, and how to reach it; see `config_raw`.
        etcd, keep, at, ttl, deaths, was, rests: a lease. `at` is when it was renewed, on the monotonic clock that all
            processes of a machine share; `ttl` its TTL in seconds; `etcd` the number of its etcd. If the process dies,
            the cause is written below the prefix `deaths`, for the lease's member id and for the ids in `was`; an empty
            `deaths` is for a lease that is no member's.
            `rests`: do not renew it. May be repeated.
        drop: a lease that no longer needs the sentinel.
        orphans: the mark of the processes to end when this one has ended, empty for none; see
            `ftcoord.primitives.orphans`.
    """

    etcd: int
    config: Mapping[str, Any]
    keep: int
    at: float
    ttl: float
    deaths: str
    was: Sequence[str]
    rests: bool
    drop: int
    orphans: str


def line_of(order: Order) -> bytes:
    """The order as it goes through the pipe."""
    return json.dumps(order).encode() + b"\n"


def config_from(raw: Mapping[str, Any]) -> EtcdConfig:
    """The configuration that `config_raw` returned."""
    return EtcdConfig(
        tuple(Endpoint(*one) for one in raw["endpoints"]),
        Tls(*raw["tls"]) if raw["tls"] else None,
        Credentials(*raw["login"]) if raw["login"] else None,
        raw["request_timeout"],
    )


def config_raw(config: EtcdConfig) -> dict[str, Any]:
    """A configuration for JSON, password included: for a pipe, never for a command line."""
    tls, login = config.tls, config.credentials
    return {
        "endpoints": [astuple(endpoint) for endpoint in config.endpoints],
        "tls": (*map(_absolute, (tls.ca, tls.cert, tls.key)), tls.server_name) if tls else None,
        "login": (login.user, login.password) if login else None,
        "request_timeout": config.request_timeout,
    }


def _absolute(path: str | None) -> str | None:
    """The sentinel has its own working directory."""
    return path and os.path.abspath(path)
