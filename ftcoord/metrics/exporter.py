"""Serves metrics to Prometheus over HTTP, with prometheus_client, which is loaded only when metrics are served."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from ftcoord import concurrency, files
from ftcoord.closing import Closing
from ftcoord.config import exposure, parse_host, text, variable, whole
from ftcoord.errors import ConfigError, ServerError, ThreadNotStarted
from ftcoord.escaping import redacted
from ftcoord.fork import OwnerProcess
from ftcoord.metrics.http import MOST_SCRAPERS, HttpServer, is_allowed_host
from ftcoord.metrics.process import begin_counting, collect_process, prometheus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

PORT_VARIABLE: Final = "FTCOORD_METRICS_PORT"
HOST_VARIABLE: Final = "FTCOORD_METRICS_HOST"
CERT_VARIABLE: Final = "FTCOORD_METRICS_CERT"
HOST_NAMES_VARIABLE: Final = "FTCOORD_METRICS_HOST_NAMES"
KEY_VARIABLE: Final = "FTCOORD_METRICS_KEY"
CLIENT_CA_VARIABLE: Final = "FTCOORD_METRICS_CLIENT_CA"
LOOPBACK: Final = "127.0.0.1"

Collect = Callable[[], "Iterable[Metric]"]
port_number = whole(0, 65535, "; 0 takes a free one")
"""A parser for ports to listen on."""


def listening_host(key: str, value: object) -> str:
    """A parser for the address to listen on. Raises ConfigError."""
    host = parse_host(text(key, value))
    if host is None:
        raise ConfigError(key, redacted(value), "give a name or an address of this host, such as 127.0.0.1 or ::")
    return host


def host_names(listed: str) -> tuple[str, ...]:
    """The names in a list such as `n1,n2`, in lower case."""
    return tuple(name.strip().lower() for name in listed.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class ServingTls:
    """PEM files. With `client_ca`, only clients with a certificate of that authority are served."""

    cert: str
    key: str
    client_ca: str | None = None

    @classmethod
    def load(cls, cert: str | None, key: str | None, client_ca: str | None) -> ServingTls | None:
        """The TLS settings; None if no file is given. Raises ConfigError, also for a file that cannot be read."""
        if not (cert or key or client_ca):
            return None
        if not cert or not key:
            missing = KEY_VARIABLE if cert else CERT_VARIABLE
            raise ConfigError(missing, None, "TLS needs a certificate and its key: give both, or neither of them")
        files.pem(CERT_VARIABLE, cert, files.CERTIFICATE)
        files.pem(KEY_VARIABLE, key, files.PRIVATE_KEY)
        if client_ca:
            files.pem(CLIENT_CA_VARIABLE, client_ca, files.CERTIFICATE)
        return cls(cert, key, client_ca or None)


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where to serve metrics. Port 0 takes a free one. `host_names` are accepted in the Host header, besides addresses,
    localhost, `host` and this host's own name; in lower case."""

    host: str
    port: int
    tls: ServingTls | None = None
    host_names: tuple[str, ...] = ()

    @property
    def open_to(self) -> str:
        """What whoever reaches the address can do."""
        if self.tls is not None and self.tls.client_ca:
            return "can read the metrics with a certificate of the clients' authority"
        return "can read the metrics, with the names of runs: they have no login"

    @classmethod
    def of_environment(cls, env: Mapping[str, str] | None = None) -> MetricsAddress | None:
        """The address in the environment; None if metrics are not to be served, or if it is not valid: then one
        warning is logged, because a process does its work without them too."""
        variables = os.environ if env is None else env
        try:
            return cls._parsed(variables)
        except ConfigError as error:
            log.warning("this process serves no metrics, and goes on without: %s", error)
            return None

    @classmethod
    def _parsed(cls, variables: Mapping[str, str]) -> MetricsAddress | None:
        port, host, names, cert, key, client_ca = (
            variable(variables, name)
            for name in (
                *(PORT_VARIABLE, HOST_VARIABLE, HOST_NAMES_VARIABLE),
                *(CERT_VARIABLE, KEY_VARIABLE, CLIENT_CA_VARIABLE),
            )
        )
        if not port:
            return None
        tls = ServingTls.load(cert, key, client_ca)
        host = listening_host(HOST_VARIABLE, host or LOOPBACK)
        return cls(host, port_number(PORT_VARIABLE, port), tls, host_names(names))


def exposed(collect: Collect) -> tuple[bytes, str]:
    """The metrics of `collect` in Prometheus' text format, and that format's media type. Raises ServerError without
    prometheus_client, and what `collect` raises."""
    client = prometheus()
    return client.generate_latest(SimpleNamespace(collect=collect)), client.CONTENT_TYPE_LATEST


class MetricsServer(Closing):
    """Serves the metrics of `collect` over HTTP, until `close()` or until nobody refers to it.

    Each scrape runs on its own thread, with its own registry, so it contains nothing of other users of
    prometheus_client in the process. It does not serve in a forked child. `close()` waits for no peer.

    Args:
        address: where to serve.
        collect: called at each scrape, possibly on several threads at once. If it raises, the scrape is answered with
            an error.

    Raises ServerError if it cannot listen there, and without prometheus_client.
    """

    def __init__(self, address: MetricsAddress, collect: Collect) -> None:
        prometheus()
        names = {address.host.lower(), socket.gethostname().lower(), *address.host_names}
        with ExitStack() as undo:
            try:
                tls = _context(address.tls) if address.tls is not None else None
                listener = undo.enter_context(_listening(address.host, address.port))
                server = HttpServer(listener, tls, partial(exposed, collect), partial(_refused, names))
            except (OSError, ThreadNotStarted) as error:  # of sockets, names and files
                where = f"{address.host}:{address.port}"
                raise ServerError(f"cannot serve numbers on {where}: {error}; choose another address") from None
            undo.pop_all()
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url: Final = f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}/metrics"
        self._owner = OwnerProcess("this server belongs to the parent process")
        self._end = server.close
        self._cancel_finalizer = concurrency.when_forgotten(self, server.close, last=True)

    def close(self) -> None:
        """Stop serving, at once. Idempotent; does nothing in a forked child."""
        if self._owner.is_current:
            self._cancel_finalizer()
            self._end()


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(where[:2], family=family, backlog=MOST_SCRAPERS)


def _context(tls: ServingTls) -> ssl.SSLContext:
    """Raises OSError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.client_ca)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _refused(names: Collection[str], host: str) -> str:
    """Why a request with this `Host` is not answered; empty if it is."""
    known = is_allowed_host(host, names)
    return "" if known else f"this server has another name: list in {HOST_NAMES_VARIABLE} by which names it is called"


# -- the metrics of this process -----------------------------------------------------------------------------------


class _Export:
    """The one server of this process's metrics."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("_Export._lock")  # guards all below; held while the server begins
        self._begun = False
        self._server: MetricsServer | None = None

    def serve(self, address: MetricsAddress) -> str | None:
        with self._lock:
            if not self._begun:
                self._begun, self._server = True, _serve(address)
            return self._server.url if self._server is not None else None


def serve_process(address: MetricsAddress | None) -> str | None:
    """Serve the metrics of this process at the first address that is given, from now on until it ends.

    Returns where they are served; None if they are not. If they cannot be served, one log line says so.
    """
    return None if address is None else concurrency.of_process(_Export).serve(address)


def _serve(address: MetricsAddress) -> MetricsServer | None:
    try:
        server = MetricsServer(address, collect_process)
    except ServerError as error:
        log.warning("this process serves no metrics, and goes on without: %s", error)
        return None
    begin_counting()
    log.info("the metrics of this process are at %s", server.url)
    if warning := exposure(address.host, address.open_to):
        log.warning("%s", warning)
    return server
