"""Makes a rendezvous handler from torchrun's parameters."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler, RendezvousParameters

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ConfigError, EtcdError
from ftcoord.escaping import redacted
from ftcoord.etcd.client import SharedClient, unusable
from ftcoord.logs import show_log_lines
from ftcoord.metrics.exporter import MetricsAddress
from ftcoord.rendezvous.bootstrap import check_local_addr
from ftcoord.rendezvous.handler import EtcdRendezvousHandler
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

NO_ID: Final = "none"
"""The id that torchrun gives a job without `--rdzv-id`."""
LONGEST_FOLDER: Final = 255 - 9
"""Bytes of an id that a name of torch's log folder can contain: torch adds nine more."""


class OpenedRun(NamedTuple):
    """A run's settings, and a client whose etcd has answered; `server` is the embedded etcd, if there is one."""

    settings: RendezvousSettings
    etcd: SharedClient
    server: EtcdServer | None


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that `torchrun --rdzv-backend=etcd-v3` uses. It has joined no round yet.

    Raises:
        ConfigError (a ValueError): bad settings, before any socket is opened.
        RendezvousConnectionError: etcd refuses, or does not answer within `join_timeout` seconds.
        ServerError: the embedded etcd cannot be started.
    """
    show_log_lines()
    metrics_at = MetricsAddress.of_environment()
    handler = EtcdRendezvousHandler(*open_run(params))
    handler.prepare(metrics_at)
    return handler


def check_for_torch(params: RendezvousParameters) -> None:
    """Raises ConfigError for an id, or a name of this host, that torch's agent cannot use. It names its log folder
    after the id, and looks up the name.

    For an agent that torch starts: it would end with another exception, after it has joined.
    """
    try:
        socket.getfqdn()
    except UnicodeError as error:
        allowed = f"torch cannot look it up ({error}): its parts must have 1 to 63 ASCII characters (`hostname NAME`)"
        raise ConfigError("host name", socket.gethostname(), allowed) from None
    run_id = params.run_id
    if isinstance(run_id, str) and ("/" in run_id or len(os.fsencode(run_id)) > LONGEST_FOLDER):
        allowed = f"torch names a log folder after it: give an id without '/', of at most {LONGEST_FOLDER} bytes"
        raise ConfigError("run_id", redacted(run_id), f"{allowed} (--rdzv-id)")


def with_conf(params: RendezvousParameters, conf: Mapping[str, object]) -> RendezvousParameters:
    """The same parameters with a different ``rdzv_conf``."""
    return RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, **conf
    )


def open_run(params: RendezvousParameters) -> OpenedRun:
    """Check the parameters, and connect. Raises what `create_handler` raises."""
    settings = RendezvousSettings.parse(
        backend=params.backend,
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        conf=params.config,
    )
    check_local_addr(settings.local_addr)
    if settings.etcd is not None:
        return OpenedRun(_with_id(settings), connect(settings.etcd, settings.join_timeout), None)
    server = EtcdServer(login=True)
    server.start()
    try:
        return OpenedRun(settings, connect(server.config(settings.request_timeout)), server)
    except RendezvousConnectionError:
        server.stop()
        raise


def _with_id(settings: RendezvousSettings) -> RendezvousSettings:
    """The settings of a run of its own. Raises ConfigError if other nodes would have to know its id."""
    if settings.run_id != NO_ID:
        return settings
    if settings.max_nodes > 1:
        allowed = (
            "give all nodes of a job the same --rdzv-id, and each job another: all jobs without one would be one run"
        )
        raise ConfigError("run_id", NO_ID, allowed)
    run_id = str(uuid.uuid4())
    log.info("no --rdzv-id was given: the id of this run is %s", run_id)
    return replace(settings, run_id=run_id)


def connect(config: EtcdConfig, join_timeout: float = 0.0) -> SharedClient:
    """Make a client whose etcd has answered. Raises RendezvousConnectionError.

    An etcd that is not there yet is awaited for `join_timeout` seconds; 0: for one request.

    It shares the process's connection, because each connection with a watch costs three threads and a stream in etcd.
    """
    client = SharedClient(config)
    try:
        client.await_answer(join_timeout or config.request_timeout, "join_timeout")
    except EtcdError as error:
        client.close()
        raise RendezvousConnectionError(unusable(config, error)) from None
    return client
