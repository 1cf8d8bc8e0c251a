"""Jobs for the page to show, as members write them, and the page's own process."""

from __future__ import annotations

import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import builders
from held import TIMER, WORKER, timers_kv
from helpers import DEADLINE

from ftcoord import concurrency
from ftcoord.core import history, quorum_records, rendezvous_records
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import KEY_PREFIX, decided_key, event_key, member_id, member_key, quorum_prefix, run_prefix
from ftcoord.core.quorum_records import QuorumSeat
from ftcoord.core.rendezvous_records import Seat
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient

TTL = 600
"""Seconds; long enough for a test."""


@contextmanager
def page(endpoint: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """The page's address, while it is served."""
    command = [sys.executable, "-m", "ftcoord.cli", "dashboard", "--endpoints", endpoint, "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.removeprefix("the page is at ").partition(";")[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0


def write_run(client: EtcdClient, job: str, hosts: Sequence[str]) -> list[int]:
    """A run with a round of these hosts; their leases."""
    prefix, leases = run_prefix(KEY_PREFIX, job), [client.grant(TTL).id for _ in hosts]
    most = len(hosts)
    seats = tuple(Seat(member_id(lease), f"node{at}", hosts[at]) for at, lease in enumerate(leases))
    record = builders.round_(1, seats, ready=True, limits=(1, most))
    puts = [Put(key, value) for key, value in builders.round_keys(prefix, record).items()]
    for at, lease in enumerate(leases):
        ask = builders.ask(f"node{at}", port=29500, host=hosts[at], nonce=f"n{at}", seated=1, limits=(1, most))
        puts.append(Put(member_key(prefix, member_id(lease)), rendezvous_records.encode(ask), lease))
    for at in range(0, len(puts), 100):
        client.txn((), puts[at : at + 100])
    return leases


def write_history(client: EtcdClient, job: str, events: Sequence[HistoryEvent]) -> None:
    """What happened to a run."""
    lease = client.grant(TTL).id
    for at, event in enumerate(events):
        key = event_key(run_prefix(KEY_PREFIX, job), client.get("x").revision, "writer", at)
        client.put(key, history.encode(event), lease)


def write_timer(client: EtcdClient, job: str, scope: str) -> str:
    """A worker that holds a timer of a minute; its key."""
    now = int(concurrency.wall() * 1000) + 60_000
    timer = replace(TIMER, scope=scope, after_ms=60_000, until_ms=now, wall_ms=now)
    lease = client.grant(TTL).id
    kv = timers_kv(run_prefix(KEY_PREFIX, job), timer, worker=replace(WORKER, node=scope), lease=lease)
    client.put(kv.key, kv.value, lease)
    return kv.key


def write_quorum(client: EtcdClient, job: str, steps: Mapping[str, int]) -> None:
    """A job whose replicas train, each at its step."""
    prefix = quorum_prefix(KEY_PREFIX, job)
    seats = []
    for name, step in sorted(steps.items()):
        lease = client.grant(TTL).id
        request = builders.request(name, address=f"http://{name}:1", store_address=f"{name}:2", step=step, world_size=8)
        record = builders.replica(request, after=1)
        client.put(member_key(prefix, member_id(lease)), quorum_records.encode(record), lease)
        seats.append(QuorumSeat(member_id(lease), 1, request))
    quorum = builders.quorum(1, tuple(seats), created=1.7e9)
    client.put(decided_key(prefix), quorum_records.encode_quorum(quorum))


class PrefixProxy:
    """A reverse proxy on this host, which serves another server below a path. The path without a slash is redirected.

    Args:
        upstream: the address of the other server.
        prefix: the path, such as `/ops/ft`.
    """

    def __init__(self, upstream: str, prefix: str) -> None:
        parts = urlsplit(upstream)

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                method, path, _ = self.rfile.readline().decode().split(" ")
                headers = list(iter(self.rfile.readline, b"\r\n"))
                if not path.startswith(f"{prefix}/"):
                    answer = f"301 Moved\r\nLocation: {prefix}/" if path == prefix else "404 Not Found"
                    self.wfile.write(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                    return
                length = sum(int(one.split(b":")[1]) for one in headers if one.lower().startswith(b"content-length:"))
                kept = [one for one in headers if not one.lower().startswith(b"connection:")]
                head = f"{method} {path.removeprefix(prefix)} HTTP/1.1\r\nConnection: close\r\n".encode()
                with socket.create_connection((parts.hostname, parts.port)) as onward, suppress(OSError):
                    onward.sendall(head + b"".join(kept) + b"\r\n" + self.rfile.read(length))
                    while some := onward.recv(1 << 16):
                        self.connection.sendall(some)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
