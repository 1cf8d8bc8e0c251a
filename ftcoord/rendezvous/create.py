"""Makes a handler from torchrun's parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler, RendezvousParameters

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdError, EtcdUnavailable
from ftcoord.etcd.shared import SharedClient
from ftcoord.logs import show_log_lines
from ftcoord.metrics.exporter import MetricsAddress
from ftcoord.rendezvous.handler import EtcdRendezvousHandler
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)


class OpenedRun(NamedTuple):
    """A run's settings, and a client whose etcd has answered; `server` is that etcd if it was started here."""

    settings: RendezvousSettings
    etcd: SharedClient
    server: EtcdServer | None


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler that `torchrun --rdzv-backend=etcd-v3` uses.

    Raises ValueError (ConfigError) for bad settings before any socket is opened, and RendezvousConnectionError when
    etcd does not answer within `read_timeout` seconds (default 5).
    """
    show_log_lines()
    metrics_at = MetricsAddress.of_environment()
    handler = EtcdRendezvousHandler(*open_run(params))
    handler.prepare(metrics_at)
    return handler


def with_conf(params: RendezvousParameters, conf: Mapping[str, object]) -> RendezvousParameters:
    """The same parameters with another ``rdzv_conf``."""
    return RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, **conf
    )


def open_run(params: RendezvousParameters) -> OpenedRun:
    """Check the parameters, and connect. Raises as `create_handler`."""
    settings = RendezvousSettings.parse(
        backend=params.backend,
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        conf=params.config,
    )
    if settings.run_id == "none" and settings.etcd is not None:
        log.warning("no --rdzv-id was given: every job without one on this etcd belongs to the same run, 'none'")
    if settings.etcd is not None:
        return OpenedRun(settings, connect(settings.etcd), None)
    server = EtcdServer()
    server.start()
    config = EtcdConfig.load(server.get_endpoint(), env={}, request_timeout=settings.request_timeout)
    try:
        return OpenedRun(settings, connect(config), server)
    except RendezvousConnectionError:
        server.stop()
        raise


def connect(config: EtcdConfig) -> SharedClient:
    """A client whose etcd has answered. Raises RendezvousConnectionError.

    It shares the process's connection: each connection with a watch costs a process three threads, and etcd a stream.
    """
    client = SharedClient(config)
    try:
        client.status()
    except EtcdError as error:
        client.close()
        problem = "no etcd at" if isinstance(error, EtcdUnavailable) else "cannot use etcd at"
        raise RendezvousConnectionError(f"{problem} {config.describe()}: {error}") from None
    return client
