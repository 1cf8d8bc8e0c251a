"""The page's server on its thread: it says when it serves, and keeps no connection on which nothing is asked."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.request import urlopen

import pytest
import uvicorn
from helpers import DEADLINE, eventually
from page_calls import page_of

from ftcoord.config import EtcdConfig
from ftcoord.dashboard import server as servers
from ftcoord.dashboard.server import PageServer


@contextmanager
def connected(server: PageServer, said: bytes = b"") -> Iterator[socket.socket]:
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as one:
        one.sendall(said)
        yield one


def is_ended(one: socket.socket) -> bool:
    try:
        return not one.recv(1 << 16)
    except ConnectionResetError:
        return True


def serves(server: PageServer) -> bool:
    with urlopen(f"{server.address}/api/about", timeout=DEADLINE) as answer:
        return bool(answer.status == 200)


ASKED = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "said", [b"", b"G", b"GET / HTTP/1.1\r\n", ASKED + b"G"], ids=["silent", "a byte", "a line", "again"]
)
def test_a_connection_on_which_nothing_is_asked_is_ended(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEADERS_TIMEOUT", 0.2)
    with PageServer(page_of()) as server, connected(server, said) as one:
        eventually(lambda: is_ended(one), "the end of the connection")
        assert serves(server)


@pytest.mark.parametrize("limit", ["MOST_CONNECTIONS", "MOST_OF_ADDRESS"])
def test_one_connection_too_many_is_ended_and_takes_nobodys_place(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, limit, 3)
    with PageServer(page_of()) as server, ExitStack() as silent:
        for _ in range(3):
            silent.enter_context(connected(server))
        with connected(server) as more:
            assert is_ended(more)
        silent.close()
        eventually(lambda: _serves_by_now(server), "room for another one")


def test_a_peer_that_asks_and_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "UNREAD_TIMEOUT", 0.2)
    asked = b"GET /static/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with PageServer(page_of()) as server, connected(server) as one:
        one.sendall(asked * 1000)  # more than all buffers hold
        eventually(lambda: not server._server.server_state.connections, "its end, though it has read nothing")
        assert serves(server)


def test_a_viewer_that_reads_nothing_is_disconnected_and_its_feed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "UNREAD_TIMEOUT", 0.2)
    monkeypatch.setattr(servers, "BEAT", 0.01)
    monkeypatch.setattr(
        servers, "_event", lambda *_: "data: " + "x" * 1_000_000 + "\n\n"
    )  # soon more than all buffers hold
    no_etcd = EtcdConfig.load("127.0.0.1:1", env={}, request_timeout=0.1)
    with (
        PageServer(page_of(etcd=no_etcd)) as server,
        connected(server, b"GET /api/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ):
        eventually(_is_list_read, "the feed of the list")
        eventually(lambda: not server._server.server_state.connections, "the end of its connection")
        eventually(lambda: not _is_list_read(), "the end of the feed")


def _is_list_read() -> bool:
    return any(one.name == "ftcoord-job-list" for one in threading.enumerate())


def _serves_by_now(server: PageServer) -> bool:
    try:
        return serves(server)
    except OSError:  # the server has not seen yet that the others are gone
        return False


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), SystemExit(3)], ids=repr)
def test_one_that_cannot_serve_has_failed(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: uvicorn.Server, sockets: object = None) -> None:
        raise error

    monkeypatch.setattr(uvicorn.Server, "startup", fail)
    with PageServer(page_of()) as server:
        eventually(lambda: server.has_failed, "its end")
    assert f"the page at {server.address} has ended: {error}" in caplog.text


def test_one_that_ends_by_itself_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with PageServer(page_of()) as server:
        assert serves(server)
        assert not server.has_failed

        async def fail(self: uvicorn.Server, counter: int) -> bool:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(uvicorn.Server, "on_tick", fail)
        eventually(lambda: server.has_failed, "its end")
