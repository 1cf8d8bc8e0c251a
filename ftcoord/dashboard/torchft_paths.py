"""torchft's own HTTP paths, as its lighthouse serves them: `/status`, and `/replica/<id>/kill`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ftcoord import concurrency
from ftcoord.dashboard.acts import PageActor, PageOrder
from ftcoord.dashboard.board import LeaseBook
from ftcoord.dashboard.guarding import is_of_another_site, is_token
from ftcoord.dashboard.pages import ROWS_OF_PAGE
from ftcoord.dashboard.refusals import reason_of, sender_of, status_of
from ftcoord.dashboard.torchft_status import status_page
from ftcoord.errors import EtcdError, FtcoordError
from ftcoord.operator.status import members_of
from ftcoord.operator.told import JobStatus

STATUS_AGE: Final = 1.0
"""Seconds for which a status, or that etcd did not answer, is reused for other viewers: torchft's own page polls once a
second, in each browser that shows it."""
ASKER: Final = "whoever called torchft's /replica/<id>/kill"
"""The sender of a kill order, which torchft's path does not name."""


@dataclass(frozen=True, slots=True)
class TorchftPaths:
    """What torchft's paths are about.

    Args:
        job: its id. No other job is shown.
        read: returns the job's status now; raises EtcdError.
        leases: of its members.
        killer: what kills replicas; None if nobody may.
        token: the token that a kill needs; empty if anyone who reaches the dashboard may kill, as with torchft.
    """

    job: str
    read: Callable[[], JobStatus]
    leases: LeaseBook
    killer: PageActor | None
    token: str

    def routes(self) -> list[Route]:
        """The routes for one server."""
        calls = _Calls(self)
        return [
            Route("/status", calls.status),
            Route("/replica/{replica_id:path}/kill", calls.kill, methods=["POST"]),
        ]


class _Calls:
    def __init__(self, paths: TorchftPaths) -> None:
        self._paths = paths  # never changes
        self._turn = asyncio.Lock()  # guards what follows, and is held while etcd is read
        self._status_page, self._code, self._read_at = "", 0, -math.inf

    async def status(self, _request: Request) -> Response:
        async with self._turn:
            if concurrency.now() - self._read_at >= STATUS_AGE:
                self._status_page, self._code = await to_thread.run_sync(self._read)
                self._read_at = concurrency.now()
            return (HTMLResponse if self._code == 200 else PlainTextResponse)(self._status_page, self._code)

    def _read(self) -> tuple[str, int]:
        """A page or what is said in its place, and the status of HTTP."""
        try:
            status = self._paths.read()
        except EtcdError as error:
            return f"etcd cannot be read: {error}\n", 503
        leases = self._paths.leases.of(members_of(status)[:ROWS_OF_PAGE])
        return status_page(status, leases, concurrency.wall()), 200

    async def kill(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        killer = self._paths.killer
        assert killer is not None
        order = PageOrder("kill", self._paths.job, request.path_params["replica_id"], ASKER, "")
        try:
            done = await to_thread.run_sync(killer.act, order, sender_of(request))
        except (FtcoordError, ValueError) as error:
            return PlainTextResponse(f"Something went wrong: {reason_of(error)}\n", status_of(error))
        return PlainTextResponse("".join(f"{line}\n" for line in done.did or done.left), 200 if done.did else 409)

    def _refused(self, request: Request) -> Response | None:
        if self._paths.killer is None:
            why = "this page kills nobody: FTCOORD_DASHBOARD_TOKEN lets it act, or --allow-kill without a token"
            return PlainTextResponse(f"{why}\n", 403)
        if is_of_another_site(request.headers):
            return PlainTextResponse("another site's page has sent this: only this site's own may\n", 403)
        if self._paths.token and not is_token(request.headers.get("authorization", ""), self._paths.token):
            return PlainTextResponse("send the page's token: `Authorization: Bearer TOKEN`\n", 401)
        return None
