"""The page in a real browser, against a real etcd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import CHROMIUM, Browser
from helpers import eventually
from pages import PrefixProxy, page, write_history, write_quorum, write_run, write_timer

from ftcoord.core import death_records
from ftcoord.core.death_records import Death
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import KEY_PREFIX, death_key, member_id, member_of, members_span, run_prefix
from ftcoord.core.rendezvous_records import WorkerFailure
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import EtcdClient

pytestmark = pytest.mark.browser

TOKEN = "a-token-of-this-test"
EVIL = "<img src=x onerror=\"console.log('owned')\"><script>console.log('owned')</script>"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert CHROMIUM, "no chromium: apt-get install chromium, or name one in FTCOORD_TEST_CHROMIUM"
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def address(etcd: EtcdServer) -> Iterator[str]:
    with page(etcd.get_endpoint()) as address:
        yield address


def test_a_live_change_appears(browser: Browser, address: str, client: EtcdClient) -> None:
    browser.open(address)
    browser.shows("live", "#link")
    leases = write_run(client, "page live", ["host0", "host1", "host2"])
    browser.shows("page live", "table")
    browser.open(f"{address}/?job=page%20live")
    browser.shows("healthy", "#health")
    browser.shows("of 600 s", "table")
    client.revoke(leases[2])
    browser.shows("needs a look", "#health")
    browser.shows("missing (1)")
    browser.shows("host2", "table")


def test_replicas_and_who_heals_from_whom(browser: Browser, address: str, client: EtcdClient) -> None:
    write_quorum(client, "page quorum", {"east": 40, "west": 38})
    browser.open(f"{address}/?job=page%20quorum")
    browser.shows("east (2 behind)", "table")


def test_names_from_etcd_are_text(browser: Browser, address: str, client: EtcdClient) -> None:
    job = f"page {EVIL}"
    write_run(client, job, [EVIL, "host1"])
    write_quorum(client, job, {EVIL: 1, "other": 2})
    for path in ("", f"?job={quote(job)}", f"?job={quote(EVIL)}"):
        browser.open(f"{address}/{path}")
        browser.shows("<img src=x")
    worker = WorkerFailure(5, 1, 1, 3, fate=EVIL, exception=EVIL, traceback=EVIL, timer=EVIL)
    failed = HistoryEvent("failed", 1, EVIL, EVIL, EVIL, (worker,), by=EVIL, wall_ms=5)
    write_history(client, job, [failed, HistoryEvent("recalled", 1, reason=EVIL)])
    lease = int(member_of(client.range(Get(members_span(run_prefix(KEY_PREFIX, job)))).kvs[0].key), 16)
    death = death_key(run_prefix(KEY_PREFIX, job), member_id(lease))
    client.put(death, death_records.encode(Death(EVIL, 5)))
    client.revoke(lease)
    browser.open(f"{address}/?job={quote(job)}")
    browser.shows("missing (1)")
    browser.shows("<img src=x", "table")
    browser.shows("<img src=x", "pre.traceback")
    browser.shows("<img src=x", "#why")
    assert browser.run("document.images.length + document.querySelectorAll('script').length") == 1  # the page's own
    assert browser.said == []


def test_behind_a_proxy_with_a_path_all_links_stay_below_it(
    browser: Browser, etcd: EtcdServer, client: EtcdClient
) -> None:
    write_run(client, "page below", ["host0"])
    with (
        page(etcd.get_endpoint(), env={**os.environ, "FTCOORD_DASHBOARD_TOKEN": TOKEN}) as upstream,
        PrefixProxy(upstream, "/ops/ft") as address,
    ):
        browser.open(f"{address}/ops/ft")
        browser.shows("page below", "table")
        browser.run("[...document.querySelectorAll('table a')].find((one) => one.text === 'page below').click()")
        browser.shows("healthy", "#health")
        browser.shows(KEY_PREFIX, "#where")
        browser.run("document.querySelector('button.order').click()")
        browser.run("document.querySelector('dialog button.danger').click()")
        browser.shows("this is not the page's token", "dialog")
        browser.run("document.querySelector('.title a').click()")
        browser.shows("Jobs", "h1")
    assert [said for said in browser.said if "401" not in said] == []


def test_characters_that_nobody_sees_are_shown_by_number(
    browser: Browser, etcd: EtcdServer, client: EtcdClient
) -> None:
    odd = "east\u202e1\x1b[2J\u200b"
    shown = r"east\u{202e}1\u{1b}[2J\u{200b}"
    write_quorum(client, "page odd", {odd: 1})
    with page(etcd.get_endpoint(), env={**os.environ, "FTCOORD_DASHBOARD_TOKEN": TOKEN}) as address:
        browser.open(f"{address}/?job=page%20odd")
        browser.shows(shown, "table")
        browser.run("[...document.querySelectorAll('button.order')].find((one) => one.textContent === 'kill').click()")
        browser.shows(f"Kill {shown}?", "dialog")


def test_a_job_of_which_only_the_history_is_left_shows_it(browser: Browser, address: str, client: EtcdClient) -> None:
    worker = WorkerFailure(5, 1, 1, 3, fate="exited with code 3", exception="E: x", traceback="line 7, in train")
    failed = HistoryEvent("failed", 1, "host1", "node1", worker.line, (worker,), wall_ms=1_700_000_000_000)
    over = HistoryEvent("closed", 1, reason="failed: node1 used up its restarts", wall_ms=1_700_000_000_000)
    write_history(client, "page past", [failed, over])
    browser.open(f"{address}/?job=page%20past")
    browser.shows("no key of this job but its history")
    browser.shows("used up its restarts", "table")
    browser.shows("line 7, in train", "pre.traceback")
    browser.shows("raised E: x (exit code 3)", "table")


def test_tabs_that_nobody_sees_leave_connections_for_the_one_that_somebody_does(
    browser: Browser, address: str, client: EtcdClient
) -> None:
    """A browser has six for one server."""
    write_run(client, "page tabs", ["host0"])
    tabs = [browser.tab() for _ in range(7)]
    for tab in (*tabs, tabs[0]):
        tab.front()
        if tab.run("location.pathname") == "blank":
            tab.open(f"{address}/?job=page%20tabs")
        tab.shows("healthy", "#health")
    eventually(lambda: tabs[1].run("document.body.dataset.link") == "opening", "it is not live")
    assert "healthy" not in tabs[1].text("main")


def test_an_etcd_that_is_lost_is_said_until_it_is_back(browser: Browser, fragile: EtcdServer) -> None:
    with EtcdClient(fragile.get_endpoint()) as client, page(fragile.get_endpoint()) as address:
        write_run(client, "lost", ["host0"])
        browser.open(f"{address}/?job=lost")
        browser.shows("healthy", "#health")
        fragile.pause()
        browser.shows("ETCD IS LOST", "#lost")
        assert "healthy" not in browser.text("main")
        assert browser.text("#link") == "lost"
        fragile.resume()
        browser.shows("live", "#link")
        browser.shows("healthy", "#health")
        assert browser.run("document.getElementById('lost').hidden")


def test_whoever_has_the_token_evicts_a_member(browser: Browser, etcd: EtcdServer, client: EtcdClient) -> None:
    write_run(client, "page acts", ["host0", "host1"])
    # A run that keeps no history gets none by being closed.
    write_history(client, "page acts", [HistoryEvent("round", 1, "host0", "node0", "round 1 of 2 nodes")])
    with page(etcd.get_endpoint(), env={**os.environ, "FTCOORD_DASHBOARD_TOKEN": TOKEN}) as address:
        browser.open(f"{address}/?job=page%20acts")
        browser.shows("evict", "tbody tr:nth-child(2)")
        browser.click("tbody tr:nth-child(2) button")
        browser.shows("Evict host1?", "#order")
        browser.fill("#order label:nth-of-type(1) input", "ann")
        browser.fill("#order label:nth-of-type(2) input", "wrong")
        browser.click("#order .danger")
        browser.shows("this is not the page's token", "#order")
        browser.fill("#order label:nth-of-type(2) input", TOKEN)
        browser.click("#order .danger")
        browser.shows("evicted node1 on host1", "#order")
        browser.shows("evicted by ann through the page", "table")
        browser.click("#order .tools button")
        browser.click(".tools button.order")
        browser.fill("#order label:nth-of-type(3) input", "the disk is full")
        browser.click("#order .danger")
        browser.shows("the disk is full", "#why")


def test_whoever_has_the_token_drains_a_node(browser: Browser, etcd: EtcdServer, client: EtcdClient) -> None:
    write_run(client, "page drains", ["host0", "host1"])
    with page(etcd.get_endpoint(), env={**os.environ, "FTCOORD_DASHBOARD_TOKEN": TOKEN}) as address:
        browser.open(f"{address}/?job=page%20drains")
        browser.shows("drain", "tbody tr:nth-child(2)")
        assert browser.run("document.querySelectorAll('.word.going').length") == 0
        browser.click("tbody tr:nth-child(2) td:last-child button")
        browser.shows("Drain host1?", "#order")
        browser.fill("#order label:nth-of-type(1) input", "ann")
        browser.fill("#order label:nth-of-type(2) input", TOKEN)
        browser.fill("#order label:nth-of-type(3) input", "its disk is worn out")
        browser.click("#order .danger")
        browser.shows("drained node1 on host1", "#order")
        browser.shows("draining", "td .word.going")
        browser.click("#order .tools button")
        eventually(lambda: "drain" not in browser.text("tbody tr:nth-child(2) td:last-child"), "it is drained once")
        browser.click("tbody tr:nth-child(1) td:last-child button")
        browser.click("#order .danger")
        browser.shows("0 of at least 1 node would be left", "#order")
        browser.click("#order label:nth-of-type(4) input")
        browser.click("#order .danger")
        browser.shows("drained node0 on host0", "#order")


def test_timers_are_shown_until_they_are_released(browser: Browser, address: str, client: EtcdClient) -> None:
    write_run(client, "page timers", ["host0"])
    key = write_timer(client, "page timers", EVIL)
    browser.open(f"{address}/?job=page%20timers")
    browser.shows("<img src=x", "#timers table")
    browser.shows("of 60 s", "#timers table")
    client.delete(Span(key))
    eventually(lambda: browser.run("document.getElementById('timers')") is None, "it is gone")
    assert browser.said == []


def test_a_page_whose_server_is_gone_says_so(browser: Browser, etcd: EtcdServer, client: EtcdClient) -> None:
    write_run(client, "gone", ["host0"])
    with page(etcd.get_endpoint()) as address:
        browser.open(f"{address}/?job=gone")
        browser.shows("healthy", "#health")
    browser.shows("The page's own server does not answer", "#lost")
    assert "healthy" not in browser.text("main")


def test_a_phone_in_the_dark_shows_all_without_scrolling_sideways(
    browser: Browser, address: str, client: EtcdClient
) -> None:
    write_run(client, "page phone", [f"a-host-with-a-long-name-{at}.example.com" for at in range(3)])
    worker = WorkerFailure(5, 1, 1, 3, exception="E: x", traceback="File " + "x" * 300)
    write_history(client, "page phone", [HistoryEvent("failed", 1, "host", "n", worker.line, (worker,))])
    grounds = []
    for width, scheme in ((1280, "light"), (360, "dark")):
        browser.look(width, 740, scheme)
        browser.open(f"{address}/?job=page%20phone")
        browser.shows("healthy", "#health")
        browser.shows("File xxx", "pre.traceback")
        assert browser.run("document.documentElement.scrollWidth") <= width
        grounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 249)", "rgb(17, 21, 27)"]
    assert browser.run("getComputedStyle(document.querySelector('thead')).display") == "none"


def test_a_thousand_members_are_usable(browser: Browser, address: str, client: EtcdClient) -> None:
    write_run(client, "page large", [f"host{at:04}" for at in range(1000)])
    browser.open(f"{address}/?job=page%20large")
    browser.shows("members (1000)")
    assert browser.run("document.querySelectorAll('tbody tr').length") == 50
    browser.click(".card > .tools button:nth-child(2)")
    browser.shows("51 to 100 of 1000")
    browser.fill("#find", "host0777")
    browser.shows("members (1 of 1000)")
    assert "host0777" in browser.text("table")
    eventually(lambda: browser.text("#link") == "live", "the page is live")
