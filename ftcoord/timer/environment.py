"""What an agent passes to its workers in their environment: the run whose timers it serves, and how to reach its etcd.

The password is included only for an embedded etcd. Else an agent takes it from the environment, or from a file named
there, so workers have it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final

from ftcoord.config import EtcdConfig
from ftcoord.errors import ConfigError
from ftcoord.etcd.namespace import Namespace
from ftcoord.etcd.shared import SharedClient

VARIABLE: Final = "FTCOORD_TIMERS"
_PASSWORDS: Final = ("FTCOORD_PASSWORD", "FTCOORD_PASSWORD_FILE", "ETCDCTL_USER", "ETCDCTL_PASSWORD")


def describe(prefix: str, config: EtcdConfig, with_password: bool = False) -> str:
    """The variable's value for a run."""
    tls, login = config.tls, config.credentials
    told: dict[str, object] = {
        "prefix": prefix,
        "endpoints": config.describe(),
        "request_timeout": config.request_timeout,
        "ca_cert": tls.ca if tls else None,
        "cert": tls.cert if tls else None,
        "key": tls.key if tls else None,
        "server_name": tls.server_name if tls else None,
        "user": login.user if login else None,
        "password": login.password if login and with_password else None,
    }
    return json.dumps({name: value for name, value in told.items() if value is not None})


def inherited(env: Mapping[str, str] | None = None) -> Namespace:
    """The run that the agent serves. Raises ConfigError when there is none, before any socket is opened."""
    variables = os.environ if env is None else env
    text = variables.get(VARIABLE, "")
    if not text:
        allowed = "name the run, or start this worker with torchrun and timers=1 in --rdzv-conf"
        raise ConfigError("run", None, allowed)
    try:
        told = dict(json.loads(text))
        prefix, endpoints = told.pop("prefix"), told.pop("endpoints")
        passwords = {name: value for name, value in variables.items() if "user" in told and name in _PASSWORDS}
        config = EtcdConfig.load(endpoints, env=passwords, **told)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(VARIABLE, "<text>", "this is not what an agent of ftcoord sets; unset it") from error
    client = SharedClient(config)
    return Namespace(prefix, client, client)
