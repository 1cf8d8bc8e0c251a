"""What the page shows, and whom it answers, without a server."""

from __future__ import annotations

import configparser
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ftcoord.dashboard.guarding import is_token
from ftcoord.dashboard.pages import ROWS_OF_PAGE, Wanted, members_on, page_of
from ftcoord.metrics.http import is_allowed_host
from ftcoord.operator.told import (
    FORMAT,
    JobLine,
    JobList,
    JobStatus,
    MissingNode,
    NextDecision,
    NodeStatus,
    RoundsStatus,
    Unreadable,
    plain,
)

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "ftcoord" / "dashboard" / "static"


def node(at: int) -> NodeStatus:
    return NodeStatus(at, f"node{at}", f"Host{at:05}", f"{at:016x}", "running" if at % 2 else "away", "", 5)


def job(members: int, missing: int = 0) -> JobStatus:
    gone = tuple(MissingNode(at, f"gone{at}", "h", "m", "") for at in range(missing))
    rounds = RoundsStatus(
        "running",
        True,
        3,
        members,
        True,
        1,
        9,
        "a",
        1,
        "",
        "",
        "",
        "",
        NextDecision("wait", "why", "R1"),
        tuple(map(node, range(members))),
        gone,
    )
    return JobStatus(FORMAT, "job", 9, True, True, rounds, None, (Unreadable("/k", "odd"),))


def test_a_page_has_so_many_rows_and_the_counts_of_all() -> None:
    rounds = page_of(job(10_000, 200), Wanted())["rounds"]
    assert (len(rounds["members"]["rows"]), rounds["members"]["total"]) == (ROWS_OF_PAGE, 10_000)
    assert (len(rounds["missing"]["rows"]), rounds["missing"]["total"]) == (ROWS_OF_PAGE, 200)
    assert rounds["standings"] == {"running": 5000, "away": 5000}


def test_a_search_looks_at_all_texts_in_any_case_and_pages_go_on_from_there() -> None:
    found = page_of(job(10_000), Wanted("HOST0999"))["rounds"]["members"]
    assert (found["found"], found["rows"][0].host) == (10, "Host09990")
    last = page_of(job(120), Wanted("", 100))["rounds"]["members"]
    assert [row.rank for row in last["rows"]] == list(range(100, 120))
    beyond = page_of(job(20), Wanted("", 100))["rounds"]["members"]
    assert (beyond["offset"], len(beyond["rows"])) == (0, 20)


def test_a_page_is_json_and_names_the_members_whose_leases_are_asked() -> None:
    page = page_of(job(60), Wanted())
    assert members_on(page) == [f"{at:016x}" for at in range(ROWS_OF_PAGE)]
    read = json.loads(json.dumps(page, default=plain))
    assert read["unreadable"]["rows"] == [{"key": "/k", "problem": "odd"}]
    assert read["rounds"]["next"]["reason"] == "why"


def test_a_list_is_paged_too() -> None:
    line = JobLine("", "running", 1, 2, None, None, 2, "")
    told = JobList(FORMAT, "/f", tuple(replace(line, job=f"job {at}") for at in range(70)))
    page = page_of(told, Wanted("job 6"))
    assert (page["jobs"]["found"], page["jobs"]["total"], page["states"]) == (11, 70, {"running": 70})


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("127.0.0.1:29511", True),
        ("127.0.0.1", True),
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("[::1]:29511", True),
        ("[::1]", True),
        ("10.1.2.3:80", True),
        ("page.corp:80", True),
        ("evil.example:29511", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
        (":80", False),
    ],
)
def test_only_addresses_and_known_names_are_answered(header: str, allowed: bool) -> None:
    assert is_allowed_host(header, {"page.corp"}) is allowed


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer x", "secret", "bearer secret", "Basic secret", "Bearer é"])
def test_nothing_but_the_token_is_the_token(header: str) -> None:
    assert not is_token(header, "secret")
    assert not is_token(header, "")
    assert is_token("Bearer secret", "secret")


def test_the_files_of_the_page_are_in_the_wheel() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["ftcoord"].split()
    packed = {path for pattern in patterns for path in (ROOT / "ftcoord").glob(pattern)}
    served = {path for path in STATIC.rglob("*") if path.is_file()}
    assert {path.name for path in served} == {"index.html", "page.css", "page.js", "icon.svg"}
    assert served <= packed


def test_the_page_parses_nothing_from_etcd_as_html() -> None:
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    assert "textContent" in script
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "setHTML"):
        assert way not in script
