"""The keys of the protocol: described in docs/protocol.md, and told apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ftcoord
from ftcoord.core import layout
from ftcoord.core.layout import Span

ROOT = Path(ftcoord.__file__).parents[1]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")

RUN = "<prefix>"
NAME = "7-00112233445566aa"
STORE = layout.round_store_prefix(RUN, NAME)
LEASE = 0xAB
HEX = f"{LEASE:016x}"

KEYS = {
    "members_span": f"{RUN}/members/",
    "member_key": layout.member_key(RUN, layout.member_id(LEASE)),
    "decider_key": layout.decider_key(RUN),
    "decided_key": layout.decided_key(RUN),
    "record_span": layout.record_span(RUN).start,
    "fence_key": layout.fence_key(RUN, NAME),
    "all_seats_span": layout.all_seats_span(RUN).start,
    "seats_span": layout.seats_span(RUN, NAME).start,
    "chunk_key": layout.chunk_key(RUN, NAME, 0),
    "round_store_prefix": STORE,
    "backend_state_key": layout.backend_state_key(RUN),
    "backend_store_prefix": layout.backend_store_prefix(RUN),
    "store_values_span": layout.store_values_span(STORE).start + "key",
    "store_queues_span": layout.store_queues_span(STORE).start,
    "store_queue_span": layout.store_queue_span(STORE, "key").start + "id",
    "store_counts_span": layout.store_counts_span(STORE).start + "id",
    "kills_span": layout.kills_span(RUN).start,
    "kill_key": layout.kill_key(RUN, HEX),
    "deaths_span": layout.deaths_span(RUN).start,
    "death_key": layout.death_key(RUN, HEX),
    "events_span": layout.events_span(RUN).start,
    "event_key": layout.event_key(RUN, 7, HEX, 0),
    "timers_span": layout.timers_span(RUN, "host").start,
    "timers_key": layout.timers_key(RUN, "host", LEASE),
    "expired_key": layout.expired_key(RUN, "host", LEASE),
    "heartbeats_span": layout.heartbeats_span(RUN).start,
    "heartbeat_key": layout.heartbeat_key(RUN, "name", LEASE),
}
"""By function: a key that it names, or the beginning of those that it names."""


def documented() -> list[str]:
    """The key column of all tables in docs/protocol.md."""
    rows, inside = [], False
    for line in PROTOCOL.splitlines():
        if line.startswith("| key |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            rows += re.findall(r"`([^`]+)`", line.split("|")[1])
    return rows


def pattern_of(row: str) -> str:
    """What matches the keys of a row; `<...>` stands for one part, as in `<call>-<rank>`, and `...` for the rest."""
    text = row.removeprefix(f"{RUN}/")
    parts = re.split(r"(<[^>]*>|\.\.\.)", text)
    names = {"...": ".*"}
    pattern = "".join(names.get(one, "[^/]+") if one[:1] in "<." and one else re.escape(one) for one in parts)
    return f"{re.escape(RUN)}/{pattern}"


@pytest.mark.parametrize("row", documented())
def test_each_documented_key_has_a_function(row: str) -> None:
    assert [key for key in KEYS.values() if re.fullmatch(pattern_of(row), key)]


@pytest.mark.parametrize("name", KEYS)
def test_each_function_is_documented(name: str) -> None:
    """A Span or a prefix is when keys below it are."""
    patterns = [pattern_of(row) for row in documented()]
    below = [key for key in KEYS.values() if key.startswith(KEYS[name])]
    assert any(re.fullmatch(pattern, key) for pattern in patterns for key in below)


# -- what the functions promise ------------------------------------------------------------------------------------


def test_a_key_says_whose_it_is() -> None:
    key = layout.member_key("/p", layout.member_id(LEASE))
    assert key == f"/p/members/{HEX}"
    assert key in layout.members_span("/p")
    assert layout.member_of(key) == layout.member_id(LEASE) == HEX


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Span(layout.round_store_prefix("/p", "1-a"), True), layout.round_store_prefix("/p", "1-ab")),
        (layout.timers_span("/p", "a"), layout.timers_key("/p", "ab", LEASE)),
        (layout.store_queue_span("s/", "a"), layout.store_queue_span("s/", "a/b").start),
        (Span(layout.run_prefix("/f", "a"), True), layout.run_prefix("/f", "b/a")),
    ],
)
def test_keys_of_one_are_no_keys_of_another(one: Span, other: str) -> None:
    assert other not in one


def test_only_a_records_own_keys_are_in_its_span() -> None:
    """Or each replica would receive the others."""
    own = {layout.decided_key(RUN), layout.decider_key(RUN)}
    assert {key for key in KEYS.values() if key in layout.record_span(RUN)} == own


def test_a_heartbeat_of_a_name_with_a_slash_is_one_name() -> None:
    assert layout.heartbeat_key("/p", "a/b", LEASE) == f"/p/heartbeats/a%2Fb/{HEX}"


@pytest.mark.parametrize("job", ["job1", "a/b", "%", "@store", "\u00e4\x1b", "a b"])
def test_a_key_names_its_run(job: str) -> None:
    key = layout.decided_key(layout.run_prefix("/f", job))
    assert layout.run_id_of("/f", key) == job
    assert layout.branch_of("/f", key) == layout.run_span(layout.run_prefix("/f", job))
    assert key in layout.runs_span("/f")


@pytest.mark.parametrize(
    "key", ["/f/@store/data/x", "/f/stray", "/f//x", "/f/%ff/x", "/f/a b/x", "/f/%2f/x", "/f/\udcff/x"]
)
def test_a_key_of_no_run_names_none(key: str) -> None:
    assert layout.run_id_of("/f", key) is None
    assert key in layout.branch_of("/f", key)
