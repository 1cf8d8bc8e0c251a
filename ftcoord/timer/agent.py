"""Expiration timers under torchrun: the agent's handler runs the server for its workers, and tells them in their
environment which run that is, and how to reach its etcd.

The password is included only for an embedded etcd. Else an agent takes it from the environment, or from a file named
there, so workers have it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final

from ftcoord.config import EtcdConfig
from ftcoord.core.timers import TimerInfo
from ftcoord.errors import ConfigError
from ftcoord.etcd.client import Namespace, SharedClient

VARIABLE: Final = "FTCOORD_TIMERS"
_PASSWORDS: Final = ("FTCOORD_PASSWORD", "FTCOORD_PASSWORD_FILE", "ETCDCTL_USER", "ETCDCTL_PASSWORD")


def serve_timers(
    prefix: str,
    etcd: SharedClient,
    expiring: Callable[[TimerInfo], object],
    is_embedded: bool,
    *,
    mark: str,
) -> Callable[[], None]:
    """Start a timer server for the workers with this agent's `mark`, and let workers started from now on find it;
    returns the function that ends both.

    `expiring` is called on the server's thread with each timer of a worker that is about to be killed for it.

    The workers find the server through this process's environment, which torch's agent copies when it starts them:
    torch gives a handler no other way to reach them. So a process can serve only one run with timers.
    """
    from ftcoord.timer.server import EtcdTimerServer

    ends = ExitStack()
    server = EtcdTimerServer(Namespace(prefix, etcd), expiring=expiring, mark=mark)
    server.start()
    ends.callback(server.stop)
    os.environ[VARIABLE] = describe(prefix, etcd.config, with_password=is_embedded)
    ends.callback(os.environ.pop, VARIABLE, None)
    return ends.close


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
