"""The page's HTTP, called as a server calls it, with an etcd in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import pytest
from helpers import DEADLINE, eventually

from ftcoord.core import rendezvous_records
from ftcoord.core.layout import member_id, member_key, run_prefix
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.dashboard import app as apps
from ftcoord.dashboard.app import make_app
from ftcoord.dashboard.board import Board, LeaseBook
from ftcoord.operator.status import Rules
from ftcoord.testing import MemoryClient, MemoryEtcd


class Clerk:
    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        return 7, 10


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
        self.app = make_app(board, LeaseBook(Clerk()), {"version": "1"})

    def get(
        self,
        path: str,
        host: str = "127.0.0.1:1",
        until: Callable[[Answer], bool] = lambda _: False,
        takes: Callable[[], bool] = lambda: True,
        **query: object,
    ) -> Answer:
        """Ask, and go away as soon as the answer is enough.

        Args:
            takes: whether the viewer takes what it is sent; what it does not take waits.
        """
        answer = Answer()

        async def ask() -> None:
            gone = asyncio.Event()
            asked = [{"type": "http.request", "body": b"", "more_body": False}]

            async def receive() -> Any:
                if asked:
                    return asked.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if not takes():
                    await asyncio.Event().wait()
                if message["type"] == "http.response.start":
                    answer.status = message["status"]
                    answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                answer.body += message.get("body", b"")
                if until(answer):
                    gone.set()

            scope = {
                "type": "http",
                "method": "GET",
                "path": path,
                "query_string": urlencode(query).encode(),
                "headers": [(b"host", host.encode())],
            }
            await asyncio.wait_for(self.app(scope, receive, send), DEADLINE)

        asyncio.run(ask())
        return answer


@pytest.fixture
def site() -> Iterator[Site]:
    with MemoryEtcd() as etcd, etcd.client() as client, Board(client, "/f", Rules()) as board:
        lease = client.grant(600).id
        ask = JoinRequest("n", "10.0.0.1", 5, 0, "host of n", "n", 2, 4)
        client.put(member_key(run_prefix("/f", "a/b"), member_id(lease)), rendezvous_records.encode(ask), lease)
        yield Site(client, board)


def test_the_page_and_its_parts_are_served_with_a_policy(site: Site) -> None:
    for path, kind in (("/", "text/html"), ("/static/page.js", "text/javascript"), ("/static/page.css", "text/css")):
        answer = site.get(path)
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert b"<script>" not in site.get("/").body
    assert site.get("/static/../app.py").status == 404


@pytest.mark.parametrize("path", ["/", "/api/jobs", "/api/about", "/static/page.js"])
def test_another_sites_name_is_answered_nothing(site: Site, path: str) -> None:
    answer = site.get(path, host="evil.example:1")
    assert answer.status == 421
    assert site.board.followed == set()


def test_a_job_is_streamed_and_freed_when_its_viewer_goes(site: Site) -> None:
    answer = site.get("/api/job", job="a/b", until=lambda told: any(one["leases"] for one in told.events("beat")))
    (page, *_), beat = answer.events("page"), answer.events("beat")[-1]
    assert page["connected"]
    (row,) = page["page"]["rounds"]["members"]["rows"]
    assert row["host"] == "host of n"
    assert beat["leases"] == {row["member"]: {"left": 7, "ttl": 10}}
    assert site.board.followed == set()


def test_the_list_is_streamed(site: Site) -> None:
    answer = site.get("/api/jobs", until=lambda told: bool(told.events("page")))
    assert [one["job"] for one in answer.events("page")[0]["page"]["jobs"]["rows"]] == ["a/b"]


def test_a_lost_etcd_is_in_the_stream(site: Site) -> None:
    site.client.cut_off()
    answer = site.get("/api/job", job="a/b", until=lambda told: bool(told.events("page")))
    found = answer.events("page")[0]
    assert (found["connected"], found["page"]) == (False, None)
    assert found["error"]


def test_a_viewer_that_takes_nothing_is_dropped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "SLOWEST", 0.05)
    site.get("/api/job", job="a/b", takes=lambda: False)
    eventually(lambda: site.board.followed == set(), "the feed is freed")


@pytest.mark.parametrize("query", [{}, {"job": ""}, {"job": "x", "offset": "-1"}, {"job": "x", "offset": "a"}])
def test_bad_questions_are_refused(site: Site, query: dict[str, str]) -> None:
    answer = site.get("/api/job", **query)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]


def test_one_too_many_is_told_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.dashboard.board.MOST_VIEWERS", 0)
    answer = site.get("/api/jobs")
    assert answer.status == 503
    assert "too many" in json.loads(answer.body)["error"]
