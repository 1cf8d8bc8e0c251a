"""One client a process for all users of the same etcd."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import Seen, eventually

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ClientClosed
from ftcoord.etcd.api import Began, Span
from ftcoord.etcd.client import EtcdClient, SharedClient


@pytest.fixture
def config(etcd: EtcdServer) -> EtcdConfig:
    """One that nobody else in this process has."""
    return EtcdConfig.load(etcd.get_endpoint(), request_timeout=7.25)


def test_holders_share_one_client(config: EtcdConfig, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EtcdConfig] = []
    real = EtcdClient.__init__

    def init(client: EtcdClient, config: EtcdConfig) -> None:
        made.append(config)
        real(client, config)

    monkeypatch.setattr(EtcdClient, "__init__", init)
    one, two, other = SharedClient(config), SharedClient(config), SharedClient(replace(config, request_timeout=7.5))
    assert len(made) == 2
    one.put(prefix, b"x")
    one.close()
    assert two.get(prefix).kvs[0].value == b"x"
    two.close()
    other.close()
    again = SharedClient(config)
    assert again.get(prefix).kvs[0].value == b"x"
    assert len(made) == 2, "the process keeps it until its end"
    again.close()


def test_who_has_closed_can_do_nothing_and_others_can(config: EtcdConfig, prefix: str) -> None:
    one, two = SharedClient(config), SharedClient(config)
    mine, theirs = Seen(), Seen()
    one.watch(Span(prefix), 0, mine)
    two.watch(Span(prefix), 0, theirs)
    eventually(lambda: isinstance(theirs.next(), Began), "the watch stands")
    one.close()
    one.close()
    assert isinstance(mine.error(), ClientClosed)
    with pytest.raises(ClientClosed):
        one.get(prefix)
    with pytest.raises(ClientClosed):
        one.watch(Span(prefix), 0, mine)
    with pytest.raises(ClientClosed):
        one.put(prefix, b"mine")
    two.put(prefix, b"theirs")
    assert [event.kv.value for event in theirs.events(1)] == [b"theirs"]
    two.close()
    assert isinstance(theirs.error(), ClientClosed)


def test_a_watch_that_was_cancelled_tells_nothing_at_the_end(config: EtcdConfig, prefix: str) -> None:
    one, two = SharedClient(config), SharedClient(config)
    seen = Seen()
    watch = one.watch(Span(prefix), 0, seen)
    assert isinstance(seen.next(), Began)
    watch.cancel()
    watch.cancel()
    one.close()
    two.close()
    assert seen.is_quiet()
