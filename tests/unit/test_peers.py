"""Whose connection still stands, by the kernel's tables."""

from __future__ import annotations

import socket
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

from ftcoord import proc
from ftcoord.coordination.gateway_sessions import connected_peers, ended_peers, parse_peer

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7346 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:7346 0200007F:BD8E 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
   2: 0100007F:7346 0300007F:BD8E 08 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 30 10 -1
   3: 0400007F:BD8E 0100007F:7346 01 00000000:00000000 00:00000000 00000000     0        0 4 1 0 20 4 30 10 -1
   4: 0100007F:1F90 0500007F:7346 01 00000000:00000000 00:00000000 00000000     0        0 5 1 0 20 4 30 10 -1
"""
TABLE_6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 0000000000000000FFFF00000100007F:7346 0000000000000000FFFF00000600007F:0001 01 00000000:00000000
   1: 00000000000000000000000001000000:7346 B80D0120000000000000000001000000:0002 01 00000000:00000000
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the tables are of a little-endian host")
def test_who_is_connected_with_a_port() -> None:
    assert list(connected_peers(TABLE, 0x7346)) == [(ip_address("127.0.0.2"), 0xBD8E)]
    six = [(ip_address("127.0.0.6"), 1), (ip_address("2001:db8::1"), 2)]
    assert list(connected_peers(TABLE_6, 0x7346)) == six


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:[::ffff:10.0.0.1]:4711", ("10.0.0.1", 4711)),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", ("fe80::1", 4711)),
        ("unix:", None),
        ("unix-abstract:ftcoord", None),
        ("ipv4:host7:4711", None),
        ("", None),
    ],
)
def test_names_of_peers(name: str, peer: tuple[str, int] | None) -> None:
    assert parse_peer(name) == (peer if peer is None else (ip_address(peer[0]), peer[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_that_ends_is_seen_at_once(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        caller = socket.create_connection((host, port))
        name = f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"
        peer = f"{name}:{caller.getsockname()[1]}"
        with listener.accept()[0]:
            assert not ended_peers(port, [peer, "unix:"])
            caller.close()
            assert ended_peers(port, [peer, "unix:"]) == {peer}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the system's tables are: none yet."""
    monkeypatch.setattr(proc, "PROC", str(tmp_path))
    (tmp_path / "net").mkdir()
    return tmp_path / "net"


def test_where_nothing_tells_nobody_has_gone(tables: Path) -> None:
    assert not ended_peers(4711, ["ipv4:127.0.0.1:1"])


@pytest.mark.parametrize(("unreadable", "other"), [("tcp", "tcp6"), ("tcp6", "tcp")])
def test_while_one_table_cannot_be_read_nobody_has_gone(tables: Path, unreadable: str, other: str) -> None:
    (
        tables / unreadable
    ).mkdir()  # IsADirectoryError stands for EMFILE: either is an OSError that is no lack of the table
    (tables / other).write_text("")
    assert not ended_peers(4711, ["ipv4:127.0.0.1:1"])


def test_one_table_alone_tells_where_the_system_has_no_other(tables: Path) -> None:
    (tables / "tcp").write_text("")
    assert ended_peers(4711, ["ipv4:127.0.0.1:1"]) == {"ipv4:127.0.0.1:1"}
