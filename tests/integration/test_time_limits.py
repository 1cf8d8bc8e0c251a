"""Calls end in the time that they were given while a real etcd hangs, though each of their requests may take an hour.

Which request it is that etcd does not answer is tried in tests/sim/test_time_limits_in_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError

import ftcoord
from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

HOUR = 3600.0
TIMEOUT = 0.5


@pytest.fixture
def patient(fragile: EtcdServer) -> Iterator[EtcdClient]:
    """A client that waits for an hour where nothing else is said. Its etcd is stopped in the middle of a test."""
    config = replace(EtcdConfig.of(fragile.get_endpoint()), request_timeout=HOUR)
    with EtcdClient(config) as client:
        client.get("/is-there")
        yield client


def write_to_a_store(client: EtcdClient) -> None:
    ftcoord.EtcdStore(client, "/store/", timedelta(seconds=TIMEOUT)).set("key", "value")


def test_a_first_call_ends_while_etcd_is_stopped(fragile: EtcdServer, patient: EtcdClient) -> None:
    fragile.pause()
    try:
        with pytest.raises(DistNetworkError):
            write_to_a_store(patient)
    finally:
        fragile.resume()
