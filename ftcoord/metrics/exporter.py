"""Serves metrics to Prometheus over HTTP, with prometheus_client, which is loaded only when metrics are served.

prometheus_client's own server answers any `Host`, has no bound of its connections, and lets one that does its TLS
handshake slowly delay all others.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
import socketserver
import ssl
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from ftcoord import concurrency, files, fork
from ftcoord.closing import Closing
from ftcoord.config import exposure, parse_host, text, variable, whole
from ftcoord.errors import ConfigError, FtcoordError, ServerError, ThreadNotStarted
from ftcoord.escaping import redacted
from ftcoord.metrics.process import Collect, begin_counting, collect_process, exposed, prometheus

log = logging.getLogger(__name__)

PORT_VARIABLE: Final = "FTCOORD_METRICS_PORT"
HOST_VARIABLE: Final = "FTCOORD_METRICS_HOST"
CERT_VARIABLE: Final = "FTCOORD_METRICS_CERT"
HOST_NAMES_VARIABLE: Final = "FTCOORD_METRICS_HOST_NAMES"
KEY_VARIABLE: Final = "FTCOORD_METRICS_KEY"
CLIENT_CA_VARIABLE: Final = "FTCOORD_METRICS_CLIENT_CA"
LOOPBACK: Final = "127.0.0.1"
PLAIN: Final = "text/plain; charset=utf-8"

MOST_SCRAPERS: Final = 32
"""Connections, and threads, at a time. One more is closed, and so is the oldest: a scrape takes a moment, so the oldest
one is most likely silent, and the next newcomer is served."""
CONNECTION_TIMEOUT: Final = 30.0
"""Seconds that a connection may last in all: the TLS handshake, its one request, and the answer."""
TURN: Final = 0.5
"""Seconds between two looks for connections that have lasted too long, after a connection that could not be accepted,
and that `close` takes at most."""

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


def serving_tls(cert: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    """TLS from PEM files; None if none is given. With `client_ca`, only clients with a certificate of that authority
    are served. Raises ConfigError, also for a file that cannot be read."""
    if not (cert or key or client_ca):
        return None
    if not cert or not key:
        missing = KEY_VARIABLE if cert else CERT_VARIABLE
        raise ConfigError(missing, None, "TLS needs a certificate and its key: give both, or neither of them")
    files.pem(CERT_VARIABLE, cert, files.CERTIFICATE)
    files.pem(KEY_VARIABLE, key, files.PRIVATE_KEY)
    if client_ca:
        files.pem(CLIENT_CA_VARIABLE, client_ca, files.CERTIFICATE)
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca or None)
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(CERT_VARIABLE, cert, f"give a certificate, its key and its authority: {error}") from None
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where to serve metrics. Port 0 takes a free one. `host_names` are accepted in the Host header, besides addresses,
    localhost, `host` and this host's own name; in lower case."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    host_names: tuple[str, ...] = ()

    @property
    def open_to(self) -> str:
        """What a client that reaches the address can do."""
        if self.tls is not None and self.tls.verify_mode == ssl.CERT_REQUIRED:
            return "can read the metrics with a certificate of the clients' authority"
        return "can read the metrics, with the names of runs: they have no login"

    @classmethod
    def of_environment(cls, env: Mapping[str, str] | None = None) -> MetricsAddress | None:
        """The address in the environment; None if metrics are not to be served, or if it is not valid: then one
        warning is logged, because a process does its work without them too."""
        variables = os.environ if env is None else env
        try:
            if not (port := variable(variables, PORT_VARIABLE)):
                return None
            files_ = (variable(variables, name) for name in (CERT_VARIABLE, KEY_VARIABLE, CLIENT_CA_VARIABLE))
            host = listening_host(HOST_VARIABLE, variable(variables, HOST_VARIABLE) or LOOPBACK)
            names = host_names(variable(variables, HOST_NAMES_VARIABLE))
            return cls(host, port_number(PORT_VARIABLE, port), serving_tls(*files_), names)
        except ConfigError as error:
            log.warning("this process serves no metrics, and goes on without: %s", error)
            return None


def is_allowed_host(header: str, names: Collection[str]) -> bool:
    """Whether a request's `Host` is an address, localhost, or one of these names, in lower case.

    Another site can make its own name resolve to this address (DNS rebinding). But it cannot make a browser name an
    address instead of that name.
    """
    host = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    host = host.lower().rstrip(".")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host == "localhost" or host in names
    return True


class MetricsServer(Closing, socketserver.ThreadingTCPServer):
    """Serves the metrics of `collect` over HTTP, until `close()`, on bounded threads of its own.

    A peer that is silent or slow delays neither others nor `close()`. It does not serve in a forked child.

    Args:
        address: where to serve.
        collect: called at each scrape, possibly on several threads at once. If it raises, the scrape is answered with
            an error.

    Raises ServerError if it cannot listen there, and without prometheus_client.
    """

    allow_reuse_address, daemon_threads, request_queue_size = True, True, MOST_SCRAPERS

    def __init__(self, address: MetricsAddress, collect: Collect) -> None:
        prometheus()
        self.collect, self._tls = collect, address.tls  # never change
        self.names = {address.host.lower(), socket.gethostname().lower(), *address.host_names}  # never change
        self._lock = concurrency.lock("MetricsServer._lock")  # guards the next one
        self._peers: dict[Any, float] = {}  # when each connection ends, -inf if it was ended; the oldest first
        where = f"{address.host}:{address.port}"
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family = found[0][0]
            super().__init__(found[0][4][:2], _Handler)  # type: ignore[arg-type]
        except OSError as error:  # of sockets, names and files
            raise ServerError(f"cannot serve metrics on {where}: {error}; choose another address") from None
        fork.hide(self.fileno())
        try:
            concurrency.thread(self.serve_forever, "ftcoord-metrics", TURN).start()
        except ThreadNotStarted as error:
            self.server_close()
            raise ServerError(f"cannot serve metrics on {where}: {error}") from None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url: Final = f"{'https' if address.tls else 'http'}://{host}:{self.socket.getsockname()[1]}/metrics"

    def close(self) -> None:
        """Stop serving: waits for no answer in progress. Idempotent."""
        if self.fileno() >= 0:
            self.shutdown()
            self._end_until(math.inf)
            self.server_close()

    def service_actions(self) -> None:
        """Once a turn of the loop."""
        self._end_until(concurrency.now())

    def _end_until(self, now: float, most: int = MOST_SCRAPERS) -> None:
        with self._lock:
            for peer in [one for one, ends in self._peers.items() if -math.inf < ends <= now][:most]:
                self._peers[peer] = -math.inf
                with suppress(OSError):  # not by TLS's own way, which would write to the peer
                    socket.socket.shutdown(peer, socket.SHUT_RDWR)  # wakes the thread that reads or writes here

    def get_request(self) -> tuple[Any, Any]:
        try:
            peer, address = super().get_request()
        except OSError:  # usually there is no descriptor: the loop would ask again at once
            concurrency.sleep(TURN)
            raise
        if self._tls is not None:  # the handshake comes with the first read, on the connection's own thread
            peer = self._tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
        return peer, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._peers) >= MOST_SCRAPERS:
            self._end_until(math.inf, most=1)
            self.shutdown_request(request)
            return
        with self._lock:
            self._peers[request] = concurrency.now() + CONNECTION_TIMEOUT
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a connection is not served: its peer has gone, it was ended, or no thread can be started."""
        log.debug("a connection is not served", exc_info=True)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._peers.pop(request, None)
        super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    """Answers the one request of a connection."""

    server: MetricsServer
    server_version, sys_version = "ftcoord", ""

    def do_GET(self) -> None:
        status, kind = 200, PLAIN
        try:
            if is_allowed_host(self.headers.get("Host", ""), self.server.names):
                text, kind = exposed(self.server.collect)
            else:
                status, text = 421, f"this name is not served: add it to {HOST_NAMES_VARIABLE}\n".encode()
        except FtcoordError as error:
            status, text = 503, f"{error}\n".encode(errors="replace")
        except Exception:  # a bug of a collector, which prometheus_client calls: this peer gets an error, not silence
            log.exception("the metrics could not be read")
            status, text = 500, b"the metrics could not be read: see the log\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Log no request."""


# -- the metrics of this process -----------------------------------------------------------------------------------


class _Export:
    """The one server of this process's metrics."""

    def __init__(self) -> None:
        self.lock = concurrency.lock("_Export.lock")  # guards all below; held while the server begins
        self.begun = False
        self.server: MetricsServer | None = None


def serve_process(address: MetricsAddress | None) -> str | None:
    """Serve the metrics of this process at the first address that is given, from now on until it ends.

    Returns where they are served; None if they are not. If they cannot be served, one line is logged.
    """
    if address is None:
        return None
    export = concurrency.of_process(_Export)
    with export.lock:
        if not export.begun:
            export.begun = True
            try:
                export.server = MetricsServer(address, collect_process)
            except ServerError as error:
                log.warning("this process serves no metrics, and goes on without: %s", error)
                return None
            begin_counting()
            log.info("the metrics of this process are at %s", export.server.url)
            if warning := exposure(address.host, address.open_to):
                log.warning("%s", warning)
        return export.server.url if export.server is not None else None
