"""A small HTTP server for the text of a scrape. A peer that is silent or slow delays neither others nor `close()`."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from ftcoord import concurrency, fork
from ftcoord.errors import FtcoordError, ThreadNotStarted

log = logging.getLogger(__name__)

MOST_SCRAPERS: Final = 32
"""At a time. For one more, the oldest that has not sent its request yet is ended."""
MOST_THREADS: Final = 2 * MOST_SCRAPERS
"""At a time: those of connections that were ended for others may not have noticed it yet."""
CONNECTION_TIMEOUT: Final = 30.0
"""Seconds that a connection may last in all: the TLS handshake, its one request, and the answer."""
MOST_HEADERS: Final = 16_384
"""The most bytes of a request."""
TURN: Final = 0.5
"""Seconds between two looks for connections that have lasted too long."""

Answer = Callable[[], tuple[bytes, str]]
"""Returns a text and its media type."""


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


class HttpServer:
    """Answers each GET on a socket that listens, from its beginning to `close()`, on threads of its own.

    Args:
        listener: the socket; closed by `close()`.
        tls: of the server's side; None for plain HTTP.
        answer: called for each request, possibly on several threads at once. If it raises, the request is answered with
            an error.
        refused: returns why a request with this `Host` is not answered; empty if it is.

    Raises ThreadNotStarted.
    """

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext | None, answer: Answer, refused: Callable[[str], str]
    ) -> None:
        self._listener, self._tls, self._answer, self._refused = listener, tls, answer, refused  # never change
        self._lock = concurrency.lock("HttpServer._lock")  # guards all below
        self._silent: dict[socket.socket, float] = {}  # when those are ended that have asked nothing yet; oldest first
        self._others: dict[socket.socket, float] = {}  # the same for those that have, or were ended for others
        self._closed = False
        fork.hide(listener.fileno())
        listener.settimeout(TURN)
        self._thread = concurrency.thread(self._run, "ftcoord-metrics")
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Waits for no peer, and for no answer in progress. Idempotent."""
        with self._lock:
            already, self._closed = self._closed, True
            for peer in (*self._silent, *self._others):
                _end(peer)
        if already:
            return
        _end(self._listener)  # which wakes the thread at once on Linux
        concurrency.join(self._thread)
        fork.unhide(self._listener.fileno())
        self._listener.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                peer = None
            except OSError as error:  # `close()`; or no descriptor is left
                if not self._closed:
                    log.debug("no connection can be accepted: %s", error)
                    concurrency.sleep(TURN)
                peer = None
            self._end_late()
            if peer is not None:
                self._begin(peer)

    def _begin(self, peer: socket.socket) -> None:
        peer.settimeout(None)  # `_end` wakes whoever waits for it
        if self._tls is not None:
            try:
                peer = self._tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
            except OSError:  # it has gone
                peer.close()
                return
        with self._lock:
            total = len(self._silent) + len(self._others)
            welcome = not self._closed and (total < MOST_SCRAPERS or self._make_room()) and total < MOST_THREADS
            if welcome:
                self._silent[peer] = concurrency.now() + CONNECTION_TIMEOUT
        try:
            if welcome:
                concurrency.thread(self._serve, "ftcoord-scrape", peer).start()
                return
        except ThreadNotStarted as error:
            log.debug("a connection is not served: %s", error)
        self._drop(peer)

    def _make_room(self) -> bool:
        """End the oldest connection on which nothing was asked; false if there is none."""
        oldest = next(iter(self._silent), None)
        if oldest is not None:
            self._others[oldest] = self._silent.pop(oldest)  # until its thread drops it
            _end(oldest)
        return oldest is not None

    def _end_late(self) -> None:
        now = concurrency.now()
        with self._lock:
            for peer, until in (*self._silent.items(), *self._others.items()):
                if until <= now:
                    _end(peer)

    def _serve(self, peer: socket.socket) -> None:
        try:
            with suppress(OSError):  # it has gone, or was ended
                if isinstance(peer, ssl.SSLSocket):
                    peer.do_handshake()
                head = _read_head(peer)
                with self._lock:
                    self._others[peer] = self._silent.pop(peer, 0.0)
                self._respond(peer, head)
                _end(peer, socket.SHUT_WR)
        finally:
            self._drop(peer)

    def _respond(self, peer: socket.socket, head: bytes) -> None:
        try:
            response = self._response_to(head)
        except Exception:  # a bug of a collector, which prometheus_client calls: this peer gets an error, not silence
            log.exception("the metrics could not be read")
            response = _response("500 Internal Server Error", b"the metrics could not be read: see the log\n")
        peer.sendall(response)

    def _response_to(self, head: bytes) -> bytes:
        request, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        if not request.startswith("GET ") or not head.endswith(b"\r\n\r\n"):
            return _response("400 Bad Request", b"send a short GET request\n")
        why = self._refused(next((value for name, value in headers if name == "host"), ""))
        if why:
            return _response("421 Misdirected Request", f"{why}\n".encode())
        try:
            text, kind = self._answer()
        except FtcoordError as error:
            return _response("503 Service Unavailable", f"{error}\n".encode(errors="replace"))
        return _response("200 OK", text, kind)

    def _drop(self, peer: socket.socket) -> None:
        with self._lock:  # whoever ends a connection finds it open
            self._silent.pop(peer, None)
            self._others.pop(peer, None)
            peer.close()


def _end(peer: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wake the thread that reads or writes here. Not by TLS's own way, which would write to the peer."""
    with suppress(OSError):
        socket.socket.shutdown(peer, how)


def _read_head(peer: socket.socket) -> bytes:
    """The request to the end of its headers, or as much as is read of a longer one. Raises OSError."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MOST_HEADERS:
        more = peer.recv(4096)
        if not more:
            raise ConnectionError("the peer has gone")
        head += more
    return head[: head.find(b"\r\n\r\n") + 4] if b"\r\n\r\n" in head else head


def _response(status: str, text: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    return head.encode() + text
