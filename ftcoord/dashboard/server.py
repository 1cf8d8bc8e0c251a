"""The dashboard's server: static files, reports as server-sent events, and orders of those who have the token.

uvicorn limits neither how many connections there are, nor how long it waits for a request, or for its answer to be
read: clients that connect and send nothing would take descriptors of this process until none are left. In a gateway
they are also those by which it serves its managers. So it runs here with these bounds.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import anyio
import uvicorn
from anyio import to_thread
from starlette import applications, datastructures, routing, staticfiles
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ftcoord import concurrency, errors
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig, choice, full_text, whole
from ftcoord.dashboard.feeds import MOST_VIEWERS, SHARE, Board, LeaseBook, PageFeed, Shown, TooManyViewers, part_of
from ftcoord.errors import ConfigError, ServerError
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.client import EtcdClient
from ftcoord.metrics.exporter import is_allowed_host
from ftcoord.metrics.process import Collect, exposed
from ftcoord.operator import orders, reading, report, status

log = logging.getLogger(__name__)

END_TIMEOUT: Final = 2
"""Seconds that answers in progress may take when the server ends."""
MOST_CONNECTIONS: Final = MOST_VIEWERS + 100
"""At a time. One that comes when there are as many is closed at once."""
MOST_OF_ADDRESS: Final = MOST_CONNECTIONS // SHARE
"""Of them from one address: behind a proxy all viewers have one."""
UNREAD_TIMEOUT: Final = 30.0
"""Seconds that a peer may read so little that nothing more can be written to it."""
HEADERS_TIMEOUT: Final = 20.0
"""Seconds that a connection has for the headers of its next request, from its beginning or from the last answer."""
STATIC: Final = Path(__file__).parent / "static"
BEAT: Final = 5.0
"""Seconds after which a viewer is sent its report again even if nothing has changed: with the leases of now, and as a
sign that the dashboard is alive."""
STREAM_REST: Final = 0.2
"""The fewest seconds between two reports to one viewer."""
NEWEST_EVENTS: Final = 100
"""Events of a history that are sent."""
MOST_ORDERED: Final = 16_384
"""The most bytes of an order."""
LONGEST_WORD: Final = 1000
"""The most characters of each part of an order."""
LONGEST_SEARCH: Final = 200
"""The most characters of a search text."""
SCHEME: Final = "Bearer "
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer. They disable inline scripts and styles."""


@dataclass(frozen=True, slots=True)
class Page:
    """What the dashboard shows, where it is served, and who may do what there.

    Args:
        etcd, key_prefix: where the jobs are.
        rules: the rules to judge them by.
        listen: the host and port; port 0 for a free one.
        about: its version, host, key prefix and endpoints, for the page.
        host_names: host names accepted in the Host header, besides addresses and localhost; in lower case.
        who: as whom it acts, such as user@host.
        token: the token for orders; empty for a read-only dashboard.
        gateway_job: the only job that it shows, without metrics; empty for all jobs.
    """

    etcd: EtcdConfig
    key_prefix: str
    rules: status.Rules
    listen: tuple[str, int]
    about: Mapping[str, Any]
    host_names: Collection[str]
    who: str
    token: str
    gateway_job: str = ""


def make_app(page: Page, etcd: Etcd, board: Board, leases: LeaseBook, collect: Collect) -> ASGIApp:
    """The dashboard's application.

    Args:
        etcd: the client for orders.
        board: the feeds of its viewers.
        leases: the members' leases.
        collect: returns the metrics of all runs. Raises ServerError without prometheus_client.
    """
    site = _Site(page, etcd, board, leases, collect)
    gets = {"/": site.index, "/api/about": site.about, "/api/jobs": site.reports, "/api/job": site.reports}
    gets |= {} if page.gateway_job else {"/metrics": site.metrics}
    routes: list[routing.BaseRoute] = [routing.Route(path, answer) for path, answer in gets.items()]
    routes.append(routing.Route("/api/act", site.act, methods=["POST"]))
    routes.append(routing.Mount("/static", staticfiles.StaticFiles(directory=STATIC)))
    return _Guarded(applications.Starlette(routes=routes), {*page.host_names, page.listen[0].lower()})


class _Site:
    """What is answered at each path."""

    def __init__(self, page: Page, etcd: Etcd, board: Board, leases: LeaseBook, collect: Collect) -> None:
        self._page, self._etcd, self._board, self._leases = page, etcd, board, leases  # never change
        self._only, self._collect = page.gateway_job, collect  # never change
        self._scraping = anyio.CapacityLimiter(1)  # each scrape reads all runs, and viewers need the other threads

    async def index(self, request: Request) -> Response:
        if self._only and request.query_params.get("job") != self._only:
            return RedirectResponse(f"./?{urlencode({'job': self._only})}")
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    async def about(self, _request: Request) -> Response:
        return JSONResponse({**self._page.about, "acts": bool(self._page.token)})

    async def reports(self, request: Request) -> Response:
        """The stream of a job, or of the list."""
        asked = request.query_params
        try:
            job = full_text("job", asked.get("job", "")) if request.url.path.endswith("/job") else None
            offset = whole(0, 10**9)("offset", asked.get("offset", "0"))
        except ConfigError as error:
            return refusal(400, str(error))
        if self._only and job != self._only:
            return _of_another_job(self._only)
        return _Reports(self._board, self._leases, job, find=asked.get("find", "")[:LONGEST_SEARCH], offset=offset)

    async def act(self, request: Request) -> Response:
        if not self._page.token:
            return refusal(403, "this page is read-only: FTCOORD_DASHBOARD_TOKEN lets it act")
        if not is_token(request.headers.get("authorization", ""), self._page.token):
            return refusal(401, "this is not the page's token")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_ORDERED:
                return refusal(413, "an order is shorter than this")
        try:
            sender = _peer_of(request) or "an unknown address"
            order = read_order(json.loads(body), f"the page of {self._page.who}, from {sender}")
            if self._only and order.job != self._only:
                return _of_another_job(self._only)
            return JSONResponse(await to_thread.run_sync(self._carry_out, order))
        except RecursionError:
            return refusal(400, "this is nested too deeply for an order")
        except ValueError as error:  # ConfigError too; no JSON
            return refusal(400, str(error))
        except errors.OutcomeUnknown as error:
            return refusal(504, f"etcd did not answer: it may have been done, or not: {error}")
        except errors.EtcdError as error:
            return refusal(503, f"etcd did not do it: {error}")
        except errors.FtcoordError as error:
            return refusal(409, str(error))

    async def metrics(self, _request: Request) -> Response:
        try:
            text, kind = await to_thread.run_sync(exposed, self._collect, limiter=self._scraping)
        except ServerError as error:
            return PlainTextResponse(f"{error}\n", 501)
        return Response(text, media_type=kind)

    def _carry_out(self, order: orders.Order) -> report.Done:
        """Do what the command does, with who gave the order and from which address in its reason."""
        known = self._etcd, self._page.key_prefix
        return orders.planned(*known, order, self._page.etcd.request_timeout)[1]()


def refusal(status: int, why: str) -> Response:
    """An answer that gives the reason why nothing was done."""
    return JSONResponse({"error": why}, status)


def _of_another_job(only: str) -> Response:
    return refusal(403, f"this page is about {only!r} only")


def _peer_of(request: Request) -> str:
    """The sender's address, regardless of its headers, which any client can write. Empty if it is unknown."""
    return request.client.host if request.client else ""


class _Guarded:
    """Refuses requests with an unknown Host, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, host_names: Collection[str]) -> None:
        self._app, self._host_names = app, host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                datastructures.MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if scope["type"] == "http" and not is_allowed_host(Request(scope).headers.get("host", ""), self._host_names):
            text = "This page is not served under this name: add it to FTCOORD_DASHBOARD_HOST_NAMES.\n"
            app = PlainTextResponse(text, 421)
        await app(scope, receive, guarded)


class _Reports(StreamingResponse):
    """One viewer's stream, until its connection ends. A viewer that reads nothing loses its connection, see
    `BoundedProtocol`."""

    def __init__(self, board: Board, leases: LeaseBook, job: str | None, *, find: str, offset: int) -> None:
        self._board, self._leases, self._job, self._wanted = board, leases, job, (find, offset)  # never change
        self._changed = asyncio.Event()
        super().__init__(self._events(), headers={"x-accel-buffering": "no"}, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(self._changed.set)

        client = _peer_of(Request(scope))
        try:
            self._feed: PageFeed = await to_thread.run_sync(self._board.view, self._job, wake, client)
        except (TooManyViewers, errors.ThreadNotStarted, errors.ClientClosed) as error:
            await refusal(503, str(error))(scope, receive, send)
            return
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._board.leave, self._feed, wake)

    async def _events(self) -> AsyncIterator[str]:
        """Until the feed has ended."""
        news, history = None, None
        while news is None or not news.is_last:
            self._changed.clear()
            news = self._feed.news
            if news is not None:
                if news.history is not None and news.history != history:
                    history = news.history  # it rarely changes, and is long
                    newest = {**history, "events": history["events"][-NEWEST_EVENTS:]}
                    yield _event("history", {"history": newest, "total": len(history["events"])})
                yield await to_thread.run_sync(self._report, news)
            await anyio.sleep(STREAM_REST)
            with anyio.move_on_after(BEAT):
                await self._changed.wait()

    def _report(self, news: Shown) -> str:
        """On a thread: a job may have ten thousand members, and etcd may be slow to return their leases."""
        report, counts = part_of(news.report, *self._wanted) if news.report else (None, {})
        if report is not None and self._job is not None and not news.error:
            report = self._leases.lease(report)
        state = {"connected": not news.error, "error": news.error, "at": concurrency.wall(), "why": news.why}
        return _event("report", {**state, "report": report, "counts": counts})


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, default=asdict)}\n\n"


# -- orders ---------------------------------------------------------------------------------------------------------


def is_token(authorization: str, token: str) -> bool:
    """Whether a request's `Authorization` has the token. The time does not depend on where a wrong one of the same
    length differs.

    Browsers send this header only if a page of the same origin sets it, so no other site can make them do so.
    """
    given = authorization.removeprefix(SCHEME) if authorization.startswith(SCHEME) else ""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def read_order(given: object, through: str) -> orders.Order:
    """Parse an order from JSON. Its reason records `through` which page it came. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError("order", "", "give a JSON object")

    def word(key: str) -> str:
        found = full_text(key, given.get(key))
        if len(found) > LONGEST_WORD:
            raise ConfigError(key, f"{found[:20]}...", f"give at most {LONGEST_WORD} characters")
        return found

    what = choice("evict", "drain", "close", "kill")("what", given.get("what", ""))
    force = given.get("force", False)
    if not isinstance(force, bool) or (force and what != "drain"):
        raise ConfigError("force", str(force), "give true or false, and true only to drain")
    name, reason = "" if what == "close" else word("name"), word("reason") if given.get("reason") else ""
    return orders.Order(what, word("job"), name, word("who"), reason, through=through, force=force)


# -- serving --------------------------------------------------------------------------------------------------------


class PageServer(Closing):
    """Serves the dashboard on its own thread, until `close()`, even without etcd.

    Raises ServerError when it cannot listen there, ThreadNotStarted, and ConfigError.
    """

    def __init__(self, page: Page) -> None:
        host, port = page.listen
        with ExitStack() as undo:
            listener = undo.enter_context(_listening(host, port))
            client = undo.enter_context(EtcdClient(page.etcd))
            board = undo.enter_context(Board(client, page.key_prefix, page.rules))
            collect = reading.RunsCollector(page.etcd, page.key_prefix).collect
            config = uvicorn.Config(
                make_app(page, client, board, LeaseBook(client.time_left), collect),
                http=BoundedProtocol,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # else a client on this machine could choose the address that orders come from
                timeout_graceful_shutdown=END_TIMEOUT,
            )
            self._server, self.address = uvicorn.Server(config), f"http://{host}:{listener.getsockname()[1]}"
            self._thread = concurrency.thread(self._serve, "ftcoord-page", listener)
            self._thread.start()  # who connects before it serves waits for it
            undo.callback(self._end)
            self._ends = undo.pop_all()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended though nobody closed it. The log has the reason."""
        return not self._thread.is_alive() and not self._server.should_exit

    def close(self) -> None:
        """Stop serving, within a few seconds. Idempotent."""
        self._ends.close()

    def _end(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _serve(self, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        except (OSError, SystemExit) as error:  # no descriptors; uvicorn's exit, which ends a thread without a log line
            log.error("the page at %s has ended: %s; start it again", self.address, error)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP, on a connection that ends when nothing is asked on it. For the thread of the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        their = sum(_address_of(one) == _address_of(self) for one in self.connections)
        if len(self.connections) > MOST_CONNECTIONS or their > MOST_OF_ADDRESS:
            transport.abort()
        else:
            self._end_after("silent", HEADERS_TIMEOUT, self._end_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_after("unread", UNREAD_TIMEOUT, self.transport.abort)  # not `close`, which waits until all is read

    def resume_writing(self) -> None:
        if (timer := self._timers.pop("unread", None)) is not None:
            timer.cancel()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_after("silent", HEADERS_TIMEOUT, self._end_if_silent)

    def _end_after(self, what: str, seconds: float, end: Callable[[], None]) -> None:
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = self.loop.call_later(seconds, end)

    def _end_if_silent(self) -> None:
        """uvicorn's own timer of idle connections ends with the first byte, though no request may follow."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _address_of(one: object) -> str:
    """The address of a connection; empty if it is unknown."""
    client: tuple[str, int] | None = getattr(one, "client", None)
    return client[0] if client else ""
