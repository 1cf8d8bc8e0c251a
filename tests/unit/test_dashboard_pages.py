"""What one viewer is sent of a report, and whom the page answers, without a server."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
from reports import made, seen

from ftcoord.dashboard.feeds import ROWS, part_of
from ftcoord.metrics.exporter import is_allowed_host
from ftcoord.operator.report import (
    FORMAT,
    JobLine,
    JobList,
    JobStatus,
    MissingNode,
    NextDecision,
    NodeStatus,
    RoundsStatus,
    Unreadable,
)

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "ftcoord" / "dashboard" / "static"


def node(at: int) -> NodeStatus:
    return made(NodeStatus, at, f"node{at}", f"Host{at:05}", f"{at:016x}", "running" if at % 2 else "away", "", 5)


def job(members: int, missing: int = 0) -> JobStatus:
    gone = [made(MissingNode, at, f"gone{at}", "h", "m", "") for at in range(missing)]
    rounds = made(
        RoundsStatus,
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
        made(NextDecision, "wait", "why", "R1"),
        [*map(node, range(members))],
        gone,
    )
    return made(JobStatus, FORMAT, "job", 9, True, True, rounds, None, [made(Unreadable, "/k", "odd")], [])


def test_a_viewer_is_sent_so_many_rows_and_the_counts_of_all() -> None:
    found, counts = part_of(job(10_000, 200))
    status = seen(found)
    assert (len(status.rounds.members), counts["rounds"]["members"]["total"]) == (ROWS, 10_000)
    assert (len(status.rounds.missing), counts["rounds"]["missing"]["total"]) == (ROWS, 200)
    assert counts["rounds"]["members"]["states"] == {"running": 5000, "away": 5000}
    assert [row.rank for row in status.rounds.members] == list(range(ROWS))


def test_a_small_report_is_sent_whole() -> None:
    assert part_of(job(ROWS, ROWS))[0] == job(ROWS, ROWS)


def test_a_search_looks_at_all_texts_in_any_case_and_pages_go_on_from_there() -> None:
    found, counts = part_of(job(10_000), "HOST0999")
    status = seen(found)
    assert (counts["rounds"]["members"]["found"], status.rounds.members[0].host) == (10, "Host09990")
    last = seen(part_of(job(120, 120), "", 100)[0])
    assert [row.rank for row in last.rounds.members] == list(range(100, 120))
    assert [row.rank for row in last.rounds.missing] == list(range(ROWS))
    found, counts = part_of(job(20), "", 100)
    assert (counts["rounds"]["members"]["offset"], len(seen(found).rounds.members)) == (0, 20)


def test_a_list_is_paged_too() -> None:
    lines = [made(JobLine, f"job {at}", "running", 1, 2, None, None, 2, "") for at in range(70)]
    told = made(JobList, FORMAT, "/f", lines)
    _, counts = part_of(told, "job 6")
    assert counts["jobs"] == {"total": 70, "found": 11, "offset": 0, "states": {"running": 70}}


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("127.0.0.1:29511", True),
        ("localhost:1", True),
        ("[::1]:29511", True),
        ("page.corp:80", True),
        ("evil.example:29511", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
    ],
)
def test_only_addresses_and_known_names_are_answered(header: str, allowed: bool) -> None:
    assert is_allowed_host(header, {"page.corp"}) is allowed


def test_the_wheel_has_all_files_of_the_page_and_they_are_all_that_it_loads() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["ftcoord"].split()
    packed = {path for pattern in patterns for path in (ROOT / "ftcoord").glob(pattern)}
    served = {path for path in STATIC.rglob("*") if path.is_file()}
    named = re.findall(r'(?:src|href)="static/([^"]+)"', (STATIC / "index.html").read_text(encoding="utf-8"))
    assert {path.name for path in served} == {"index.html", *named}
    assert served <= packed


def test_the_page_parses_nothing_from_etcd_as_html() -> None:
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    assert "textContent" in script
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "setHTML"):
        assert way not in script
