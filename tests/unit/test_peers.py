"""Whose connection still stands, as a gateway sees it."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from helpers import eventually

from ftcoord.coordination.gateway import connected_peers


@pytest.mark.parametrize(
    ("host", "listens", "name"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        ("::1", "::1", "ipv6:[::1]:{}"),
        ("127.0.0.1", "::", "ipv4:127.0.0.1:{}"),
    ],
)
@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="there is no /dev/fd")
def test_a_connection_that_ends_is_seen(host: str, listens: str, name: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    others = socket.socketpair()
    with (
        others[0],
        others[1],
        socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::") as listener,
    ):
        caller = socket.create_connection((host, listener.getsockname()[1]))
        peer = name.format(caller.getsockname()[1])
        with caller, listener.accept()[0]:
            assert peer in (connected_peers() or ())
            assert listener.getsockname()[1], "what was looked at is still open"
            others[0].send(b"x")
            assert others[1].recv(1) == b"x", "of other kinds too"
        eventually(lambda: peer not in (connected_peers() or ()), "its end is seen")


def test_a_default_timeout_is_not_put_on_the_sockets_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 5.0)
    assert connected_peers() is None


def test_while_nothing_can_be_asked_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: str) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", full)
    assert connected_peers() is None
