"""The page's HTTP, called as a server calls it, with an etcd in memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import builders
import pytest
from page_calls import TOKEN, Answer, Site, seven_of_ten
from virtual import MemoryClient, MemoryEtcd

from ftcoord.core import history, rendezvous_records
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import death_key, decided_key, event_key, member_id, member_key, members_span, run_prefix
from ftcoord.core.rendezvous_records import RoundHead, Seat, parse_decided
from ftcoord.dashboard import server as servers
from ftcoord.dashboard.feeds import Board
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Get
from ftcoord.operator.reading import read_job, with_leases
from ftcoord.operator.status import Rules, status_of

RUN = run_prefix("/f", "a/b")


@pytest.fixture
def site() -> Iterator[Site]:
    with MemoryEtcd() as etcd, etcd.client() as client, Board(client, "/f", Rules()) as board:
        lease = client.grant(600).id
        ask = builders.ask("n", port=5, host="host of n", limits=(2, 4))
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
    assert site.board.feeds.keys() == set()


def first_report(told: Answer) -> bool:
    return bool(told.events("report"))


def test_a_job_is_streamed_and_freed_when_its_viewer_goes(site: Site) -> None:
    (found,) = site.get("/api/job", job="a/b", until=first_report).events("report")
    assert found["connected"]
    (row,) = found["report"]["rounds"]["members"]
    assert (row["host"], row["lease_left"], row["lease_ttl"]) == ("host of n", 7, 10)
    assert found["counts"]["rounds"]["members"] == {"total": 1, "found": 1, "offset": 0, "states": {"waiting": 1}}
    assert site.board.feeds.keys() == set()


def test_a_report_is_what_the_command_prints(site: Site) -> None:
    (found,) = site.get("/api/job", job="a/b", until=first_report).events("report")
    told = with_leases(seven_of_ten, status_of(read_job(site.client, "/f", "a/b", with_timers=True), Rules()))
    assert found["report"] == told


def test_a_report_is_sent_again_though_nothing_changes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign that the server is alive, and the leases of now."""
    monkeypatch.setattr(servers, "BEAT", 0.01)
    reports = site.get("/api/job", job="a/b", until=lambda told: len(told.events("report")) > 2).events("report")
    assert len({found["at"] for found in reports}) == len(reports)


def test_the_list_is_streamed(site: Site) -> None:
    (found,) = site.get("/api/jobs", until=first_report).events("report")
    assert [one["job"] for one in found["report"]["jobs"]] == ["a/b"]


@pytest.mark.parametrize("query", [{}, {"job": ""}, {"job": "x", "offset": "-1"}, {"job": "x", "offset": "a"}])
def test_bad_questions_are_refused(site: Site, query: dict[str, str]) -> None:
    answer = site.get("/api/job", **query)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]


def test_one_too_many_is_told_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.dashboard.feeds.MOST_VIEWERS", 0)
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
        ask = builders.ask(name, port=5, host=f"host of {name}", nonce=name, seated=1, limits=(1, 3))
        client.put(member_key(RUN, member_id(lease)), rendezvous_records.encode(ask), lease)
        seats.append(Seat(member_id(lease), name, f"host of {name}"))
    record = builders.round_(1, tuple(seats), port=5, ready=True, limits=(1, 3))
    for key, value in builders.round_keys(RUN, record).items():
        client.put(key, value)


def round_of(client: MemoryClient) -> RoundHead:
    kv = client.get(decided_key(RUN)).one
    assert kv is not None
    return parse_decided(kv.key, kv.value)


def test_too_few_nodes_stay_only_where_that_is_forced(site: Site) -> None:
    site.may_act()
    write_round(site.client, "x")
    refused = site.order(what="drain", name="x")
    assert (refused.status, "0 of at least 1 node would be left" in json.loads(refused.body)["error"]) == (409, True)
    assert round_of(site.client).drained == ()
    assert site.order(what="drain", name="x", force=True).status == 200
    assert round_of(site.client).drained == ("x",)


def test_a_run_is_closed(site: Site) -> None:
    site.may_act()
    assert site.order(what="close").status == 200
    record = site.client.get(decided_key(run_prefix("/f", "a/b"))).one
    assert record is not None
    assert "closed by ann through the page of me@here" in json.loads(record.value)["closed"]
    assert json.loads(site.order(what="close").body)["left"][0].startswith("it was over already")


def test_a_gateways_page_is_about_its_job_alone(site: Site) -> None:
    site.makes(token=TOKEN, gateway_job="a/b")
    for query in ({}, {"job": "other"}):
        answer = site.get("/", **query)
        assert (answer.status, answer.headers["location"]) == (307, "./?job=a%2Fb")
    assert site.get("/", job="a/b").status == 200
    assert site.get("/api/jobs").status == 403
    assert site.get("/api/job", job="other").status == 403
    assert site.get("/api/job", job="a/b", until=first_report).status == 200
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


def test_the_newest_events_are_sent_and_only_when_there_are_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a job is as it is changes with its members."""
    monkeypatch.setattr(servers, "NEWEST_EVENTS", 2)
    for reason in ("first", "second"):
        write_event(site.client, reason)
    (member,) = site.client.range(Get(members_span(RUN))).kvs
    orders = iter([lambda: site.client.revoke(member.lease), lambda: write_event(site.client, "third")])
    whys: list[str] = []

    def enough(told: Answer) -> bool:
        if (reports := told.events("report")) and reports[-1]["why"] not in whys:
            whys.append(reports[-1]["why"])
            next(orders, lambda: None)()
        return len(whys) >= 2 and len(told.events("history")) > 1 and len(reports) > len(whys)

    past = site.get("/api/job", job="a/b", until=enough).events("history")
    assert [[one["reason"] for one in found["history"]["events"]] for found in past] == [
        ["first", "second"],
        ["second", "third"],
    ]
    assert [found["total"] for found in past] == [2, 3]


def write_event(client: MemoryClient, reason: str) -> None:
    value = history.encode(HistoryEvent("recalled", 1, reason=reason))
    client.put(event_key(RUN, client.get("x").revision, "w", 0), value)
