"""A manager's port: who reaches it, what it refuses, and what one bad peer costs the others."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from helpers import DEADLINE, eventually, in_fork, own_port
from natives import Natives
from rdzv_nodes import spawn

from ftcoord import concurrency, fork
from ftcoord.coordination import Gateway, LighthouseClient, ManagerClient, ManagerServer
from ftcoord.coordination.manager_client import place_of
from ftcoord.coordination.port import LARGEST_FRAME, Frame, Line
from ftcoord.coordination.rank_port import encode_call
from ftcoord.coordination.ranks import MetadataQuery, RankGroup, TimedVote
from ftcoord.core.manager_address import key_of, parted
from ftcoord.core.quorum_records import QuorumRequest
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ThreadNotStarted

LONG = timedelta(seconds=DEADLINE)
SHORT = timedelta(seconds=0.5)


@pytest.fixture
def job(etcd: EtcdServer, prefix: str) -> str:
    return f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1&heartbeat_timeout_ms=600000&native=1"


@pytest.fixture
def server(job: str) -> Iterator[ManagerServer]:
    one = manager(job)
    yield one
    one.shutdown()


def manager(job: str, bind: str = "[::]:0", hostname: str = "localhost", name: str = "a") -> ManagerServer:
    return ManagerServer(name, job, hostname, bind, f"store of {name}", 2, timedelta(seconds=1), LONG, 0)


def port_of(server: ManagerServer) -> int:
    return place_of(server.address())[1]


class Far:
    """Ranks that do not find the manager in their own process: their calls go through its port."""

    def __init__(self, server: ManagerServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = server.address()
        plain, fragment = parted(self.address)
        self.key, port = key_of(fragment)
        host, self.port = place_of(plain)
        self.at = host, port or self.port
        self.ranks = RankGroup.at(plain)
        monkeypatch.setattr(RankGroup, "at", staticmethod(lambda address: None))
        self.client = ManagerClient(self.address, LONG)

    def vote(self, step: int = 0) -> None:
        """Both ranks vote, through two connections."""
        votes = [spawn(partial(self.client.should_commit, rank, step, True, LONG)) for rank in range(2)]
        assert [vote.result(DEADLINE) for vote in votes] == [True, True]

    def says(self, metadata: str) -> None:
        """A quorum answers rank 0's request with that."""
        asked = [spawn(partial(self.client._quorum, rank, 0, metadata, False, True, 0, LONG)) for rank in range(2)]
        for one in asked:
            one.result(DEADLINE)

    def voted(self) -> int:
        assert self.ranks is not None
        return len(self.ranks._votes._waiting)

    def voters(self) -> list[int]:
        """The ranks whose votes wait."""
        assert self.ranks is not None
        return [rank for rank, _ in self.ranks._votes._waiting.copy().values()]

    @contextlib.contextmanager
    def line(self) -> Iterator[Line]:
        """A connection of a rank that has made no call yet."""
        with contextlib.closing(Line(*self.at, self.key, soon())) as line:
            yield line


def soon() -> float:
    return concurrency.now() + DEADLINE


@pytest.fixture
def far(server: ManagerServer, monkeypatch: pytest.MonkeyPatch) -> Far:
    return Far(server, monkeypatch)


# -- where it listens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        ("", "invalid socket address"),
        ("nonsense", "invalid socket address"),
        ("[::]:99999", "invalid port value"),
        ("[::]:x", "invalid port value"),
        ("192.0.2.1:0", r"\(os error 99\)"),
    ],
)
def test_a_bad_bind_is_refused_before_etcd_is_asked(bind: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        manager("etcd://127.0.0.1:1/job", bind)


def test_a_manager_that_was_not_made_listens_nowhere(etcd: EtcdServer) -> None:
    port = own_port()
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="failed to connect to etcd"):
        ManagerServer("a", "etcd://127.0.0.1:1/job", "h", f"127.0.0.1:{port}", "s", 1, SHORT, SHORT, 0)
    socket.create_server(("127.0.0.1", port)).close()
    eventually(lambda: set(threading.enumerate()) <= before, "no thread is left")


@pytest.mark.parametrize(
    ("bind", "hostname", "address"),
    [
        ("127.0.0.1:0", "127.0.0.1", "http://127.0.0.1:"),
        ("[::1]:0", "::1", "http://[::1]:"),
        ("[::]:0", "127.0.0.1", "http://127.0.0.1:"),
        ("[::]:0", "[::1]", "http://[::1]:"),
        ("localhost:0", "localhost", "http://localhost:"),
    ],
)
def test_ranks_reach_it_by_either_protocol(
    job: str, monkeypatch: pytest.MonkeyPatch, bind: str, hostname: str, address: str
) -> None:
    if "::" in bind + hostname and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    one = manager(job, bind, hostname)
    try:
        assert one.address().startswith(address)
        Far(one, monkeypatch).vote()
    finally:
        one.shutdown()


@pytest.mark.parametrize("address", ["nonsense", "http://localhost", "http://localhost:x", "http://", "http://..:1"])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(RuntimeError, match=r"failed to connect to .* within timeout of"):
        ManagerClient(address, LONG)


# -- who is served ----------------------------------------------------------------------------------------------------


def test_a_connection_that_does_not_know_the_token_is_closed(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the log of a refused one have a token in it."""
    server = manager(job.replace("&native=1", ""))
    try:
        far = Far(server, monkeypatch)
        plain, token = parted(far.address)
        with pytest.raises(RuntimeError, match=r"requires another token: take the address from ManagerServer\.address"):
            ManagerClient(f"{plain}#{token[::-1]}", LONG)
        monkeypatch.setattr("ftcoord.coordination.api._tokens", {})
        with pytest.raises(RuntimeError, match=r"has a token: take it from ManagerServer\.address"):
            ManagerClient(plain, SHORT)
        far.vote()
    finally:
        server.shutdown()


def test_torchfts_own_classes_are_served_only_if_the_address_says_so(
    job: str, caplog: pytest.LogCaptureFixture, natives: Natives
) -> None:
    """And then at a port of their own, which does not take ftcoord's."""
    caplog.set_level("INFO")
    closed, served = manager(job.replace("&native=1", "")), manager(job, name="b")
    try:
        with socket.create_connection(place_of(closed.address()), DEADLINE) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        assert "native=1" in "".join(record.getMessage() for record in caplog.records)
        with pytest.raises(RuntimeError, match="rank not found"):
            natives.do("metadata", address=served.address(), rank=0).result(DEADLINE)
        with pytest.raises(ConnectionError, match="no port of ftcoord's"):
            Line(*place_of(served.address()), bytes(16), soon())
    finally:
        closed.shutdown()
        served.shutdown()


@pytest.mark.parametrize("place", ["0.0.0.0", "127.0.0.1", "[::1]"])
def test_torchfts_port_is_the_one_that_was_asked_for(job: str, place: str) -> None:
    if "::" in place and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    port = own_port()
    server = manager(job, f"{place}:{port}")
    try:
        plain, fragment = parted(server.address())
        assert place_of(plain)[1] == port
        assert key_of(fragment)[1] not in (None, port)
        with pytest.raises(RuntimeError, match="Address already in use"):
            manager(job, f"{place}:{port}")
    finally:
        server.shutdown()


def test_a_token_is_shown_to_nobody(
    job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in a log, an error or a repr, nor in what torchft gets, which logs it. And yet a peer reaches the manager
    with what torchft gets."""
    caplog.set_level("DEBUG")
    job = job.replace("min_replicas=1", "min_replicas=2")
    servers = [manager(job, name=name) for name in "ab"]
    tokens, clients = (
        [key_of(parted(one.address())[1])[0].hex() for one in servers],
        [ManagerClient(one.address(), LONG) for one in servers],
    )
    asked = [
        spawn(partial(client._quorum, rank, step, f"weights at {step}", False, True, 0, LONG))
        for client, step in zip(clients, (5, 0), strict=True)
        for rank in range(2)
    ]
    told = [one.result(DEADLINE) for one in asked]
    monkeypatch.setattr(RankGroup, "at", staticmethod(lambda address: None))
    peer = ManagerClient(told[2].recover_src_manager_address, LONG)
    assert peer._checkpoint_metadata(0, LONG) == "weights at 5"
    # The others ask no more, but their records are read.
    with contextlib.closing(LighthouseClient(job, LONG)) as lighthouse, pytest.raises(TimeoutError):
        lighthouse.quorum("c", SHORT)
    request = QuorumRequest("a", servers[0].address(), "s", 0, 2, False, "", 0, ())
    for server in servers:
        server.shutdown()
    with pytest.raises(RuntimeError) as gone:
        ManagerClient(servers[0].address(), SHORT)
    seen = [repr([told, request, peer, gone.value]), *(one.getMessage() for one in caplog.records)]
    assert all(len(token) == 32 for token in tokens)
    assert not [text for text in seen if any(token in text for token in tokens)]


# -- bad peers ---------------------------------------------------------------------------------------------------------


def vote(rank: int, yes: bool = True) -> Frame:
    return encode_call(TimedVote(rank, 0, yes, 60.0))


GARBAGE = {
    "no call": [Frame("v", b"\xff\xfe")],
    "no such call": [Frame("d", b'{"v":1}')],
    "not its fields": [Frame("v", b'{"v":1,"rank":1}')],
    "a wrong type": [Frame("v", b'{"v":1,"rank":"1","step":0,"yes":true,"timeout":1.0}')],
    "for no time": [Frame("v", b'{"v":1,"rank":1,"step":0,"yes":true,"timeout":NaN}')],
    "for too long": [Frame("v", b'{"v":1,"rank":1,"step":0,"yes":true,"timeout":Infinity}')],
    "nested too deep": [Frame("v", b"[" * 100_000)],
    "two at a time": [vote(1), vote(1)],
    "a greeting again": [vote(1), Frame("P", b"{}")],
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE.keys())
def test_what_is_no_call_closes_its_connection_and_no_other(far: Far, said: Sequence[Frame]) -> None:
    with far.line() as bad:
        for frame in said:
            bad.send(*frame, soon())
        with pytest.raises(ConnectionError):
            bad.receive(soon())
    eventually(lambda: not far.voted(), "what it voted is taken back")
    far.vote()


def test_answers_that_nobody_reads_do_not_pile_up(far: Far) -> None:
    far.says("x" * 3_000_000)
    call, received = encode_call(MetadataQuery(0)), 0
    with far.line() as line, contextlib.suppress(ConnectionError):
        for _ in range(20):
            line.send(*call, soon())
        while True:
            received += len(line.receive(soon()).payload)
    assert received < 10 * 3_000_000, "it is answered on and on"
    far.vote()


def test_where_no_thread_can_be_started_all_ranks_are_answered_at_once(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And later, when there are threads again, the next request has one."""
    make = concurrency.thread

    def thread(target: Any, name: str, *args: object) -> Any:
        if name == "ftcoord-ask":
            raise ThreadNotStarted(name, RuntimeError("there are too many"))
        return make(target, name, *args)

    with monkeypatch.context() as patched:
        patched.setattr(concurrency, "thread", thread)
        asked = [spawn(partial(far.client._quorum, rank, 0, "", False, True, 0, LONG)) for rank in range(2)]
        for one in asked:
            with pytest.raises(RuntimeError, match="ftcoord-ask"):
                one.result(DEADLINE)
    far.says("weights")


def test_a_call_that_is_too_long_is_refused_before_it_is_sent(far: Far) -> None:
    with pytest.raises(RuntimeError, match="status: OutOfRange"):
        far.client._quorum(0, 0, "x" * LARGEST_FRAME, False, True, 0, LONG)
    far.vote()


def test_a_connection_that_died_while_nobody_used_it_is_replaced(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job.replace("&native=1", "")
    server = manager(job)
    far = Far(server, monkeypatch)
    far.vote()
    server.shutdown()
    with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*tcp connect error"):
        far.client.should_commit(0, 1, True, LONG)
    after = manager(job, f"[::]:{far.port}")
    try:
        with pytest.raises(RuntimeError, match="requires another token"):  # a rank of the manager before
            far.client.should_commit(0, 1, True, LONG)
        far.client = ManagerClient(after.address(), LONG)
        for step in range(2):
            far.vote(step)
    finally:
        after.shutdown()


@pytest.mark.parametrize("rank", [2, 7])
@pytest.mark.parametrize("is_far", [False, True], ids=["in its process", "through the port"])
def test_a_rank_that_the_group_does_not_have_is_refused_and_counts_for_nobody(
    server: ManagerServer, monkeypatch: pytest.MonkeyPatch, is_far: bool, rank: int
) -> None:
    client = Far(server, monkeypatch).client if is_far else ManagerClient(server.address(), LONG)
    first = spawn(partial(client._quorum, 0, 0, "weights", False, True, 0, LONG))
    why = rf"status: InvalidArgument, message.*no rank {rank}: this group has ranks 0 to 1"
    with pytest.raises(RuntimeError, match=why):
        client._quorum(rank, 0, "weights", False, True, 0, LONG)
    with pytest.raises(RuntimeError, match=why):
        client.should_commit(rank, 0, True, LONG)
    with pytest.raises(RuntimeError, match=r"status: InvalidArgument, message.*rank not found"):
        client._checkpoint_metadata(rank, LONG)
    assert client._quorum(1, 0, "weights", False, True, 0, LONG).replica_ids == ["a"]
    assert first.result(DEADLINE).replica_ids == ["a"]


def test_an_interrupted_rank_takes_its_vote_back(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        eventually(far.voted, "the vote is there")
        raise Interrupt

    with monkeypatch.context() as patched:
        patched.setattr("ftcoord.coordination.port.Line.receive", interrupt)
        with pytest.raises(Interrupt):
            far.client.should_commit(0, 0, True, LONG)
    eventually(lambda: not far.voted(), "the vote is taken back")


def test_a_connection_that_tcp_gives_up_is_no_time_out(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the manager's host has lost its power: Python raises TimeoutError for both."""

    class GivenUp:
        def __init__(self, line: Line) -> None:
            self._real = line._socket

        def recv(self, _size: int) -> bytes:
            raise TimeoutError(110, "Connection timed out")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    (line,) = far.client._ways[0]._idle  # type: ignore[union-attr]
    line._socket = GivenUp(line)
    monkeypatch.setattr(Line, "is_quiet", True)
    with pytest.raises(RuntimeError, match=r'status: Unknown, message: "transport error"'):
        far.client._checkpoint_metadata(0, LONG)


def test_a_client_that_nobody_holds_has_closed_its_connections(far: Far) -> None:
    far.vote()
    sockets = [line._socket for line in far.client._ways[0]._idle]  # type: ignore[union-attr]
    assert len(sockets) == 2
    del far.client
    eventually(lambda: gc.collect() >= 0 and all(one.fileno() < 0 for one in sockets), "both are closed")


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_holds_no_connection_open(natives: Natives, far: Far) -> None:
    """Else a manager that died would seem to live for as long as its children do. Also none of torchft's."""
    far.vote()
    natives.do("connect", name="a", address=far.address, ranks=2).result(DEADLINE)
    natives.do("commit", name="a", rank=1, step=0)
    eventually(lambda: far.voters() == [1], "it waits at its port")
    hidden = set(fork._hidden)
    assert len(hidden) >= 1 + 2 * 2  # the listener, and both ends of two connections

    def sockets() -> None:
        left = [one for one in hidden if os.readlink(f"/proc/self/fd/{one}").startswith("socket:")]
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    one = socket.socket(fileno=os.dup(int(name)))
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == far.port:
                        left.append(int(name))
        if left:
            raise LookupError(f"{left} are open")

    assert in_fork(sockets) == "None"
    assert far.client.should_commit(0, 0, True, LONG)


# -- torchft's own, on either side -----------------------------------------------------------------------------------


def test_native_and_drop_in_ranks_share_a_manager(natives: Natives, far: Far) -> None:
    natives.do("connect", name="a", address=far.address, ranks=2).result(DEADLINE)
    for step in range(3):
        theirs = natives.do("quorum", name="a", rank=1, step=step)
        ours = far.client._quorum(0, step, "weights 0", False, True, 0, LONG)
        told = theirs.result(DEADLINE)
        assert (ours.quorum_id, ours.replica_ids, ours.store_address) == (1, ["a"], "store of a")
        assert {name: told[name] for name in ("quorum_id", "replica_ids", "store_address", "max_step")} == {
            "quorum_id": 1,
            "replica_ids": ["a"],
            "store_address": "store of a",
            "max_step": step,
        }
        vote = natives.do("commit", name="a", rank=1, step=step, yes=step != 1)
        assert far.client.should_commit(0, step, True, LONG) == vote.result(DEADLINE) == (step != 1)
    assert natives.do("metadata", address=far.address, rank=0).result(DEADLINE) == "weights 0"
    assert far.client._checkpoint_metadata(1, LONG) == "weights of a"


def test_drop_in_ranks_of_a_native_manager(natives: Natives, job: str) -> None:
    with Gateway(job) as gateway:
        address = natives.do("manager", name="n", lighthouse=gateway.address(), world_size=2).result(DEADLINE)
        client = ManagerClient(address, LONG)
        with pytest.raises(RuntimeError, match=r"status: InvalidArgument, message: \"rank not found\""):
            client._checkpoint_metadata(1, LONG)
        theirs = natives.do("quorum", name="n", rank=0)
        told = client._quorum(1, 0, "weights 1", False, True, 0, LONG)
        assert (told.replica_ids, told.store_address, told.heal) == (["n"], "store-of-n", False)
        assert (told.recover_src_replica_rank, told.max_replica_rank) == (None, 0)
        assert theirs.result(DEADLINE)["replica_ids"] == ["n"]
        assert client._checkpoint_metadata(0, LONG) == "weights of n"
        assert natives.do("metadata", address=address, rank=1).result(DEADLINE) == "weights 1"
        waiting = spawn(partial(client.should_commit, 1, 1, True, LONG))
        other = natives.do("commit", name="n", rank=0, step=1)
        assert waiting.result(DEADLINE) == other.result(DEADLINE)
        with pytest.raises(TimeoutError, match=r"status: Cancelled, message.*Timeout expired"):
            client.should_commit(0, 2, True, SHORT)
        waiting = spawn(partial(client._quorum, 0, 2, "", False, True, 0, LONG))
        eventually(lambda: client._checkpoint_metadata(0, LONG) == "", "it asks")
        natives.kill()
        with pytest.raises(RuntimeError, match='status: Unknown, message: "transport error"'):
            waiting.result(DEADLINE)
        with pytest.raises(RuntimeError, match="status: Un"):
            client._checkpoint_metadata(0, LONG)
