"""torchft's lighthouse protocol, byte for byte as torchft 0.2.0's native classes sent and accepted it."""

from __future__ import annotations

import builders
import pytest

from ftcoord.coordination.native import read, read_quorum_request, write_quorum
from ftcoord.core.quorum_records import QuorumSeat

CLIENT = bytes.fromhex("0a1e0a0261611204616464721a0273742007280330013a087b2261223a20317d")
MANAGER = bytes.fromhex(
    "0a2e0a056d67723a311216687474703a2f2f6c6f63616c686f73743a33353238331a0773746f72653a31200328024004"
)
BEHIND = bytes.fromhex("0a1b0a0261611204616464721a02737420f9ffffffffffffffff012803")

NIGHTLY = b"\x0a\x07\x0a\x01x\x4a\x02h0"


def test_requests_are_read_as_they_were_sent() -> None:
    assert read_quorum_request(CLIENT) == builders.request(
        "aa", address="addr", store_address="st", step=7, world_size=3, shrink_only=True, data='{"a": 1}'
    )
    assert read_quorum_request(MANAGER) == builders.request(
        "mgr:1", address="http://localhost:35283", store_address="store:1", step=3, world_size=2, commit_failures=4
    )
    assert read_quorum_request(BEHIND).step == -7
    assert read_quorum_request(NIGHTLY).handles == ("h0",)
    assert read("LighthouseHeartbeatRequest", b"\x0a\x05mgr:1").replica_id == "mgr:1"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no requester"),
        (b"\xff", "not a LighthouseQuorumRequest"),
        (b"\x0a\x02\x0a\x05", "not a LighthouseQuorumRequest"),
        (b"\x0a\x03\x0a\x01\xff", "not a LighthouseQuorumRequest"),  # a replica id that is not UTF-8
        (b"\x0a\x05\x3a\x03{x}", "no JSON object"),
        (b"\x0a\x05\x3a\x035.0", "no JSON object: it must begin"),
        (b'\x0a\x05\x3a\x03"x"', "no JSON object: it must begin"),
        (b"\x0a\x83\x80\x02\x3a\xff\xff\x01" + b"[" * 32767, "no JSON object"),
    ],
)
def test_what_others_could_not_read_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_quorum_request(body)


def test_a_quorum_is_told_as_it_was_asked() -> None:
    requests = [read_quorum_request(body) for body in (CLIENT, MANAGER, NIGHTLY)]
    seats = tuple(QuorumSeat(f"m{place}", 1, one) for place, one in enumerate(requests))
    told = write_quorum(builders.quorum(9, seats, id=42, created=99.5))
    members = b"".join(b"\x12" + body[1:] for body in (CLIENT, MANAGER, NIGHTLY))
    content = b"\x08\x2a" + members + b"\x1a\x08\x08\x63\x10\x80\xca\xb5\xee\x01"
    assert told == b"\x0a" + bytes([len(content)]) + content
