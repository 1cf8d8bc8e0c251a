"""Serves metrics to Prometheus over HTTP, with prometheus_client, which is loaded only when metrics are served."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final

from ftcoord import __version__, concurrency, files, fork
from ftcoord.closing import Closing
from ftcoord.config import parse_host, redacted, text, whole
from ftcoord.errors import ConfigError, ServerError
from ftcoord.fork import OwnerProcess
from ftcoord.metrics.process import SERIES
from ftcoord.metrics.series import SECONDS, Distribution, Series

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

PORT_VARIABLE: Final = "FTCOORD_METRICS_PORT"
HOST_VARIABLE: Final = "FTCOORD_METRICS_HOST"
CERT_VARIABLE: Final = "FTCOORD_METRICS_CERT"
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
    """Where to serve metrics. Port 0 takes a free one."""

    host: str
    port: int
    tls: ServingTls | None = None

    @classmethod
    def of_environment(cls, env: Mapping[str, str] | None = None) -> MetricsAddress | None:
        """The address in the environment; None if metrics are not to be served. Raises ConfigError."""
        variables = os.environ if env is None else env
        port, host, cert, key, client_ca = (
            variables.get(name, "").strip()
            for name in (PORT_VARIABLE, HOST_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, CLIENT_CA_VARIABLE)
        )
        if not port:
            return None
        tls = ServingTls.load(cert, key, client_ca)
        return cls(listening_host(HOST_VARIABLE, host or LOOPBACK), port_number(PORT_VARIABLE, port), tls)


def prometheus() -> ModuleType:
    """The module prometheus_client. Raises ServerError if it is not installed."""
    try:
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise ServerError("prometheus_client is not installed: pip install prometheus_client") from None


def exposed(collect: Collect) -> tuple[bytes, str]:
    """The metrics of `collect` in Prometheus' text format, and that format's media type. Raises ServerError without
    prometheus_client, and what `collect` raises."""
    prometheus_client = prometheus()
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect))
    return prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST


class MetricsServer(Closing):
    """Serves the metrics of `collect` over HTTP, until `close()` or until nobody refers to it.

    Each scrape runs on its own thread, with its own registry, so it contains nothing of other users of
    prometheus_client in the process. It does not serve in a forked child. `close()` may take half a second.

    Args:
        address: where to serve.
        collect: called at each scrape, possibly on several threads at once. If it raises, the scrape is answered with
            an error.

    Raises ServerError if it cannot listen there, and without prometheus_client.
    """

    def __init__(self, address: MetricsAddress, collect: Collect) -> None:
        prometheus_client = prometheus()
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(collect))
        tls = address.tls
        try:
            server, _ = prometheus_client.start_http_server(
                address.port,
                address.host,
                registry,
                certfile=tls.cert if tls else None,
                keyfile=tls.key if tls else None,
                client_cafile=tls.client_ca if tls else None,
                client_auth_required=bool(tls and tls.client_ca),
            )
        except (OSError, RuntimeError) as error:  # of sockets, names and files; and if there may be no more threads
            where = f"{address.host}:{address.port}"
            raise ServerError(f"cannot serve numbers on {where}: {error}; choose another address") from None
        fork.hide(server.fileno())
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url: Final = f"{'https' if tls else 'http'}://{host}:{server.server_port}/metrics"
        self._owner = OwnerProcess("this server belongs to the parent process")

        def end() -> None:
            server.shutdown()
            fork.unhide(server.fileno())
            server.server_close()

        self._end = end
        self._cancel_finalizer = concurrency.when_forgotten(self, end, stage=concurrency.Stage.SERVERS)

    def close(self) -> None:
        """Stop serving. Idempotent; does nothing in a forked child."""
        if self._owner.is_current:
            self._cancel_finalizer()
            end, self._end = self._end, _nothing
            end()


def _nothing() -> None:
    """What is left to do of what was done."""


class _Collector:
    def __init__(self, collect: Collect) -> None:
        self.collect = collect


# -- the numbers of this process ------------------------------------------------------------------------------------


class _Export:
    """The one server of this process, for everything in it that serves metrics."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("_Export._lock")  # guards all below; held while the server begins and ends
        self.server: MetricsServer | None = None  # read by any thread
        self._holders = 0

    def hold(self, address: MetricsAddress) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self.server = _serve_process(address)

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self.server is not None:
                self.server.close()
                self.server = None


class Exporting(Closing):
    """A hold on the server of this process's metrics: it serves from the first hold to the end of the last one. Without
    an address nothing happens. If it cannot serve, one log line says so.

    Args:
        address: where to serve; the address of the first hold is used.
    """

    def __init__(self, address: MetricsAddress | None) -> None:
        self._owner = OwnerProcess("this hold belongs to the parent process")
        self._export = concurrency.of_process(_Export)
        self._cancels = list[Callable[[], None]]()  # empty, or the finalizer's: taken by the one `close` that lets go
        if address is not None:
            self._export.hold(address)
            cancel = concurrency.when_forgotten(self, self._export.let_go, stage=concurrency.Stage.SERVERS)
            self._cancels.append(cancel)

    @classmethod
    def of_environment(cls) -> Exporting:
        """Serve where FTCOORD_METRICS_PORT and related variables say. Raises ConfigError."""
        return cls(MetricsAddress.of_environment())

    @property
    def url(self) -> str | None:
        """Where the metrics are served; None if they are not."""
        server = self._export.server
        return server.url if server is not None else None

    def close(self) -> None:
        """Release the hold. Idempotent; does nothing in a forked child."""
        if self._owner.is_current:
            with suppress(IndexError):
                self._cancels.pop()()
                self._export.let_go()


def _serve_process(address: MetricsAddress) -> MetricsServer | None:
    try:
        server = MetricsServer(address, collect_process)
    except ServerError as error:
        log.warning("this process tells no metrics, and goes on without: %s", error)
        return None
    log.info("the metrics of this process are at %s", server.url)
    return server


def collect_process() -> Iterator[Metric]:
    """The metrics of this process."""
    from prometheus_client.core import InfoMetricFamily

    yield InfoMetricFamily("ftcoord", "The release of ftcoord.", value={"version": __version__})
    for series in SERIES:
        yield _family(series)


def _family(series: Series[float] | Series[Distribution]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if series.kind == "histogram":
        histogram = HistogramMetricFamily(series.name, series.about, labels=series.labels)
        for labels, value in series.read().items():
            assert isinstance(value, Distribution)
            bounds = (*map(str, SECONDS), "+Inf")
            histogram.add_metric(labels, list(zip(bounds, map(float, value.cumulative()), strict=True)), value.total)
        return histogram
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = kind(series.name, series.about, labels=series.labels)
    for labels, value in series.read().items():
        assert isinstance(value, float | int)
        family.add_metric(labels, value)
    return family
