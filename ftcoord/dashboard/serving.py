"""Runs the page's server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from ftcoord.config import EtcdConfig
from ftcoord.dashboard.acts import PageActor
from ftcoord.dashboard.app import make_app
from ftcoord.dashboard.board import Board, LeaseBook
from ftcoord.errors import ServerError
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.rpc.lean import LeanClient
from ftcoord.metrics.exporter import Collect
from ftcoord.operator.status import Rules

if TYPE_CHECKING:
    from prometheus_client.core import Metric

END_TIMEOUT: Final = 2
"""Seconds that answers under way may take when the server ends."""


def serve(
    etcd: EtcdConfig,
    key_prefix: str,
    rules: Rules,
    listen: tuple[str, int],
    *,
    about: Mapping[str, Any],
    host_names: Collection[str],
    who: str,
    token: str,
    ready: Callable[[str], None],
) -> None:
    """Serve the page until SIGINT or SIGTERM, with no etcd too. `ready` is told its address.

    It acts as `who` for those who have the token, and is read-only without one.

    Raises ServerError when it cannot listen there, and ConfigError.
    """
    host, port = listen
    names = {*host_names, host.lower()}
    with (
        _listening(host, port) as listener,
        EtcdClient(etcd) as client,
        closing(LeanClient(etcd)) as lean,
        Board(client, key_prefix, rules) as board,
    ):
        actor = PageActor(client, key_prefix, who, etcd.request_timeout) if token else None
        app = make_app(board, LeaseBook(lean), about, _runs(etcd, key_prefix), names, actor=actor, token=token)
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else whoever calls from this machine says from where orders come
            timeout_graceful_shutdown=END_TIMEOUT,
        )
        server = uvicorn.Server(config)

        def end(*_signal: object) -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # the server ends at either, and then gives it to us again
            signal.signal(number, end)
        ready(f"http://{host}:{listener.getsockname()[1]}")
        server.run([listener])


def _runs(etcd: EtcdConfig, key_prefix: str) -> Collect:
    """The numbers of all runs. What makes them needs prometheus_client, which whoever asks for them has to have."""
    made = list[Collect]()

    def collect() -> Iterable[Metric]:
        from ftcoord.metrics.runs import RunsCollector

        if not made:
            made.append(RunsCollector(etcd, key_prefix).collect)
        return made[0]()

    return collect


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
