"""The page of a gateway, with torchft's own paths, called as a server calls it, with an etcd in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from helpers import DEADLINE
from page_calls import TOKEN, Answer, Clerk, Site

from ftcoord.coordination.kills import watch_kills
from ftcoord.core import death_records, quorum_head, quorum_records
from ftcoord.core.death_records import Death
from ftcoord.core.layout import (
    death_key,
    decided_key,
    member_id,
    member_key,
    member_of,
    members_span,
    quorum_prefix,
    roster_key,
    run_prefix,
    run_span,
)
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, QuorumSeat, ReplicaRecord
from ftcoord.dashboard.acts import PageActor
from ftcoord.dashboard.app import make_app
from ftcoord.dashboard.board import Board, LeaseBook
from ftcoord.dashboard.torchft_paths import TorchftPaths
from ftcoord.etcd.api import Get, KeyValue, Put
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import FORMAT, Done
from ftcoord.testing import MemoryClient, MemoryEtcd

RUN = run_prefix("/f", "a/b")
HOSTILE = "<script>x</script>"


class GatewaySite(Site):
    """A gateway's page about the job `a/b`, and the managers that obey each order to end."""

    def __init__(self, client: MemoryClient, board: Board) -> None:
        super().__init__(client, board)
        self.serves(allow_kill=False, token="")
        self.killed: list[str] = []

    def serves(self, *, allow_kill: bool, token: str) -> None:
        actor = PageActor(self.client, "/f", "me@here", DEADLINE)
        leases = LeaseBook(Clerk())
        read = lambda: tell_job(read_job(self.client, "/f", "a/b"), Rules())  # noqa: E731
        acting = actor if token else None
        paths = TorchftPaths("a/b", read, leases, actor if allow_kill else acting, "" if allow_kill else token)
        self.app = make_app(self.board, leases, {}, None, actor=acting, token=token, torchft=paths)

    def kill(self, name: str = "east", **headers: str) -> Answer:
        """The order of torchft's page, with the headers that a browser or a program adds."""
        sent = {one.replace("_", "-"): text for one, text in headers.items()}
        return self.get(f"/replica/{name}/kill", method="POST", headers=sent)

    def obey(self, order: KeyValue) -> None:
        for member in self.client.get(member_key(quorum_prefix("/f", "a/b"), member_of(order.key))).kvs:
            self.killed.append(order.value.decode())
            self.client.revoke(member.lease)


def write_quorum(client: MemoryClient, steps: Mapping[str, int]) -> None:
    prefix, seats = quorum_prefix("/f", "a/b"), list[QuorumSeat]()
    for name, step in steps.items():
        lease = client.grant(600).id
        request = QuorumRequest(name, f"http://{name}:1", f"{name}:2", step, 8, False, "", 0, ())
        record = quorum_records.encode(ReplicaRecord(request, 0, 1, 0))
        client.put(member_key(prefix, member_id(lease)), record, lease)
        seats.append(QuorumSeat(member_id(lease), 1, request))
    head, roster = quorum_head.encode_quorum(QuorumRecord(5, 7, tuple(seats), (), 1.7e9))
    client.txn((), [Put(decided_key(prefix), head), Put(roster_key(decided_key(prefix)), roster)])


@pytest.fixture
def gateway() -> Iterator[GatewaySite]:
    failures: list[BaseException] = []
    with MemoryEtcd() as etcd, etcd.client() as client, Board(client, "/f", Rules()) as board:
        write_quorum(client, {"east": 40, "west/1": 38, HOSTILE: 40})
        site = GatewaySite(client, board)
        with watch_kills(client, quorum_prefix("/f", "a/b"), site.obey, failures.append):
            yield site
    assert failures == []


def test_torchfts_status_says_what_its_lighthouse_says(gateway: GatewaySite) -> None:
    answer = gateway.get("/status")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = answer.body.decode()
    for text in (
        "Current quorum_id: 7 <br>",
        "Next quorum status: ",
        "Previous quorum id: 7 <br>",
        "Num participants: 3 <br>",
        "<b>east</b>",
        "Step: 40 <br>",
        "Step: 38 (heals from ",
        "Manager: http://east:1 <br>",
        "TCPStore: east:2 <br>",
        "World size: 8 <br>",
        "east: its lease has 7 of 10 s left",
        'href="./?job=a%2Fb"',
    ):
        assert text in page
    assert page.count('class="card member recovering"') == 1


def test_names_from_etcd_are_text_in_torchfts_status(gateway: GatewaySite) -> None:
    answer = gateway.get("/status")
    assert b"<script" not in answer.body
    assert b"&lt;script&gt;x&lt;/script&gt;" in answer.body
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_torchfts_status_names_who_is_gone_and_of_what(gateway: GatewaySite) -> None:
    prefix = quorum_prefix("/f", "a/b")
    member = gateway.client.range(Get(members_span(prefix), order="oldest")).kvs[0]
    death = death_records.encode(Death(HOSTILE, 5))
    gateway.client.put(death_key(prefix, member.key.rpartition("/")[2]), death)
    gateway.client.revoke(member.lease)
    assert b"<b>east</b> <br> is gone: &lt;script" in gateway.get("/status").body


def test_torchfts_status_of_a_job_that_has_not_begun(gateway: GatewaySite) -> None:
    gateway.client.delete(run_span(RUN))
    assert b"Current quorum_id: 0 <br>\nNext quorum status: no replica is there" in gateway.get("/status").body


def test_torchfts_status_of_a_lost_etcd(gateway: GatewaySite) -> None:
    gateway.client.cut_off()
    answer = gateway.get("/status")
    assert (answer.status, answer.body.startswith(b"etcd cannot be read: ")) == (503, True)


def test_a_gateways_page_is_about_its_job_alone(gateway: GatewaySite) -> None:
    gateway.serves(allow_kill=False, token=TOKEN)
    for query in ({}, {"job": "other"}):
        answer = gateway.get("/", **query)
        assert (answer.status, answer.headers["location"]) == (307, "./?job=a%2Fb")
    assert gateway.get("/", job="a/b").status == 200
    assert gateway.get("/api/jobs").status == 403
    assert gateway.get("/api/job", job="other").status == 403
    assert gateway.get("/api/job", job="a/b", until=lambda told: bool(told.events("page"))).status == 200
    assert gateway.order(job="other").status == 403
    assert gateway.get("/metrics").status == 404


def test_torchfts_kill_needs_what_lets_the_page_act(gateway: GatewaySite) -> None:
    refused = gateway.kill()
    assert (refused.status, b"--allow-kill" in refused.body) == (403, True)
    gateway.serves(allow_kill=False, token=TOKEN)
    assert gateway.kill().status == 401
    assert gateway.kill(authorization="Bearer 0123456789abcdeg").status == 401
    assert gateway.killed == []
    assert gateway.get("/replica/east/kill").status == 405
    answer = gateway.kill(authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.body.startswith(b"killed the manager of 'east'")) == (200, True)
    assert gateway.killed[0].startswith("killed by whoever called torchft's /replica/<id>/kill through the page of me@")


def test_torchfts_kill_without_a_token_where_that_was_allowed(gateway: GatewaySite) -> None:
    gateway.serves(allow_kill=True, token="")
    assert gateway.kill("west/1").status == 200
    assert len(gateway.killed) == 1
    nobody = gateway.kill("nobody")
    assert (nobody.status, nobody.body.startswith(b"Something went wrong: no live replica")) == (409, True)
    assert gateway.order(what="kill", name="east").status == 403  # the page's own orders need a token all the same


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:2"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "none"},
        {"host": "evil.example:1"},
    ],
)
@pytest.mark.parametrize("token", ["", TOKEN])
def test_no_other_site_has_a_browser_kill(gateway: GatewaySite, headers: dict[str, str], token: str) -> None:
    """A form of any site can have a browser post to an address that only the browser reaches."""
    gateway.serves(allow_kill=True, token=token)
    assert gateway.kill(**headers).status in (403, 421)
    assert gateway.killed == []


def test_this_sites_own_page_and_programs_may(gateway: GatewaySite) -> None:
    gateway.serves(allow_kill=True, token="")
    own = {"origin": "http://127.0.0.1:1", "sec_fetch_site": "same-origin"}
    assert [gateway.kill("east", **own).status, gateway.kill("west/1").status] == [200, 200]


def test_a_kill_that_was_not_taken_is_no_success(gateway: GatewaySite, monkeypatch: pytest.MonkeyPatch) -> None:
    left = "the lease of 'east' ended before it took the order"
    monkeypatch.setattr(PageActor, "act", lambda *_: Done(FORMAT, "a/b", (), (left,)))
    gateway.serves(allow_kill=True, token="")
    answer = gateway.kill()
    assert (answer.status, answer.body.decode()) == (409, f"{left}\n")


def test_a_kill_that_etcd_does_not_take_says_so(gateway: GatewaySite) -> None:
    gateway.serves(allow_kill=True, token="")
    gateway.client.cut_off()
    assert gateway.kill().status == 503
