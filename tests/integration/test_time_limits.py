"""Calls end in the time that they were given while a real etcd hangs, though each of their requests may take an hour.

Which request it is that etcd does not answer is tried in tests/sim/test_time_limits_in_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError

import ftcoord
from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.client import EtcdClient
from ftcoord.recipes import member

HOUR = 3600.0
TIMEOUT = 0.5


@pytest.fixture
def patient(fragile: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdClient]:
    """A client that waits for an hour where nothing else is said. Its etcd is stopped in the middle of a test."""
    monkeypatch.setattr(member, "REQUEST_TIMEOUT", HOUR)
    config = replace(EtcdConfig.of(fragile.get_endpoint()), request_timeout=HOUR)
    with EtcdClient(config) as client:
        client.get("/is-there")
        yield client


def wait_at_a_barrier(client: EtcdClient) -> None:
    ftcoord.Barrier("run", "b", 2, etcd=client).wait(TIMEOUT)


def campaign(client: EtcdClient) -> None:
    ftcoord.Election("run", "e", etcd=client).campaign(TIMEOUT)


def write_to_a_store(client: EtcdClient) -> None:
    ftcoord.EtcdStore(client, "/store/", timedelta(seconds=TIMEOUT)).set("key", "value")


@pytest.mark.parametrize(
    ("call", "error"),
    [(wait_at_a_barrier, EtcdUnavailable), (campaign, EtcdUnavailable), (write_to_a_store, DistNetworkError)],
)
def test_a_first_call_ends_while_etcd_is_stopped(
    fragile: EtcdServer, patient: EtcdClient, call: Callable[[EtcdClient], None], error: type[Exception]
) -> None:
    fragile.pause()
    try:
        with pytest.raises(error):
            call(patient)
    finally:
        fragile.resume()


def test_a_party_that_arrived_stops_waiting_while_etcd_is_stopped(fragile: EtcdServer, patient: EtcdClient) -> None:
    """It is a member by then, and leaves."""
    with ftcoord.Barrier("run", "b", 2, etcd=patient) as barrier:
        barrier.participant.prepare()
        fragile.pause()
        try:
            with pytest.raises((EtcdUnavailable, OutcomeUnknown)):
                barrier.wait(TIMEOUT)
        finally:
            fragile.resume()
