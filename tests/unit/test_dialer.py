"""Connections to etcd are opened in time, whatever its name and its addresses do."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers import DEADLINE, eventually

from ftcoord import concurrency
from ftcoord.config import Endpoint, EtcdConfig
from ftcoord.errors import EtcdUnavailable, ThreadNotStarted
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.rpc.dialer import Dialer
from ftcoord.etcd.rpc.lean import LeanClient

SHORT = 0.2
"""Seconds: over before what is waited for."""


class Names:
    """Stands in for the system's look-up, of any name. `hold` has it hang until it is set."""

    def __init__(self) -> None:
        self.addresses: list[tuple[str, int]] = []
        self.problem: BaseException | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.calls = 0

    def __call__(self, host: bytes, port: int, *, type: int, flags: int) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        self.calls += 1
        assert self.hold.wait(DEADLINE)
        if self.problem is not None:
            raise self.problem
        return [(socket.AF_INET, type, 0, "", address) for address in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.hold.set()
    eventually(lambda: "ftcoord-dialer" not in {one.name for one in threading.enumerate()}, "no look-up is left")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address that does not answer: more wait there for a connection than there is room for."""
    with ExitStack() as ends:
        full = ends.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = ends.enter_context(socket.socket())
            waiting.setblocking(False)
            assert waiting.connect_ex(full.getsockname()) == errno.EINPROGRESS
        yield full.getsockname()


def soon() -> float:
    return concurrency.now() + SHORT


def later() -> float:
    return concurrency.now() + DEADLINE


def connects(dialer: Dialer, server: socket.socket, deadline: float) -> bool:
    with dialer.dial(deadline) as connection:
        return bool(connection.getpeername() == server.getsockname())


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    names: Names, server: socket.socket, black_hole: tuple[str, int]
) -> None:
    names.addresses = [black_hole, server.getsockname()]
    assert connects(Dialer(Endpoint("etcd")), server, concurrency.now() + 2)


def test_the_time_is_over_when_no_address_answers(names: Names, black_hole: tuple[str, int]) -> None:
    names.addresses = [black_hole, black_hole]
    with pytest.raises(TimeoutError):
        Dialer(Endpoint("etcd")).dial(soon())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_dials_hears_what_ended_the_look_up(names: Names, server: socket.socket) -> None:
    names.problem = MemoryError("made by the test")
    dialer = Dialer(Endpoint("etcd"))
    with pytest.raises(OSError, match=r"look-up of its name failed.*made by the test"):
        dialer.dial(later())
    names.problem, names.addresses = None, [server.getsockname()]
    assert connects(dialer, server, later())


def test_a_look_up_that_hangs_ends_with_the_time_and_is_not_repeated_meanwhile(
    names: Names, server: socket.socket
) -> None:
    names.hold.clear()
    names.addresses = [server.getsockname()]
    dialer = Dialer(Endpoint("etcd"))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="its name was not looked up"):
            dialer.dial(soon())
    assert names.calls == 1
    names.hold.set()
    assert connects(dialer, server, later())


def test_what_was_found_when_it_was_made_counts_while_no_name_can_be_looked_up(
    names: Names, server: socket.socket
) -> None:
    names.addresses = [server.getsockname()]
    dialer = Dialer(Endpoint("etcd"))
    eventually(lambda: dialer._known, "it is looked up before anybody connects")
    names.hold.clear()
    assert connects(dialer, server, later())
    names.problem = socket.gaierror(socket.EAI_AGAIN, "no server of names answers")
    names.hold.set()
    assert connects(dialer, server, later())


def test_a_name_that_means_other_addresses_now(
    names: Names, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcoord.etcd.rpc.dialer.NEWS_WITHIN", DEADLINE)
    with socket.create_server(("127.0.0.1", 0)) as old:
        names.addresses = [old.getsockname()]
        dialer = Dialer(Endpoint("etcd"))
        assert connects(dialer, old, later())
    names.addresses = [server.getsockname()]
    assert connects(dialer, server, later())


def test_a_name_that_nobody_knows_is_said_at_once(names: Names) -> None:
    names.problem = socket.gaierror(socket.EAI_NONAME, "nobody knows it")
    with pytest.raises(OSError, match="nobody knows it"):
        Dialer(Endpoint("etcd")).dial(later())


def no_thread(_self: object) -> None:
    raise ThreadNotStarted("ftcoord-dialer", RuntimeError("there are too many"))


def test_an_address_needs_no_thread(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    host, port = server.getsockname()
    assert connects(Dialer(Endpoint(host, port)), server, later())


def test_where_no_thread_can_be_had(names: Names, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    names.addresses = [server.getsockname()]
    known = Dialer(Endpoint("etcd"))
    assert connects(known, server, later())
    eventually(lambda: "ftcoord-dialer" not in {one.name for one in threading.enumerate()}, "no look-up is left")
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert connects(known, server, later())
    with pytest.raises(OSError, match="too many"):
        Dialer(Endpoint("etcd")).dial(later())


def test_a_call_ends_in_time_though_the_name_of_etcd_cannot_be_looked_up(names: Names) -> None:
    names.hold.clear()
    client = LeanClient(EtcdConfig.load("etcd:2379", env={}))
    with pytest.raises(EtcdUnavailable, match="its name was not looked up"):
        client.range(Get(Span("/")), timeout=SHORT)
