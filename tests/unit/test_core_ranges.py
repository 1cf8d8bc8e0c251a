"""What nobody of ours has written: numbers out of their range, and texts that UTF-8 cannot carry, in all records."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import builders
import pytest
from held import timers_kv

from ftcoord import errors, heartbeat
from ftcoord.coordination import port, ranks
from ftcoord.coordination.rank_port import encode_call, parse_call
from ftcoord.core import quorum_records, rendezvous_records, strict, timers
from ftcoord.core.quorum_records import encode_quorum, parse_quorum, parse_replica
from ftcoord.core.rendezvous_records import MOST_CHUNKS, Seat, WorkerFailure, parse_decided, parse_join_request

KEY = timers_kv("/run").key
REQUEST = builders.request("a", address="here", store_address="there", step=1, world_size=2, handles=("h",))
QUORUM = encode_quorum(builders.quorum(7))
ASK = builders.ask("n", address="host", nonce="x")

Parse = Callable[[str, bytes], object]
RECORDS: dict[str, tuple[Parse, bytes]] = {
    "replica": (parse_replica, quorum_records.encode(builders.replica(REQUEST, asked=1, after=1, beat=1))),
    "quorum": (lambda key, value: parse_quorum(key, zlib.compress(value)), zlib.decompress(QUORUM)),
    "join": (parse_join_request, rendezvous_records.encode(ASK)),
    "round": (parse_decided, rendezvous_records.encode(builders.round_(1, (Seat("m", "n", "h"),)))),
    "timers": (timers.parse_timers, timers_kv("/run").value),
    "beat": (heartbeat.parse_beat, heartbeat.encode(heartbeat.Beat("a", ""))),
}
COUNT = (0, strict.LARGEST_COUNT)
PORT = (0, 65535)
RANGES = [
    ("replica", "after", *COUNT),
    ("replica", "heard", *COUNT),
    ("replica", "asked", *COUNT),
    ("replica", "request.world_size", 0, strict.LARGEST),
    ("quorum", "number", *COUNT),
    ("quorum", "id", *COUNT),
    ("join", "after", *COUNT),
    ("join", "seated", *COUNT),
    ("join", "reopens", -1, strict.LARGEST_COUNT),
    ("join", "port", *PORT),
    ("round", "number", 1, strict.LARGEST_COUNT),
    ("round", "port", *PORT),
    ("round", "size", 1, strict.LARGEST),
    ("round", "chunks", 1, MOST_CHUNKS),
    ("timers", "timers.0.slot", 0, timers.MOST_TIMERS - 1),
    ("timers", "timers.0.token", 0, strict.LARGEST),
    ("timers", "timers.0.until_ms", 0, 10**15),
    ("timers", "timers.0.wall_ms", 0, 10**15),
    ("timers", "worker.pid", 1, 2**22),
    ("timers", "worker.ledger", 0, 2**31 - 1),
]

FORBIDDEN = r"has no token|has (0 seats in 1|1 seats in 0) chunks"
"""A round that has one of these has all of them: why a 0 is refused that another record may have."""


def with_field(value: bytes, path: str, new: object) -> bytes:
    raw: Any = json.loads(value)
    *steps, name = path.split(".")
    inner = raw
    for step in steps:
        inner = inner[int(step)] if step.isdigit() else inner[step]
    assert name in inner
    inner[name] = new
    return json.dumps(raw).encode()


@pytest.mark.parametrize(("record", "path", "lowest", "highest"), RANGES)
def test_every_number_has_its_range(record: str, path: str, lowest: int, highest: int) -> None:
    (parse, value), name = RECORDS[record], path.rpartition(".")[2]
    for number in (lowest, highest):
        parse(KEY, with_field(value, path, number))
    for number in (lowest - 1, highest + 1, 2**64, -(2**64)):
        with pytest.raises(errors.StateError, match=rf"the {name} .*outside |{FORBIDDEN}") as caught:
            parse(KEY, with_field(value, path, number))
        assert caught.value.key == KEY


TEXTS = ["replica.request.address", "join.host", "timers.timers.0.scope"]


@pytest.mark.parametrize("path", [*TEXTS, "timers.timers.0.scope", "beat.name", "round.before"])
def test_half_a_character_is_no_text(path: str) -> None:
    record, _, field = path.partition(".")
    parse, value = RECORDS[record]
    parse(KEY, with_field(value, field, "\U0001f600 \\ud800"))
    for text in ("\ud800", "x\udfff", "\ude00\ud83d"):
        halved = with_field(value, field, text)
        for one in (halved, halved.replace(b"\\ud", b"\\uD"), json.dumps(json.loads(halved), ensure_ascii=False)):
            with pytest.raises(errors.StateError, match="utf-8"):
                parse(KEY, one if isinstance(one, bytes) else one.encode(errors="surrogatepass"))


@pytest.mark.parametrize(("record", "path"), [("replica", "request.data"), ("beat", "data")])
def test_nor_is_it_data(record: str, path: str) -> None:
    parse, value = RECORDS[record]
    parse(KEY, with_field(value, path, '{"a": "\\ud83d\\ude00"}'))
    with pytest.raises(errors.StateError, match="utf-8"):
        parse(KEY, with_field(value, path, '{"a": "\\ud800"}'))


def test_nor_does_a_rank_send_it_to_a_manager() -> None:
    call = ranks.RankRequest(0, 1, "m", False, 0, 5.0, "handle")
    assert parse_call(encode_call(call)) == call
    with pytest.raises(ValueError, match="utf-8"):
        parse_call(port.Frame("q", encode_call(call).payload.replace(b'"handle":"handle"', b'"handle":"\\ud800"')))


def test_what_a_process_cannot_choose_is_written_so_that_others_can_read_it() -> None:
    """A worker's exception may quote half a character."""
    odd = replace(ASK, failed=(WorkerFailure(1, exception="ValueError: \udc80 \U0001f600"),))
    (failure,) = parse_join_request(KEY, rendezvous_records.encode(odd)).failed
    assert failure.exception == "ValueError: ? \U0001f600"
