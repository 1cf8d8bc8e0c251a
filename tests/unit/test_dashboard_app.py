"""The page's HTTP, called as a server calls it, with an etcd in memory."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from held import timers_kv
from helpers import DEADLINE, eventually
from page_calls import TOKEN, Answer, Clerk, Site, numbers
from prometheus_client.core import GaugeMetricFamily
from virtual import MemoryClient, MemoryEtcd

from ftcoord.core import history, rendezvous_records
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import (
    death_key,
    decided_key,
    event_key,
    member_id,
    member_key,
    members_span,
    run_prefix,
)
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest, Round, Seat, parse_decided
from ftcoord.dashboard import app as apps
from ftcoord.dashboard.acts import PageActor
from ftcoord.dashboard.app import make_app
from ftcoord.dashboard.board import Board, LeaseBook
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Get
from ftcoord.operator.status import Rules

RUN = run_prefix("/f", "a/b")


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


def test_a_lost_etcd_is_told_though_it_was_just_being_asked_for_leases(site: Site) -> None:
    asked, over = threading.Event(), threading.Event()

    class Stuck(Clerk):
        def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
            asked.set()
            over.wait(DEADLINE)
            return super().time_left(lease_id)

    site.app = make_app(site.board, LeaseBook(Stuck()), {}, numbers)
    said = []

    def is_lost(answer: Answer) -> bool:
        if asked.is_set():
            site.client.cut_off()
        said.extend(one for one in answer.events("page") if not one["connected"])
        if said:
            over.set()
        return bool(said)

    site.get("/api/job", job="a/b", until=is_lost)
    assert said[0]["page"]["job"] == "a/b"


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


def test_prometheus_is_told_of_all_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = site.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"ftcoord_runs 7.0" in answer.body
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = site.get("/metrics")
    assert answer.status == 501
    assert b"pip install prometheus_client" in answer.body


def test_scrapes_that_wait_share_one_read(site: Site) -> None:
    began, may_end, reads = threading.Event(), threading.Event(), []

    def collect() -> list[GaugeMetricFamily]:
        reads.append(len(reads))
        began.set()
        assert may_end.wait(DEADLINE)
        return [GaugeMetricFamily("ftcoord_runs", "Runs.", value=len(reads))]

    app = make_app(site.board, LeaseBook(Clerk()), {}, collect)
    bodies: list[bytes] = []

    async def scrape() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/metrics",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
        }
        await app(scope, receive, send)

    async def scrapes() -> None:
        first = asyncio.create_task(scrape())
        await asyncio.to_thread(began.wait, DEADLINE)
        others = [asyncio.create_task(scrape()) for _ in range(20)]
        await asyncio.sleep(0)  # each of them has begun to wait
        may_end.set()
        await asyncio.gather(first, *others)

    asyncio.run(scrapes())
    assert len(reads) == 2
    assert sum(b"ftcoord_runs 2.0" in body for body in bodies) == 20


def test_a_page_without_a_token_does_nothing(site: Site) -> None:
    assert site.order().status == 403
    assert site.order("Bearer ").status == 403
    assert site.members() == 1


@pytest.mark.parametrize("authorization", ["", "Bearer ", "Bearer 0123456789abcdeg", TOKEN, f"Basic {TOKEN}"])
def test_nothing_is_done_for_whoever_has_not_the_token(site: Site, authorization: str) -> None:
    site.may_act()
    assert site.order(authorization).status == 401
    assert site.members() == 1


def test_what_another_site_can_have_a_browser_send_does_nothing(site: Site) -> None:
    """A form, or a request without a preflight: with cookies, and without the header."""
    site.may_act()
    body = json.dumps({"what": "evict", "job": "a/b", "name": "n", "who": "ann"}).encode()
    headers = {"cookie": f"token={TOKEN}", "content-type": "text/plain", "origin": "http://evil.example"}
    assert site.get("/api/act", method="POST", body=body, headers=headers, token=TOKEN).status == 401
    assert site.get("/api/act", token=TOKEN).status == 405
    assert site.members() == 1


def test_a_member_is_evicted_and_all_can_read_by_whom(site: Site) -> None:
    site.may_act()
    member = site.client.range(Get(members_span(run_prefix("/f", "a/b")))).kvs[0].key.rpartition("/")[2]
    answer = site.order(reason="it smells")
    assert answer.status == 200
    assert json.loads(answer.body)["did"][0].startswith("evicted n on host of n")
    assert site.members() == 0
    death = site.client.get(death_key(run_prefix("/f", "a/b"), member)).one
    assert death is not None
    cause = json.loads(death.value)["cause"]
    assert cause == "host of n was evicted by ann through the page of me@here, from 192.0.2.7: it smells"
    assert site.order().status == 409


def test_an_evict_that_is_half_done_is_not_called_undone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.may_act()

    def fail(self: MemoryClient, lease_id: int, *, timeout: float | None = None) -> None:
        raise EtcdUnavailable("no member answered")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryClient, "revoke", fail)
        answer = site.order()
    assert answer.status == 504
    assert "n on host of n" in (why := json.loads(answer.body)["error"])
    assert "evict it again" in why
    assert site.members() == 1
    assert site.order().status == 200
    assert site.members() == 0


def write_round(client: MemoryClient, *names: str) -> None:
    """Of one node for each name, of which one is enough."""
    seats = list[Seat]()
    for name in names:
        lease = client.grant(600).id
        ask = JoinRequest(name, "10.0.0.1", 5, 0, f"host of {name}", name, 1, 3, seated=1)
        client.put(member_key(RUN, member_id(lease)), rendezvous_records.encode(ask), lease)
        seats.append(Seat(member_id(lease), name, f"host of {name}"))
    record = Round(1, tuple(seats), "10.0.0.1", 5, (), 1, 3, ready=True)
    client.put(decided_key(RUN), rendezvous_records.encode(record))


def round_of(client: MemoryClient) -> AnyRound:
    kv = client.get(decided_key(RUN)).one
    assert kv is not None
    return parse_decided(kv.key, kv.value)


def test_a_node_is_drained_and_all_can_read_by_whom(site: Site) -> None:
    site.may_act()
    write_round(site.client, "x", "y")
    answer = site.order(what="drain", name="x", reason="its fan is loud")
    assert (answer.status, json.loads(answer.body)["did"][0].partition(":")[0]) == (200, "drained x on host of x")
    found = round_of(site.client)
    assert found.drained == ("x",)
    assert found.recalled == (
        "host of x was drained by ann through the page of me@here, from 192.0.2.7: its fan is loud"
    )
    assert json.loads(site.order(what="drain", name="x").body)["did"] == []


def test_too_few_nodes_stay_only_where_that_is_forced(site: Site) -> None:
    site.may_act()
    write_round(site.client, "x")
    refused = site.order(what="drain", name="x")
    assert (refused.status, "0 of at least 1 node would be left" in json.loads(refused.body)["error"]) == (409, True)
    assert round_of(site.client).drained == ()
    assert site.order(what="drain", name="x", force=True).status == 200
    assert round_of(site.client).drained == ("x",)


def test_who_is_to_leave_and_which_timers_run_is_streamed(site: Site) -> None:
    site.may_act()
    write_round(site.client, "x", "y")
    site.order(what="drain", name="x")
    kv = timers_kv(RUN)
    site.client.put(kv.key, kv.value)
    (page, *_) = site.get("/api/job", job="a/b", until=lambda told: bool(told.events("page"))).events("page")
    standings = {row["node"]: row["standing"] for row in page["page"]["rounds"]["members"]["rows"]}
    assert standings["x"] == "draining"
    (row,) = page["page"]["timers"]["rows"]
    assert (row["host"], row["scope"], row["until"], row["standing"]) == ("node7", "step", 1004.0, "running")


def test_a_run_is_closed(site: Site) -> None:
    site.may_act()
    assert site.order(what="close").status == 200
    record = site.client.get(decided_key(run_prefix("/f", "a/b"))).one
    assert record is not None
    assert "closed by ann through the page of me@here" in json.loads(record.value)["closed"]
    assert json.loads(site.order(what="close").body)["left"][0].startswith("it was over already")


def test_a_gateways_page_is_about_its_job_alone(site: Site) -> None:
    actor = PageActor(site.client, "/f", "me@here", DEADLINE)
    site.app = make_app(site.board, LeaseBook(Clerk()), {}, None, actor=actor, token=TOKEN, only="a/b")
    for query in ({}, {"job": "other"}):
        answer = site.get("/", **query)
        assert (answer.status, answer.headers["location"]) == (307, "./?job=a%2Fb")
    assert site.get("/", job="a/b").status == 200
    assert site.get("/api/jobs").status == 403
    assert site.get("/api/job", job="other").status == 403
    assert site.get("/api/job", job="a/b", until=lambda told: bool(told.events("page"))).status == 200
    assert site.order(job="other").status == 403
    assert site.get("/metrics").status == 404


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"what": "gc"}, 400),
        ({"force": True}, 400),
        ({"what": "drain", "force": 1}, 400),
        ({"what": "drain", "name": "nobody"}, 409),
        ({"job": ""}, 400),
        ({"job": 5}, 400),
        ({"name": ""}, 400),
        ({"who": ""}, 400),
        ({"who": None}, 400),
        ({"reason": "x" * 1001}, 400),
        ({"reason": "x" * 20_000}, 413),
        ({"job": "nobody's"}, 409),
        ({"name": "nobody"}, 409),
        ({"what": "kill", "name": "nobody"}, 409),
    ],
)
def test_bad_orders_are_refused(site: Site, order: dict[str, object], status: int) -> None:
    site.may_act()
    answer = site.order(**order)
    assert answer.status == status
    assert json.loads(answer.body)["error"]
    assert site.members() == 1


def test_an_order_that_is_not_json_is_refused(site: Site) -> None:
    site.may_act()
    headers = {"authorization": f"Bearer {TOKEN}"}
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 16_000):
        assert site.get("/api/act", method="POST", body=body, headers=headers).status == 400


def test_a_lost_etcd_does_nothing_and_says_so(site: Site) -> None:
    site.may_act()
    site.client.cut_off()
    assert site.order().status == 503


def test_what_happened_is_told_newest_first_and_by_whom(site: Site) -> None:
    site.may_act()
    site.order(what="close", reason="the disk is full")
    (told,) = site.get("/api/job", job="a/b", until=lambda told: bool(told.events("past"))).events("past")
    assert (told["events"][0]["kind"], told["events"][0]["by"]) == ("closed", "ann")
    assert "the disk is full" in told["why"]


def test_events_are_sent_again_only_when_there_are_more(site: Site) -> None:
    """Why a job is as it is changes with its members."""
    write_event(site.client, "first")
    (member,) = site.client.range(Get(members_span(RUN))).kvs
    orders = iter([lambda: site.client.revoke(member.lease), lambda: write_event(site.client, "second")])

    def enough(told: Answer) -> bool:
        if len(told.events("past")) > len(sent):
            sent.append(told.events("past")[-1])
            next(orders, lambda: None)()
        return len(sent) == 3

    sent: list[Any] = []
    site.get("/api/job", job="a/b", until=enough)
    assert [[one["reason"] for one in past.get("events", ())] for past in sent] == [["first"], [], ["second", "first"]]
    assert sent[0]["why"] != sent[1]["why"]


def write_event(client: MemoryClient, reason: str) -> None:
    value = history.encode(HistoryEvent("recalled", 1, reason=reason))
    client.put(event_key(RUN, client.get("x").revision, "w", 0), value)
