"""The page's application, called as a server calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from helpers import DEADLINE
from prometheus_client.core import GaugeMetricFamily
from virtual import MemoryClient

from ftcoord.config import EtcdConfig
from ftcoord.core.layout import members_span, run_prefix
from ftcoord.dashboard.feeds import Board, LeaseBook
from ftcoord.dashboard.server import Page, make_app
from ftcoord.etcd.api import Get
from ftcoord.metrics.process import Collect
from ftcoord.operator.status import Rules

TOKEN = "0123456789abcdef"


def seven_of_ten(lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
    """The time left of any lease."""
    return 7, 10


def numbers() -> list[GaugeMetricFamily]:
    return [GaugeMetricFamily("ftcoord_runs", "Runs.", value=7)]


def page_of(**settings: Any) -> Page:
    """A page's settings: the usual ones, but for these."""
    known: dict[str, Any] = {"etcd": EtcdConfig.load("127.0.0.1:1", env={}, request_timeout=DEADLINE)}
    known |= {"key_prefix": "/f", "rules": Rules(), "listen": ("127.0.0.1", 0), "about": {"version": "1"}}
    return Page(**{**known, "host_names": (), "who": "me@here", "token": "", **settings})


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def events(self, kind: str) -> list[Any]:
        parts = [part.split("\n") for part in self.body.decode().split("\n\n")]
        return [json.loads(part[1].removeprefix("data: ")) for part in parts if part[0] == f"event: {kind}"]


class Site:
    """The application, and what it stands on."""

    def __init__(self, client: MemoryClient, board: Board) -> None:
        self.client, self.board = client, board
        self.makes()

    def makes(self, collect: Collect = numbers, **settings: Any) -> None:
        """Have a page with these settings."""
        self.app = make_app(page_of(**settings), self.client, self.board, LeaseBook(seven_of_ten), collect)

    def may_act(self) -> None:
        self.makes(token=TOKEN)

    def order(self, authorization: str = f"Bearer {TOKEN}", **order: object) -> Answer:
        body = json.dumps({"what": "evict", "job": "a/b", "name": "n", "who": "ann", **order}).encode()
        return self.get("/api/act", method="POST", body=body, headers={"authorization": authorization})

    def members(self) -> int:
        return self.client.range(Get(members_span(run_prefix("/f", "a/b")), count_only=True)).count

    def get(
        self,
        path: str,
        host: str = "127.0.0.1:1",
        until: Callable[[Answer], bool] = lambda _: False,
        method: str = "GET",
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
        **query: object,
    ) -> Answer:
        """Ask, and go away as soon as the answer is enough."""
        answer = Answer()

        async def ask() -> None:
            gone = asyncio.Event()
            asked = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if asked:
                    return asked.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    answer.status = message["status"]
                    answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                answer.body += message.get("body", b"")
                if until(answer):
                    gone.set()

            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "query_string": urlencode(query).encode(),
                "headers": [(name.encode(), text.encode()) for name, text in {"host": host, **headers}.items()],
                "client": ("192.0.2.7", 5),
            }
            await asyncio.wait_for(self.app(scope, receive, send), DEADLINE)

        asyncio.run(ask())
        return answer
