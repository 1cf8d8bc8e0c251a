"""`ftcoord demo`, `server`, `gateway` and `metrics`: commands that run until they are interrupted."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.commands.acting import who
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, Flag, add, etcd_config
from ftcoord.commands.paging import HOST_NAMES_FLAG, about_page, host_names_of, page_serving, token_of, warn_of
from ftcoord.config import Endpoint, listen_address, switch, text, whole
from ftcoord.core.layout import KEY_PREFIX
from ftcoord.errors import EtcdError
from ftcoord.logs import show_if_asked, show_log_lines
from ftcoord.metrics.exporter import (
    LOOPBACK,
    MetricsAddress,
    MetricsServer,
    ServingTls,
    host_names,
    listening_host,
    port_number,
    serve_process,
)
from ftcoord.metrics.process import prometheus

if TYPE_CHECKING:
    from ftcoord.dashboard.serving import PageServer
    from ftcoord.embedded.server import EtcdServer


SIGNAL_INTERVAL: Final = 1.0
"""Seconds that a wait lasts at most. Python runs signal handlers between waits; one may come just before a wait."""


def _path(key: str, value: object) -> Path:
    return Path(text(key, value))


_DEMO_FLAGS: Final = (
    Flag("--logs", "FTCOORD_DEMO_LOGS", "folder for the agents' logs; a new one if omitted", _path, None, "FOLDER"),
)
_SERVER_FLAGS: Final = (
    Flag("--host", "FTCOORD_SERVER_HOST", "the address to serve on", text, "127.0.0.1", "HOST"),
    Flag("--port", "FTCOORD_SERVER_PORT", "the port to serve on; 0 for a free one", whole(0, 65535), 2379, "PORT"),
    Flag(
        "--data-dir",
        "FTCOORD_SERVER_DATA_DIR",
        "folder for etcd's data; a temporary one if omitted",
        text,
        None,
        "FOLDER",
    ),
    Flag("--no-login", "FTCOORD_SERVER_NO_LOGIN", "let all users of this host, and all who reach it, in", switch, 0),
)
_METRICS_FLAGS: Final = (
    Flag("--metrics-host", "FTCOORD_METRICS_HOST", "the address to serve metrics on", listening_host, LOOPBACK, "HOST"),
    Flag(
        "--metrics-host-names",
        "FTCOORD_METRICS_HOST_NAMES",
        "host names accepted in the Host header of scrapes, such as n1,n2",
        text,
        "",
        "LIST",
    ),
    Flag("--metrics-cert", "FTCOORD_METRICS_CERT", "serve metrics over TLS, with this certificate", metavar="FILE"),
    Flag("--metrics-key", "FTCOORD_METRICS_KEY", "the private key of that certificate", metavar="FILE"),
    Flag(
        "--metrics-client-ca",
        "FTCOORD_METRICS_CLIENT_CA",
        "accept only clients with a certificate of this CA",
        metavar="FILE",
    ),
)
_METRICS_PORT_HELP: Final = "the port to serve metrics on; 0 for a free one"
_GATEWAY_FLAGS: Final = (
    Flag(
        "--etcd",
        "FTCOORD_GATEWAY_ETCD",
        "the job's address, such as etcd://h1:2379/job?min_replicas=2",
        text,
        None,
        "ADDRESS",
    ),
    Flag("--listen", "FTCOORD_GATEWAY_LISTEN", "the address to serve on", text, "127.0.0.1:29510", "ADDRESS"),
    Flag("--metrics-port", "FTCOORD_METRICS_PORT", _METRICS_PORT_HELP, port_number, None, "PORT"),
    *_METRICS_FLAGS,
    Flag(
        "--page-port",
        "FTCOORD_GATEWAY_PAGE_PORT",
        "the port for the job's dashboard; 0 for a free one",
        port_number,
        None,
        "PORT",
    ),
    Flag(
        "--page-host", "FTCOORD_GATEWAY_PAGE_HOST", "the address for that dashboard", listening_host, LOOPBACK, "HOST"
    ),
    HOST_NAMES_FLAG,
)


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    demo = commands.add_parser(
        "demo",
        help="train on three nodes, kill one, replace it (about a minute)",
        description="Train on three nodes of this host with an embedded etcd, kill one, and replace it. Takes about a"
        " minute.",
    )
    add(demo, _DEMO_FLAGS)
    demo.set_defaults(run=_demo)

    server = commands.add_parser(
        "server",
        help="run an embedded etcd server on this host until Ctrl-C",
        description="Run an embedded etcd server on this host until Ctrl-C, with a login whose password is in its data"
        " folder. Exits with status 1 if etcd ends.",
    )
    add(server, _SERVER_FLAGS)
    server.set_defaults(run=_server)

    gateway = commands.add_parser(
        "gateway",
        help="serve torchft's lighthouse protocol from etcd until Ctrl-C",
        description="Serve torchft's lighthouse protocol from etcd until Ctrl-C, for replicas that use torchft's own"
        " classes. Exits with status 1 if the gateway fails: run it under a supervisor.",
    )
    add(gateway, _GATEWAY_FLAGS)
    gateway.set_defaults(run=_gateway)

    metrics = commands.add_parser(
        "metrics",
        help="serve Prometheus metrics for all runs until Ctrl-C",
        description="Serve Prometheus metrics for all runs on an etcd cluster until Ctrl-C. Needs the extra `metrics`.",
    )
    port = Flag("--metrics-port", "FTCOORD_METRICS_PORT", _METRICS_PORT_HELP, port_number, 29511, "PORT")
    add(metrics, (*ETCD_FLAGS, KEYS_FLAG, port, *_METRICS_FLAGS))
    metrics.set_defaults(run=_metrics)


def _demo(options: argparse.Namespace) -> int:
    from ftcoord.demo.run import run_demo

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    run_demo(options.logs)
    return 0


def _server(options: argparse.Namespace) -> int:
    from ftcoord.embedded.server import USER, EtcdServer

    warn_of(options.host, "can write all keys of this etcd unless it asks for a login; its traffic is plain text")
    ended = _event_of_the_end()
    login = not options.no_login
    with EtcdServer(host=options.host, port=options.port, data_dir=options.data_dir, login=login) as etcd:
        endpoint = etcd.get_endpoint()
        print(f"etcd serves on {endpoint}; Ctrl-C ends it. In the shells that use it:", flush=True)
        if login:
            print(f"export FTCOORD_USER={USER} FTCOORD_PASSWORD_FILE={shlex.quote(etcd.password_file())}", flush=True)
        print(f"torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint={endpoint} --rdzv-id=RUN ...", flush=True)
        _advise(etcd)
        while etcd.is_running() and not ended.wait(SIGNAL_INTERVAL):
            pass
        if not ended.is_set():
            print("ftcoord: etcd has exited; start it again", file=sys.stderr)
    return 0 if ended.is_set() else 1


def _advise(etcd: EtcdServer) -> None:
    """Say what this release of etcd is good for: clients say nothing of it about an etcd that ftcoord started."""
    from ftcoord.etcd.api import newer_wanted

    with etcd.get_client() as client:
        version = client.version
    if wanted := newer_wanted(version):
        print(
            f"etcd {version} is good for trying things out; it has known lease and watch bugs, so use {wanted} or"
            " newer for real training runs",
            flush=True,
        )


def _gateway(options: argparse.Namespace) -> int:
    from ftcoord.coordination import Gateway
    from ftcoord.coordination.gateway_limits import raise_descriptor_limit

    raise_descriptor_limit()
    text("--etcd", options.etcd)  # it has no default
    show_if_asked()  # it speaks for many replicas: a line for each of them is for who asks for it
    metrics_at = _metrics_address(options) if options.metrics_port is not None else None
    page = _gateway_page(options)
    host, _ = listen_address("--listen", options.listen)
    warn_of(host, "can join and stop the job, and have its replicas run code: torchft's protocol has no login")
    ended = _event_of_the_end()
    with Gateway(options.etcd, options.listen) as gateway, page() as served:
        print(f"gateway serves on {gateway.address()}; Ctrl-C ends it", flush=True)
        print(f"TORCHFT_LIGHTHOUSE={gateway.address()}", flush=True)
        if (url := serve_process(metrics_at)) is not None:
            print(f"metrics are at {url}", flush=True)
        if served is not None:
            print(f"the page is at {served.address}", flush=True)
        try:
            gateway.check(timeout=5)
        except EtcdError as error:
            print(f"ftcoord: replicas will wait until etcd can be reached: {error}", file=sys.stderr)
        while not ended.wait(SIGNAL_INTERVAL):
            if gateway.has_failed:
                print("ftcoord: the gateway has failed, see its log; start it again", file=sys.stderr)
                return 1
            if served is not None and served.has_failed:
                print("ftcoord: the page has failed, see the log; the gateway goes on without it", file=sys.stderr)
                served = None
    return 0


def _gateway_page(options: argparse.Namespace) -> Callable[[], AbstractContextManager[PageServer | None]]:
    """What serves the job's page; None where none is wanted.

    Raises ConfigError, and FtcoordError without the extra that it needs, before any socket is opened.
    """
    if options.page_port is None:
        return nullcontext
    from ftcoord.coordination.address import parse_address
    from ftcoord.operator.status import Rules

    job, token, serving = parse_address(options.etcd), token_of(os.environ), page_serving()
    config, rules = job.config(), Rules(quorum=job.options)
    listen = listen_address("--page-host", Endpoint(options.page_host, options.page_port).target)
    warn_of(listen[0], "can read the page: it has no login")
    names, about = host_names_of(options), about_page(config, KEY_PREFIX)
    page = serving.Page(config, KEY_PREFIX, rules, listen, about, names, who(), token, job.name)
    return lambda: serving.PageServer(page)


def _metrics(options: argparse.Namespace) -> int:
    config, address = etcd_config(options), _metrics_address(options)
    prometheus()  # before the next line needs it
    from ftcoord.operator.metrics import RunsCollector

    show_log_lines()
    warn_of(address.host, address.open_to)
    ended = _event_of_the_end()
    with MetricsServer(address, RunsCollector(config, options.key_prefix).collect) as server:
        print(f"the metrics of all runs are at {server.url}; Ctrl-C ends it", flush=True)
        while not ended.wait(SIGNAL_INTERVAL):
            pass
    return 0


def _metrics_address(options: argparse.Namespace) -> MetricsAddress:
    """Raises ConfigError."""
    tls = ServingTls.load(options.metrics_cert, options.metrics_key, options.metrics_client_ca)
    return MetricsAddress(options.metrics_host, options.metrics_port, tls, host_names(options.metrics_host_names))


def _event_of_the_end() -> concurrency.Event:
    """What is set when somebody asks this process to end."""
    ended = concurrency.event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return ended


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
