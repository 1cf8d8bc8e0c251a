"""`ftcoord dashboard`, `gateway`, `metrics` and `server`, which serve until they are interrupted, and `demo`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ftcoord import __version__
from ftcoord.commands import shared
from ftcoord.commands.shared import Flag, add_command, warn_of
from ftcoord.config import Endpoint, EtcdConfig, listen_address, switch, text, whole
from ftcoord.core.layout import KEY_PREFIX
from ftcoord.errors import ConfigError, EtcdError, FtcoordError
from ftcoord.escaping import HIDDEN
from ftcoord.files import secret
from ftcoord.logs import show_if_asked, show_log_lines
from ftcoord.metrics import exporter
from ftcoord.metrics.exporter import LOOPBACK, MetricsAddress, MetricsServer, host_names

if TYPE_CHECKING:
    from ftcoord.dashboard.server import Page, PageServer
    from ftcoord.embedded.server import EtcdServer

TOKEN, TOKEN_FILE = "FTCOORD_DASHBOARD_TOKEN", "FTCOORD_DASHBOARD_TOKEN_FILE"
"""Environment variables, not flags: `ps` shows command lines to everybody."""
SHORTEST_TOKEN: Final = 16
"""Characters."""

_NAMES: Final = "host names accepted in the Host header, such as n1,n2"
_JOB: Final = "the job's address, such as etcd://h1:2379/job?min_replicas=2"
_CLIENT_CA: Final = "accept only clients with a certificate of this CA"
_PORT, _HOST = exporter.port_number, exporter.listening_host
PAGE_FLAGS: Final = (Flag("--host-names LIST", "FTCOORD_DASHBOARD_HOST_NAMES", _NAMES, text, ""),)
METRICS_FLAGS: Final = (
    Flag("--metrics-host HOST", "FTCOORD_METRICS_HOST", "the address to serve metrics on", _HOST, LOOPBACK),
    Flag("--metrics-host-names LIST", "FTCOORD_METRICS_HOST_NAMES", f"{_NAMES}, of scrapes", text, ""),
    Flag("--metrics-cert FILE", "FTCOORD_METRICS_CERT", "serve metrics over TLS, with this certificate"),
    Flag("--metrics-key FILE", "FTCOORD_METRICS_KEY", "the private key of that certificate"),
    Flag("--metrics-client-ca FILE", "FTCOORD_METRICS_CLIENT_CA", _CLIENT_CA),
)


def _metrics_port(default: int | None) -> Flag:
    about = "the port to serve metrics on; 0 for a free one"
    return Flag("--metrics-port PORT", "FTCOORD_METRICS_PORT", about, _PORT, default)


def _listen(variable: str, default: str) -> Flag:
    return Flag("--listen ADDRESS", variable, "the address to serve on", text, default)


def add_commands(commands: Any) -> None:
    listen = _listen("FTCOORD_DASHBOARD_LISTEN", "127.0.0.1:29512")
    add_command(commands, dashboard, *shared.ETCD_KEYS, *shared.RULE_FLAGS, listen, *PAGE_FLAGS)
    etcd = Flag("--etcd ADDRESS", "FTCOORD_GATEWAY_ETCD", _JOB)
    listen = _listen("FTCOORD_GATEWAY_LISTEN", "127.0.0.1:29510")
    about = "the port for the job's dashboard; 0 for a free one"
    page_port = Flag("--page-port PORT", "FTCOORD_GATEWAY_PAGE_PORT", about, _PORT, None)
    about = "the address for that dashboard"
    page_host = Flag("--page-host HOST", "FTCOORD_GATEWAY_PAGE_HOST", about, _HOST, LOOPBACK)
    page = page_port, page_host, *PAGE_FLAGS
    add_command(commands, gateway, etcd, listen, _metrics_port(None), *METRICS_FLAGS, *page)
    add_command(commands, metrics, *shared.ETCD_KEYS, _metrics_port(29511), *METRICS_FLAGS)
    about = "folder for the agents' logs; a new one if omitted"
    add_command(commands, demo, Flag("--logs FOLDER", "FTCOORD_DEMO_LOGS", about, text, None))
    host = Flag("--host HOST", "FTCOORD_SERVER_HOST", "the address to serve on", text, LOOPBACK)
    port = Flag("--port PORT", "FTCOORD_SERVER_PORT", "the port to serve on; 0 for a free one", whole(0, 65535), 2379)
    about = "folder for etcd's data; a temporary one if omitted"
    data = Flag("--data-dir FOLDER", "FTCOORD_SERVER_DATA_DIR", about, text, None)
    about = "let all users of this host, and all who reach it, in"
    add_command(commands, server, host, port, data, Flag("--no-login", "FTCOORD_SERVER_NO_LOGIN", about, switch, 0))


# -- dashboard ------------------------------------------------------------------------------------------------------


def dashboard(options: argparse.Namespace) -> int:
    """Serve a web page that shows all jobs, live, until Ctrl-C.

    The page is read-only unless FTCOORD_DASHBOARD_TOKEN or FTCOORD_DASHBOARD_TOKEN_FILE gives a token. Needs the extra
    `dashboard`.
    """
    etcd, rules = shared.etcd_config(options), shared.rules_of(options)
    listen = listen_address("--listen", options.listen)
    page = _page(options, etcd, options.key_prefix, rules=rules, listen=listen)
    warn_of(listen[0], "can read the page: it has no login")
    wait = shared.until_interrupted()
    with _serving().PageServer(page) as served:
        print(f"the page is at {served.address}; Ctrl-C ends it", flush=True)
        return wait("the page has failed", lambda: served.has_failed)


def _page(options: argparse.Namespace, etcd: EtcdConfig, key_prefix: str, **fields: Any) -> Page:
    """Raises ConfigError, and FtcoordError without the extra that it needs."""
    token, endpoints = token_of(os.environ), [str(endpoint) for endpoint in etcd.endpoints]
    about = {"version": __version__, "host": socket.gethostname(), "key_prefix": key_prefix, "endpoints": endpoints}
    fields = {**fields, "about": about, "host_names": host_names(options.host_names), "who": shared.who()}
    page: Page = _serving().Page(etcd=etcd, key_prefix=key_prefix, token=token, **fields)
    return page


def _serving() -> ModuleType:
    """`ftcoord.dashboard.server`. Raises FtcoordError without the extra that it needs."""
    try:
        from ftcoord.dashboard import server
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "ftcoord"):
            raise
        raise FtcoordError(f"the page needs {package}: pip install starlette uvicorn") from None
    return server


def token_of(env: Mapping[str, str]) -> str:
    """What lets the page act; empty for a page that is read-only. Raises ConfigError."""
    name, token, path = TOKEN, env.get(TOKEN, "").strip(), env.get(TOKEN_FILE, "").strip()
    if token and path:
        raise ConfigError(TOKEN, HIDDEN, f"{TOKEN_FILE} is set too; unset one of them")
    if path:
        name, token = TOKEN_FILE, secret(TOKEN_FILE, path).strip()
        if not token:
            raise ConfigError(TOKEN_FILE, path, "the file must hold the token")
    if token and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        allowed = f"give {SHORTEST_TOKEN} or more printable ASCII characters without spaces"
        raise ConfigError(name, HIDDEN, allowed)
    return token


# -- gateway --------------------------------------------------------------------------------------------------------


def gateway(options: argparse.Namespace) -> int:
    """Serve torchft's lighthouse protocol from etcd until Ctrl-C.

    It is for replicas that use torchft's own classes. Exits with status 1 if the gateway fails: run it under a
    supervisor.
    """
    from ftcoord.coordination import Gateway

    text("--etcd", options.etcd)  # it has no default
    show_if_asked()  # a gateway logs a line for each of many replicas: only if the user asks for it
    metrics_at = _metrics_address(options) if options.metrics_port is not None else None
    page = _gateway_page(options)
    host, _ = listen_address("--listen", options.listen)
    warn_of(host, "can join and stop the job, and have its replicas run code: torchft's protocol has no login")
    wait = shared.until_interrupted()
    with Gateway(options.etcd, options.listen) as served, page() as shown:
        print(f"gateway serves on {served.address()}; Ctrl-C ends it", flush=True)
        print(f"TORCHFT_LIGHTHOUSE={served.address()}", flush=True)
        if (url := exporter.serve_process(metrics_at)) is not None:
            print(f"metrics are at {url}", flush=True)
        if shown is not None:
            print(f"the page is at {shown.address}", flush=True)
        try:
            served.check(timeout=5)
        except EtcdError as error:
            print(f"ftcoord: replicas will wait until etcd can be reached: {error}", file=sys.stderr)
        return wait("the gateway has failed, see its log", lambda: served.has_failed)


def _gateway_page(options: argparse.Namespace) -> Callable[[], AbstractContextManager[PageServer | None]]:
    """What serves the job's page; None where none is wanted.

    Raises ConfigError, and FtcoordError without the extra that it needs, before any socket is opened.
    """
    if options.page_port is None:
        return nullcontext
    from ftcoord.coordination.address import parse_address
    from ftcoord.operator.status import Rules

    job = parse_address(options.etcd)
    listen = listen_address("--page-host", Endpoint(options.page_host, options.page_port).target)
    rules = Rules(quorum=job.options)
    page = _page(options, job.config(), KEY_PREFIX, rules=rules, listen=listen, gateway_job=job.name)
    warn_of(listen[0], "can read the page: it has no login")
    server: Callable[[Page], PageServer] = _serving().PageServer
    return lambda: server(page)


# -- metrics --------------------------------------------------------------------------------------------------------


def metrics(options: argparse.Namespace) -> int:
    """Serve Prometheus metrics for all runs until Ctrl-C.

    Reads the runs on an etcd cluster at each scrape. Needs the extra `metrics`.
    """
    config, address = shared.etcd_config(options), _metrics_address(options)
    from ftcoord.operator.reading import RunsCollector

    show_log_lines()
    warn_of(address.host, address.open_to)
    wait = shared.until_interrupted()
    with MetricsServer(address, RunsCollector(config, options.key_prefix).collect) as server:
        print(f"the metrics of all runs are at {server.url}; Ctrl-C ends it", flush=True)
        return wait()


def _metrics_address(options: argparse.Namespace) -> MetricsAddress:
    """Raises ConfigError."""
    tls = exporter.serving_tls(options.metrics_cert, options.metrics_key, options.metrics_client_ca)
    return MetricsAddress(options.metrics_host, options.metrics_port, tls, host_names(options.metrics_host_names))


# -- demo and server --------------------------------------------------------------------------------------------------


def demo(options: argparse.Namespace) -> int:
    """Train on three nodes, kill one, replace it (about a minute).

    The nodes run on this host, with an embedded etcd.
    """
    from ftcoord.demo.run import run_demo

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    run_demo(Path(options.logs) if options.logs else None)
    return 0


def server(options: argparse.Namespace) -> int:
    """Run an embedded etcd server on this host until Ctrl-C.

    It has a login whose password is in its data folder. Exits with status 1 if etcd ends.
    """
    from ftcoord.embedded.server import USER, EtcdServer

    warn_of(options.host, "can write all keys of this etcd unless it asks for a login; its traffic is plain text")
    wait = shared.until_interrupted()
    login = not options.no_login
    with EtcdServer(host=options.host, port=options.port, data_dir=options.data_dir, login=login) as etcd:
        endpoint = etcd.get_endpoint()
        print(f"etcd serves on {endpoint}; Ctrl-C ends it. In the shells that use it:", flush=True)
        if login:
            print(f"export FTCOORD_USER={USER} FTCOORD_PASSWORD_FILE={shlex.quote(etcd.password_file())}", flush=True)
        print(f"torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint={endpoint} --rdzv-id=RUN ...", flush=True)
        advise(etcd)
        return wait("etcd has exited", lambda: not etcd.is_running())


def advise(etcd: EtcdServer) -> None:
    """Print what this release of etcd is good for: clients do not warn about an etcd that ftcoord started."""
    from ftcoord.etcd.api import newer_wanted

    with etcd.get_client() as client:
        version = client.version
    if wanted := newer_wanted(version):
        bugs = "it has known lease and watch bugs, so use"
        print(
            f"etcd {version} is good for trying things out; {bugs} {wanted} or newer for real training runs", flush=True
        )
