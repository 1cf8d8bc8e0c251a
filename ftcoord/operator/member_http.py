"""What an etcd member reports over HTTP, at the clients' port: its metrics for Prometheus, and its clock."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import Final

from ftcoord import concurrency
from ftcoord.config import Endpoint, Tls

MOST_READ: Final = 4 * 1024 * 1024
"""The most bytes of an answer; a member's metrics take about 100 kB."""


@dataclass(frozen=True, slots=True)
class MemberNumbers:
    """What one member reported.

    Args:
        text: its metrics, in Prometheus' text format.
        clock_ahead: whole seconds that its clock is ahead of this host's; None if it does not report it.
    """

    text: str
    clock_ahead: float | None


def read_numbers(endpoint: Endpoint, tls: Tls | None, timeout: float) -> MemberNumbers | None:
    """The metrics of a member; None if it does not serve them there: not every etcd does."""
    connection = HTTPConnection(endpoint.host, endpoint.port, timeout=timeout)
    try:
        plain = socket.create_connection((endpoint.host, endpoint.port), timeout)
        connection.sock = plain if tls is None else _encrypted(plain, endpoint, tls)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        now = concurrency.wall()
        if answer.status != 200:
            return None
        date = answer.getheader("Date")
        ahead = parsedate_to_datetime(date).timestamp() - now if date else None
        return MemberNumbers(answer.read(MOST_READ).decode(errors="replace"), ahead)
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def tls_context(tls: Tls) -> ssl.SSLContext:
    """A context that checks a server's certificate as gRPC does. Raises OSError for a file that cannot be read.

    Python alone is stricter with authorities from 3.13 on: a certificate from a plain `openssl req -x509` does not
    state what its key is for.
    """
    context = ssl.create_default_context(cafile=tls.ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _encrypted(plain: socket.socket, endpoint: Endpoint, tls: Tls) -> socket.socket:
    try:
        return tls_context(tls).wrap_socket(plain, server_hostname=tls.name_at(endpoint.host))
    except OSError:
        plain.close()
        raise


def quantile_bound(text: str, histogram: str, share: float) -> float | None:
    """A bound that this share of a histogram's values does not exceed, infinite if it is above the highest bucket; None
    if there are no values."""
    buckets = sorted(_buckets(text, histogram))
    if not buckets or not buckets[-1][1]:
        return None
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


def _buckets(text: str, histogram: str) -> Iterator[tuple[float, float]]:
    start = f'{histogram}_bucket{{le="'
    for line in text.splitlines():
        if line.startswith(start):
            bound, _, rest = line.removeprefix(start).partition('"')
            yield float(bound), float(rest.rpartition(" ")[2])
