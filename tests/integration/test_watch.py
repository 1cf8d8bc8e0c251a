"""Watches: nothing missed and nothing twice, whatever becomes of the server."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import EtcdCluster
from helpers import DEADLINE, Seen, eventually, own_port

from ftcoord import config, errors
from ftcoord.embedded.server import EtcdServer, find_etcd
from ftcoord.etcd.api import Began, KeyValue, Put, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.watch import Watcher
from ftcoord.primitives.write_once import write_once


@pytest.fixture
def own(etcd: EtcdServer) -> Iterator[EtcdClient]:
    """A client on which nothing else is watched."""
    with etcd.get_client() as client:
        yield client


def watch_from_now(client: EtcdClient, span: Span, seen: Seen) -> Watcher:
    return client.watch(span, client.get("/").revision + 1, seen)


class Writer:
    """Writes 1, 2, 3 ... to a key, each exactly once, whatever happens, until it is stopped."""

    def __init__(self, endpoints: str, key: str) -> None:
        self.count = 0
        self._key = key
        self._client = EtcdClient(config.EtcdConfig.load(endpoints, request_timeout=2, env={}))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def finish(self) -> list[bytes]:
        """Stop; all that was written."""
        self._stop.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        return [str(i + 1).encode() for i in range(self.count)]

    def more(self, count: int = 20) -> None:
        """Wait for more writes."""
        wanted = self.count + count
        eventually(lambda: self.count >= wanted, what=f"{wanted} writes")

    def _run(self) -> None:
        kv = None
        while not self._stop.wait(0.002):
            kv = self._write(str(self.count + 1).encode(), kv)
            self.count += 1

    def _write(self, value: bytes, before: KeyValue | None) -> KeyValue:
        while True:
            try:
                kv = write_once(self._client, Put(self._key, value), before).kv
            except (errors.EtcdUnavailable, errors.OutcomeUnknown):
                continue
            assert kv is not None
            assert kv.value == value
            return kv


def values(seen: Seen, count: int) -> list[bytes]:
    return [event.kv.value for event in seen.events(count)]


# -- what a watch tells ---------------------------------------------------------------------------------------------


def test_those_who_watch_the_same_share_a_watch_of_etcds(own: EtcdClient, prefix: str) -> None:
    first, late, other, deletes = Seen(), Seen(), Seen(), Seen()
    watch = own.watch(Span(prefix), 0, first)
    assert isinstance(first.next(), Began)
    before = own.put(prefix, b"1").revision
    assert values(first, 1) == [b"1"]
    others = [
        own.watch(Span(prefix), 0, late),
        own.watch(Span(prefix, is_prefix=True), 0, other),
        own.watch(Span(prefix), 0, deletes, deletes_only=True),
    ]
    began = late.next()
    assert isinstance(began, Began)
    assert began.revision >= before
    assert isinstance(other.next(), Began)
    assert isinstance(deletes.next(), Began)
    assert len(own._watches._sources) == 3
    own.put(prefix, b"2")
    assert values(first, 2) == [b"1", b"2"]
    assert values(late, 1) == [b"2"]
    watch.cancel()
    watch.cancel()
    own.put(prefix, b"3")
    assert values(late, 2) == [b"2", b"3"]
    assert values(other, 2) == [b"2", b"3"]
    assert first.is_quiet()
    for one in others:
        one.cancel()
    assert not own._watches._sources
    again = Seen()
    own.watch(Span(prefix), 0, again)
    assert isinstance(again.next(), Began)
    own.put(prefix, b"4")
    assert values(again, 1) == [b"4"]


def test_a_shared_watch_outlives_its_stream(fragile: EtcdServer, prefix: str) -> None:
    """Who joins while etcd is away is told of it all when it is back."""
    with fragile.get_client() as client:
        first, late = Seen(), Seen()
        client.watch(Span(prefix), 0, first)
        assert isinstance(first.next(), Began)
        client.put(prefix, b"1")
        assert values(first, 1) == [b"1"]
        fragile.kill()
        client.watch(Span(prefix), 0, late)
        fragile.restart()
        written = Put(prefix, b"2")
        eventually(lambda: attempt(lambda: write_once(client, written, client.get(prefix).one)), "a write")
        assert values(first, 2) == [b"1", b"2"]
        assert values(late, 1) == [b"2"]


# -- a server that fails --------------------------------------------------------------------------------------------


def test_nothing_is_missed_while_the_server_is_killed(fragile: EtcdServer) -> None:
    seen = Seen()
    with fragile.get_client() as client, Writer(fragile.get_endpoint(), "/key") as writer:
        client.watch(Span("/key"), 1, seen)
        for _ in range(5):
            writer.more()
            fragile.kill()
            fragile.restart()
        writer.more()
        written = writer.finish()
        assert values(seen, len(written)) == written


def test_a_member_that_hangs_is_noticed_with_nothing_else_going_on(cluster: EtcdCluster) -> None:
    """The events of other members arrive while it still hangs; the time that takes is that of the real settings."""
    seen = Seen()
    healthy = f"{cluster.members[1].get_endpoint()},{cluster.members[2].get_endpoint()}"
    with (
        EtcdClient(config.EtcdConfig.load(cluster.endpoints, env={})) as client,
        EtcdClient(config.EtcdConfig.load(healthy, env={})) as other,
    ):
        watch_from_now(client, Span("/key"), seen)
        other.put("/key", b"before")
        before = other.get("/key").one
        seen.events(1)
        cluster.pause(0)
        put = Put("/key", b"while it hangs")
        written = eventually(lambda: attempt(lambda: write_once(other, put, before)), what="a write")
        assert written.done
        seen.events(2, timeout=30)
        assert cluster.members[0].is_paused()
        cluster.resume(0)
        other.put("/key", b"after")
        assert values(seen, 3) == [b"before", b"while it hangs", b"after"]


def attempt(write: Callable[[], Any]) -> Any:
    try:
        return write()
    except (errors.EtcdUnavailable, errors.OutcomeUnknown):
        return None


# -- etcd's grpc-proxy -------------------------------------------------------------------------------------------------


@pytest.fixture
def behind_proxy(etcd: EtcdServer, tmp_path: Path) -> Iterator[EtcdClient]:
    """A client behind etcd's own grpc-proxy."""
    endpoint = f"127.0.0.1:{own_port()}"
    command = [find_etcd(), "grpc-proxy", "start", f"--endpoints={etcd.get_endpoint()}", f"--listen-addr={endpoint}"]
    with (tmp_path / "proxy.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as proxy:
        try:
            with EtcdClient(config.EtcdConfig.load(endpoint, request_timeout=DEADLINE, env={})) as client:
                client.status()
                yield client
        finally:
            proxy.kill()


def test_watches_behind_etcds_proxy(behind_proxy: EtcdClient, prefix: str) -> None:
    """It gives the watches of a stream numbers of its own."""
    watched = [(f"{prefix}/{name}", Seen()) for name in "abc"]
    for key, seen in watched:
        behind_proxy.watch(Span(key), 0, seen)
        assert isinstance(seen.next(), Began)
    for key, _ in reversed(watched):
        behind_proxy.put(key, b"")
    for key, seen in watched:
        assert [event.kv.key for event in seen.events(1)] == [key]


def test_leases_are_renewed_behind_etcds_proxy(behind_proxy: EtcdClient) -> None:
    """It cancels a stream that is half-closed before the answer."""
    lease = behind_proxy.grant(60)
    for _ in range(3):
        assert behind_proxy.renew(lease.id, timeout=10) == 60  # sooner than the proxy would by itself
    behind_proxy.revoke(lease.id)
    with pytest.raises(errors.LeaseLost):
        behind_proxy.renew(lease.id)
