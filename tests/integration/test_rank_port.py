"""A manager's port: who reaches it, what it refuses, and what one bad peer costs the others."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import builders
import pytest
from helpers import DEADLINE, eventually, in_fork, own_port
from natives import Natives
from rdzv_nodes import spawn

from ftcoord import fork
from ftcoord.coordination import (
    Gateway,
    LighthouseClient,
    ManagerClient,
    ManagerServer,
    native_ranks,
    rank_port,
    tcp,
)
from ftcoord.coordination.manager_client import place_of
from ftcoord.coordination.rank_frames import (
    HELLO,
    LARGEST_MESSAGE,
    WELCOME,
    WRONG_TOKEN,
    TimedVote,
    encode_answer,
    encode_call,
    frame,
    greeting,
)
from ftcoord.coordination.rank_group import RankGroup
from ftcoord.coordination.rank_port import HTTP2
from ftcoord.coordination.ranks import MOST_CALLS
from ftcoord.core.manager_address import parted
from ftcoord.embedded.server import EtcdServer

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
        plain, self.token = parted(self.address)
        self.at = place_of(plain)
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
        return [vote.rank for vote in self.ranks._votes._waiting.copy().values()]

    @contextlib.contextmanager
    def greeted(self) -> Iterator[socket.socket]:
        """A connection of a rank that has made no call yet."""
        with socket.create_connection(self.at, DEADLINE) as rank:
            rank.sendall(greeting(self.token))
            assert rank.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME
            yield rank


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


# -- who is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "0" * 32])
def test_a_connection_without_the_managers_token_is_closed(far: Far, token: str) -> None:
    with socket.create_connection(far.at, DEADLINE) as stranger:
        stranger.sendall(greeting(token) + frame(encode_call(TimedVote(1, 0, True, 60.0))))
        with contextlib.suppress(ConnectionResetError):
            said = b""
            while more := stranger.recv(100):
                said += more
            assert said == WRONG_TOKEN
    plain = parted(far.address)[0]
    with pytest.raises(RuntimeError, match=r"requires another token: take the address from ManagerServer\.address"):
        ManagerClient(f"{plain}#{token}" if token else plain, LONG)
    with pytest.raises(TimeoutError):
        far.client.should_commit(0, 0, True, SHORT)


def test_torchfts_own_classes_are_served_only_if_the_address_says_so(
    job: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = manager(job.replace("&native=1", ""))
    try:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port_of(server)), DEADLINE) as stranger:
                stranger.sendall(HTTP2)
                assert is_closed(stranger)
        (line,) = [record.getMessage() for record in caplog.records if "native=1" in record.getMessage()]
        assert "a connection of torchft's own classes was closed" in line
    finally:
        server.shutdown()


def test_a_token_is_shown_to_nobody(
    job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in a log, an error or a repr, nor in what torchft gets, which logs it. And yet a peer reaches the manager
    with what torchft gets."""
    caplog.set_level(logging.DEBUG)
    job = job.replace("min_replicas=1", "min_replicas=2")
    servers = [manager(job, name=name) for name in "ab"]
    tokens, clients = (
        [parted(one.address())[1] for one in servers],
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
    record = builders.request("a", address=servers[0].address(), store_address="s", world_size=2)
    for server in servers:
        server.shutdown()
    with pytest.raises(RuntimeError) as gone:
        ManagerClient(servers[0].address(), SHORT)
    seen = [repr([told, record, record.profile, peer, gone.value]), *(one.getMessage() for one in caplog.records)]
    assert all(len(token) == 32 for token in tokens)
    assert not [text for text in seen if any(token in text for token in tokens)]


# -- bad peers ---------------------------------------------------------------------------------------------------------


GREETED = b"<the greeting>"
"""Stands for what a rank sends first, which has the token of its manager in it."""
GARBAGE = {
    "not a greeting": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(100),
    "almost a greeting": HELLO[:-1] + b"!",
    "no call": GREETED + frame(b"\xff\xfe"),
    "no such call": GREETED + frame(b'dance {"v":1}'),
    "not its fields": GREETED + frame(b'commit {"v":1,"rank":1}'),
    "a wrong type": GREETED + frame(b'commit {"v":1,"rank":"1","step":0,"yes":true,"timeout":1.0}'),
    "for no time": GREETED + frame(b'commit {"v":1,"rank":1,"step":0,"yes":true,"timeout":NaN}'),
    "for too long": GREETED + frame(b'commit {"v":1,"rank":1,"step":0,"yes":true,"timeout":Infinity}'),
    "nested too deep": GREETED + frame(b"commit " + b"[" * 100_000),
    "too long": GREETED + struct.pack(">I", LARGEST_MESSAGE + 1),
    "two at a time": GREETED + 2 * frame(encode_call(TimedVote(1, 0, True, 60.0))),
    "HTTP/2 that ends": HTTP2 + b"\r\n\r\nSM\r\n\r\n" + bytes(1000),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_closes_its_connection_and_no_other(far: Far, said: bytes) -> None:
    with socket.create_connection(far.at, DEADLINE) as bad:
        bad.sendall(said.replace(GREETED, greeting(far.token)))
        with contextlib.suppress(ConnectionResetError):
            while bad.recv(4096):
                pass
    eventually(lambda: not far.voted(), "what it voted is taken back")
    far.vote()


@pytest.fixture
def small(job: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """Of two ranks, at a port that takes 4 connections of each kind, and 1 MiB of calls that are not complete."""
    for name in ("MOST_NEWCOMERS", "MOST_IDLE", "MOST_NATIVE"):
        monkeypatch.setattr(rank_port, name, (0, 2))
    monkeypatch.setattr(rank_port, "GREETING_TIMEOUT", 10 * DEADLINE)
    monkeypatch.setattr(rank_port, "MOST_UNFINISHED", (1 << 20, 0))
    monkeypatch.setattr(native_ranks, "SPARE_CALLS", 4 - 2 * 2 * MOST_CALLS)
    one = manager(job)
    yield Far(one, monkeypatch)
    one.shutdown()


def is_closed(peer: socket.socket) -> bool:
    """Waits for it."""
    with contextlib.suppress(ConnectionResetError):
        return peer.recv(1) == b""
    return True


def test_greeted_connections_do_not_take_all_descriptors(small: Far) -> None:
    """Of those that make no call, the one that made none for longest goes; those that wait stay."""
    with ExitStack() as stack:
        waits = stack.enter_context(small.greeted())
        waits.sendall(frame(encode_call(TimedVote(0, 0, True, 60.0))))
        eventually(lambda: small.voters() == [0], "it waits")
        idle = [stack.enter_context(small.greeted()) for _ in range(7)]
        assert all(is_closed(peer) for peer in idle[:3])
        idle[3].sendall(frame(encode_call(TimedVote(1, 0, True, 60.0))))
        answer = frame(encode_answer(True))
        assert [peer.recv(len(answer), socket.MSG_WAITALL) for peer in (waits, idle[3])] == [answer] * 2


def test_calls_that_never_end_do_not_take_all_memory(small: Far) -> None:
    """All together have one budget; the one that began first goes."""
    half = struct.pack(">I", LARGEST_MESSAGE) + bytes(600_000)
    with ExitStack() as stack:
        peers = [stack.enter_context(small.greeted()) for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.sendall(half)
            assert not number or is_closed(peers[number - 1])
        small.vote()


def test_a_call_that_is_too_long_is_refused_before_it_is_sent(far: Far) -> None:
    with pytest.raises(RuntimeError, match="status: OutOfRange"):
        far.client._quorum(0, 0, "x" * LARGEST_MESSAGE, False, True, 0, LONG)
    far.vote()


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
        patched.setattr("ftcoord.coordination.rank_sockets.RankSocket._receive", interrupt)
        with pytest.raises(Interrupt):
            far.client.should_commit(0, 0, True, LONG)
    eventually(lambda: not far.voted(), "the vote is taken back")


def test_either_end_notices_a_host_that_lost_its_power(far: Far) -> None:
    far.vote()
    for descriptor in fork._hidden:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == tcp.KEEPALIVE_IDLE


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_holds_no_connection_open(far: Far, server: ManagerServer) -> None:
    """Else a manager that died would seem to live for as long as its children do."""
    far.vote()
    hidden = set(fork._hidden)
    assert len(hidden) >= 1 + 2 * 2  # the listener, and both ends of two connections

    def sockets() -> None:
        left = [one for one in hidden if os.readlink(f"/proc/self/fd/{one}").startswith("socket:")]
        if left:
            raise LookupError(f"{left} are open")

    assert in_fork(sockets) == "None"
    far.vote(1)


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
