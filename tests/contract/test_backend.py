"""What torch asks of a RendezvousBackend, as its own tests of the backends state it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import eventually
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ConfigError
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.client import EtcdClient
from ftcoord.rendezvous.backend import EtcdRendezvousBackend, create_backend


@pytest.fixture
def backend(client: Etcd, prefix: str) -> EtcdRendezvousBackend:
    return EtcdRendezvousBackend(client, f"{prefix}/state", ttl=60)


def test_there_is_no_state_at_first(backend: EtcdRendezvousBackend) -> None:
    assert backend.name == "etcd-v3-dynamic"
    assert backend.get_state() is None


@pytest.mark.parametrize("state", [b"x", b"", bytes(range(256)) * 1000], ids=["short", "empty", "binary"])
def test_a_state_is_created_and_read(backend: EtcdRendezvousBackend, state: bytes) -> None:
    written = backend.set_state(state)
    assert written is not None
    assert (written[0], written[2]) == (state, True)
    assert backend.get_state() == written[:2]


def test_the_current_token_replaces_the_state(backend: EtcdRendezvousBackend) -> None:
    tokens = [backend.set_state(b"1")[1]]  # type: ignore[index]
    for state in (b"2", b"3"):
        written = backend.set_state(state, tokens[-1])
        assert written is not None
        assert written[2]
        tokens.append(written[1])
    assert backend.get_state() == (b"3", tokens[-1])
    assert len(set(tokens)) == 3


@pytest.mark.parametrize(
    "token", ["stale", None, "text", 10**9, object()], ids=["stale", "none", "text", "future", "?"]
)
def test_any_other_token_leaves_it(backend: EtcdRendezvousBackend, token: Any) -> None:
    first = backend.set_state(b"1")
    assert first is not None
    second = backend.set_state(b"2", first[1])
    assert second is not None
    assert backend.set_state(b"3", first[1] if token == "stale" else token) == (*second[:2], False)
    assert backend.get_state() == second[:2]


@pytest.mark.parametrize("token", [7, "text"])
def test_a_token_without_a_state(backend: EtcdRendezvousBackend, token: Any) -> None:
    assert backend.set_state(b"1", token) is None
    assert backend.get_state() is None


def test_a_state_whose_lease_was_revoked_can_be_written_again(
    backend: EtcdRendezvousBackend, client: EtcdClient
) -> None:
    backend.set_state(b"1")
    client.revoke(backend._lease)
    assert backend.get_state() is None
    written = backend.set_state(b"2")
    assert written is not None
    assert written[2]


def test_a_state_expires(client: EtcdClient, prefix: str) -> None:
    backend = EtcdRendezvousBackend(client, f"{prefix}/state", ttl=2)
    backend.set_state(b"1")
    eventually(lambda: backend.get_state() is None, what="the state expires")


def test_no_etcd(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        backend = EtcdRendezvousBackend(client, "/state")
        backend.set_state(b"1")
        fragile.kill()
        for call in (backend.get_state, lambda: backend.set_state(b"2")):
            with pytest.raises(RendezvousConnectionError, match="etcd"):
                call()


def test_made_from_torchruns_parameters(etcd: EtcdServer, client: EtcdClient) -> None:
    params = RendezvousParameters(
        "etcd-v3-dynamic", etcd.get_endpoint(), "a/b", 1, 2, keep_alive_interval="1", cas_backoff_max_seconds="0"
    )
    (one, store), (other, other_store) = create_backend(params), create_backend(params)
    written = one.set_state(b"state")
    assert written is not None
    assert other.get_state() == written[:2]
    PrefixStore("round", store).set("key", "value")
    assert PrefixStore("round", other_store).get("key") == b"value"
    assert client.get("/ftcoord/v2/a%2Fb/dynamic/state").one is not None
    for each in (store, other_store):
        each.close()


def test_bad_settings_are_refused_before_any_socket_is_opened() -> None:
    with pytest.raises(ConfigError, match="lease_tll"):
        create_backend(RendezvousParameters("etcd-v3-dynamic", "127.0.0.1:1", "run", 1, 2, lease_tll="3"))
