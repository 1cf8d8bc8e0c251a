"""The dashboard's HTTP: static files, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftcoord import concurrency
from ftcoord.config import full_text, whole
from ftcoord.dashboard.acts import PageActor, read_order
from ftcoord.dashboard.board import Board, LeaseBook, Shown, TooManyViewers, Viewing
from ftcoord.dashboard.guarding import HEADERS, is_token
from ftcoord.dashboard.pages import Wanted, members_on, page_of
from ftcoord.dashboard.pasts import Past
from ftcoord.dashboard.refusals import peer_of, reason_of, refusal, sender_of, status_of
from ftcoord.errors import (
    ClientClosed,
    ConfigError,
    FtcoordError,
    ServerError,
    ThreadNotStarted,
)
from ftcoord.metrics.exporter import Collect, exposed
from ftcoord.metrics.http import is_allowed_host
from ftcoord.operator.job_keys import LeaseTime
from ftcoord.operator.told import plain

STATIC: Final = Path(__file__).parent / "static"
BEAT: Final = 5.0
"""Seconds after which a viewer is sent something even if nothing has changed: the leases, and a sign that the dashboard
is alive."""
STREAM_REST: Final = 0.2
"""The fewest seconds between two pages to one viewer."""
SLOWEST: Final = 30.0
"""Seconds after which a viewer that reads nothing is disconnected."""
MOST_ORDERED: Final = 16_384
"""The most bytes of an order."""
LONGEST_SEARCH: Final = 200
"""The most characters of a search text."""


def make_app(
    board: Board,
    leases: LeaseBook,
    about: Mapping[str, Any],
    collect: Collect | None,
    host_names: Collection[str] = (),
    *,
    actor: PageActor | None = None,
    token: str = "",
    only: str = "",
) -> ASGIApp:
    """The dashboard's application.

    Args:
        board: the states to show.
        leases: the members' leases.
        about: what the dashboard says about itself.
        collect: returns the metrics of all runs for Prometheus; None to serve none. Raises ServerError without
            prometheus_client.
        host_names: host names accepted in the Host header, besides addresses and localhost; in lower case.
        actor, token: what carries out orders that have this token; None for a read-only dashboard.
        only: the job of a gateway, which is the only one shown; empty for all jobs.
    """
    streams = _Streams(board, leases, only)
    routes: list[BaseRoute] = [
        Route("/", _Index(only).index),
        Route("/api/about", lambda _: JSONResponse({**about, "acts": actor is not None})),
        Route("/api/jobs", streams.jobs),
        Route("/api/job", streams.job),
        Route("/api/act", _Orders(actor, token, only).order, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    if collect is not None:
        routes.append(Route("/metrics", _Metrics(collect).metrics))
    return _Guarded(Starlette(routes=routes), frozenset(host_names))


class _Index:
    def __init__(self, only: str) -> None:
        self._only = only  # never changes

    async def index(self, request: Request) -> Response:
        if self._only and request.query_params.get("job") != self._only:
            return RedirectResponse(f"./?{urlencode({'job': self._only})}")
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")


class _Guarded:
    """Refuses requests with an unknown Host, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, host_names: frozenset[str]) -> None:
        self._app, self._host_names = app, host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if scope["type"] == "http" and not is_allowed_host(Request(scope).headers.get("host", ""), self._host_names):
            text = "This page has another name. FTCOORD_DASHBOARD_HOST_NAMES says by which names it may be called.\n"
            app = PlainTextResponse(text, 421)
        await app(scope, receive, guarded)


class _Orders:
    """Takes orders that have the token."""

    def __init__(self, actor: PageActor | None, token: str, only: str) -> None:
        self._actor, self._token, self._only = actor, token, only  # never change

    async def order(self, request: Request) -> Response:
        if self._actor is None:
            return refusal(403, "this page is read-only: FTCOORD_DASHBOARD_TOKEN lets it act")
        if not is_token(request.headers.get("authorization", ""), self._token):
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
            return JSONResponse(plain(await to_thread.run_sync(self._actor.act, order, sender_of(request))))
        except (FtcoordError, ValueError) as error:  # what is no JSON is a ValueError
            return refusal(status_of(error), reason_of(error))
        except RecursionError:
            return refusal(400, "this is nested too deeply for an order")


def _of_another_job(only: str) -> Response:
    return refusal(403, f"this page is about {only!r} only")


class _Metrics:
    """Serves Prometheus the metrics of all runs, one scrape at a time: each reads all of them. Scrapes that wait share
    the next one: a slow etcd is not read for each of them, since most of their callers have gone by then."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect  # never changes
        self._turn = asyncio.Lock()
        # For whoever has the turn:
        self._read_at = -math.inf  # when the last read began
        self._read = b"", ""

    async def metrics(self, _request: Request) -> Response:
        asked_at = concurrency.now()
        try:
            async with self._turn:
                if self._read_at < asked_at:
                    begun_at = concurrency.now()
                    self._read = await to_thread.run_sync(exposed, self._collect)
                    self._read_at = begun_at
                text, kind = self._read
        except ServerError as error:
            return PlainTextResponse(f"{error}\n", 501)
        return Response(text, media_type=kind)


class _Streams:
    """Makes streams of requests."""

    def __init__(self, board: Board, leases: LeaseBook, only: str) -> None:
        self._board, self._leases, self._only = board, leases, only  # never change

    async def jobs(self, request: Request) -> ASGIApp:  # Starlette calls what an endpoint returns
        return self._stream(None, request)

    async def job(self, request: Request) -> ASGIApp:
        try:
            return self._stream(full_text("job", request.query_params.get("job", "")), request)
        except ConfigError as error:
            return refusal(400, str(error))

    def _stream(self, job: str | None, request: Request) -> ASGIApp:
        if self._only and job != self._only:
            return _of_another_job(self._only)
        try:
            offset = whole(0, 10**9)("offset", request.query_params.get("offset", "0"))
        except ConfigError as error:
            return refusal(400, str(error))
        look = Wanted(request.query_params.get("find", "")[:LONGEST_SEARCH], offset)
        return _Stream(self._board, self._leases, job, look, peer_of(request))


class _Stream:
    """One viewer's stream, as long as the viewer reads."""

    def __init__(self, board: Board, leases: LeaseBook, job: str | None, look: Wanted, client: str) -> None:
        self._board, self._leases, self._client = board, leases, client  # never change
        self._job, self._look = job, look  # never change
        self._members: list[str] = []
        self._lease_times: dict[str, LeaseTime] = {}
        self._past: Past | None = None  # that was sent last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(changed.set)

        try:
            viewing = await to_thread.run_sync(self._board.view, self._job, wake, self._client)
        except (TooManyViewers, ThreadNotStarted, ClientClosed) as error:
            await refusal(503, str(error))(scope, receive, send)
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                asks = asyncio.Event()
                tasks.start_soon(self._ask_leases, viewing, asks, changed)
                with suppress(TimeoutError, OSError):  # a viewer that takes nothing, or is gone
                    await self._tell(viewing, asks, changed, send)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(viewing.close)

    async def _tell(self, viewing: Viewing, asks: asyncio.Event, changed: asyncio.Event, send: Send) -> None:
        """Send until the feed has ended. Raises TimeoutError for a viewer that reads nothing."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await _patiently(send, {"type": "http.response.start", "status": 200, "headers": headers})
        shown, leases, beat_at = None, None, -math.inf
        while shown is None or not shown.is_last:
            changed.clear()
            news = viewing.news
            if news is not None and news is not shown:
                shown, members = news, self._members
                await self._send(send, "page", await to_thread.run_sync(self._page, shown))
                if shown.past is not None and shown.past != self._past:
                    await self._send(send, "past", self._news_of(shown.past))
                if self._members != members:
                    asks.set()
            if concurrency.now() >= beat_at or self._lease_times is not leases:
                leases = self._lease_times
                await self._send(send, "beat", {"leases": {} if shown is None or shown.error else leases})
                beat_at = concurrency.now() + BEAT
            await anyio.sleep(STREAM_REST)
            with anyio.move_on_after(beat_at - concurrency.now()):
                await changed.wait()
        await _patiently(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _ask_leases(self, viewing: Viewing, asks: asyncio.Event, changed: asyncio.Event) -> None:
        """Runs beside the stream: it reads etcd, which may be unreachable, and the stream must report that at once."""
        while True:
            with anyio.move_on_after(BEAT):
                await asks.wait()
            asks.clear()
            if self._members and viewing.news is not None and not viewing.news.error:
                self._lease_times = await to_thread.run_sync(self._leases.of, self._members)
                changed.set()

    def _page(self, shown: Shown) -> dict[str, Any]:
        """On a thread: a job may have ten thousand members."""
        page = None if shown.told is None else page_of(shown.told, self._look)
        self._members = members_on(page) if page else []
        return {"connected": not shown.error, "error": shown.error, "at": concurrency.wall(), "page": page}

    def _news_of(self, past: Past) -> dict[str, Any]:
        """What the viewer does not know yet: why a job is in its state may change at each step, its history rarely
        does."""
        last, self._past = self._past, past
        news: dict[str, Any] = {"why": past.why, "total": past.total}
        return news if last is not None and last.events == past.events else {**news, "events": past.events}

    async def _send(self, send: Send, event: str, told: dict[str, Any]) -> None:
        text = f"event: {event}\ndata: {json.dumps(told, default=plain)}\n\n"
        await _patiently(send, {"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _patiently(send: Send, message: Message) -> None:
    with anyio.fail_after(SLOWEST):
        await send(message)


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
