"""The dashboard's HTTP: static files, reports as server-sent events, and orders of those who have the token."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftcoord import concurrency
from ftcoord.config import EtcdConfig, choice, full_text, whole
from ftcoord.dashboard.feeds import Board, LeaseBook, PageFeed, Shown, TooManyViewers, part_of
from ftcoord.errors import (
    ClientClosed,
    ConfigError,
    EtcdError,
    FtcoordError,
    OutcomeUnknown,
    ServerError,
    ThreadNotStarted,
)
from ftcoord.etcd.api import Etcd
from ftcoord.metrics.exporter import is_allowed_host
from ftcoord.metrics.process import Collect, exposed
from ftcoord.operator import orders
from ftcoord.operator.report import Done, JobStatus, plain
from ftcoord.operator.status import Rules

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
KILL_WAIT: Final = 10.0
"""Seconds to wait for a manager to exit."""
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
    rules: Rules
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
    site = _Site(page, etcd, board, leases)
    routes: list[BaseRoute] = [
        Route("/", site.index),
        Route("/api/about", site.about),
        Route("/api/jobs", site.reports),
        Route("/api/job", site.reports),
        Route("/api/act", site.act, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    if not page.gateway_job:
        routes.append(Route("/metrics", _Metrics(collect).metrics))
    return _Guarded(Starlette(routes=routes), {*page.host_names, page.listen[0].lower()})


class _Site:
    """What is answered at each path."""

    def __init__(self, page: Page, etcd: Etcd, board: Board, leases: LeaseBook) -> None:
        self._page, self._etcd, self._board, self._leases = page, etcd, board, leases  # never change
        self._only = page.gateway_job

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
            order = read_order(json.loads(body))
            if self._only and order.job != self._only:
                return _of_another_job(self._only)
            sender = _peer_of(request) or "an unknown address"
            return JSONResponse(plain(await to_thread.run_sync(carry_out, self._page, self._etcd, order, sender)))
        except RecursionError:
            return refusal(400, "this is nested too deeply for an order")
        except ValueError as error:  # ConfigError too; no JSON
            return refusal(400, str(error))
        except OutcomeUnknown as error:
            return refusal(504, f"etcd did not answer: it may have been done, or not: {error}")
        except EtcdError as error:
            return refusal(503, f"etcd did not do it: {error}")
        except FtcoordError as error:
            return refusal(409, str(error))


class _Metrics:
    """Serves Prometheus the metrics of all runs. Scrapes share the read that is in progress: each reads all runs, and a
    slow etcd is not read for each of them."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect  # never changes
        self._reading: asyncio.Future[tuple[bytes, str]] | None = None

    async def metrics(self, _request: Request) -> Response:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(to_thread.run_sync(exposed, self._collect))
        try:
            text, kind = await asyncio.shield(self._reading)
        except ServerError as error:
            return PlainTextResponse(f"{error}\n", 501)
        return Response(text, media_type=kind)


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
                MutableHeaders(scope=message).update(HEADERS)
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
        except (TooManyViewers, ThreadNotStarted, ClientClosed) as error:
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
                    newest = replace(history, events=history.events[-NEWEST_EVENTS:])
                    yield _event("history", {"history": newest, "total": len(history.events)})
                yield await to_thread.run_sync(self._report, news)
            await anyio.sleep(STREAM_REST)
            with anyio.move_on_after(BEAT):
                await self._changed.wait()

    def _report(self, news: Shown) -> str:
        """On a thread: a job may have ten thousand members, and etcd may be slow to return their leases."""
        report, counts = part_of(news.report, *self._wanted) if news.report else (None, {})
        if isinstance(report, JobStatus) and not news.error:
            report = self._leases.lease(report)
        state = {"connected": not news.error, "error": news.error, "at": concurrency.wall(), "why": news.why}
        return _event("report", {**state, "report": report, "counts": counts})


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, default=plain)}\n\n"


# -- orders ---------------------------------------------------------------------------------------------------------


def is_token(authorization: str, token: str) -> bool:
    """Whether a request's `Authorization` has the token. The time does not depend on where a wrong one of the same
    length differs.

    Browsers send this header only if a page of the same origin sets it, so no other site can make them do so.
    """
    given = authorization.removeprefix(SCHEME) if authorization.startswith(SCHEME) else ""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


@dataclass(frozen=True, slots=True)
class PageOrder:
    """An order.

    Args:
        what: evict, drain, close or kill.
        job: the job.
        name: the member, node or replica; empty to close the job.
        who: who gives the order, in their own words.
        reason: why; empty for no reason.
        force: for drain: also if fewer nodes would stay than a round needs.
    """

    what: str
    job: str
    name: str
    who: str
    reason: str
    force: bool


def read_order(given: object) -> PageOrder:
    """Parse an order from JSON. Raises ConfigError."""
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
    return PageOrder(what, word("job"), name, who=word("who"), reason=reason, force=force)


def carry_out(page: Page, etcd: Etcd, order: PageOrder, sender: str) -> Done:
    """Do what the commands do, and record who gave the order, from which address. Raises NothingThere, ConfigError,
    StateError and EtcdError."""
    known, timeout = (etcd, page.key_prefix, order.job), page.etcd.request_timeout

    def reason(done: str) -> str:
        return orders.because(f"{done} by {order.who} through the page of {page.who}, from {sender}", order.reason)

    match order.what:
        case "kill":
            return orders.kill_replica(*known, order.name, reason("killed"), KILL_WAIT, order.who)
        case "close":
            orders.nodes_of_run(*known)
            return orders.close_job(*known, reason("closed"), order.who, timeout)
        case "drain":
            return orders.drain(*known, order.name, reason("was drained"), order.who, timeout, force=order.force)
    return orders.evict_members(etcd, order.job, orders.find_members(*known, order.name), reason("evicted"), order.who)
