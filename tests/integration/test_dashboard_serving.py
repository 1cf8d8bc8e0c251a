"""The page's own process, asked over HTTP."""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

from helpers import DEADLINE
from pages import page, write_run

from ftcoord.core.layout import KEY_PREFIX, death_key, member_id, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

TOKEN = "a-token-of-this-test"


def test_nobody_says_by_a_header_from_where_an_order_comes(etcd: EtcdServer, client: EtcdClient) -> None:
    leases = write_run(client, "forged", ["host0", "host1"])
    with page(etcd.get_endpoint(), env={**os.environ, "FTCOORD_DASHBOARD_TOKEN": TOKEN}) as address:
        order = {"what": "evict", "job": "forged", "name": "host1", "who": "ann"}
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "192.0.2.66"}
        with urlopen(Request(f"{address}/api/act", json.dumps(order).encode(), headers), timeout=DEADLINE) as answer:
            assert answer.status == 200
    death = client.get(death_key(run_prefix(KEY_PREFIX, "forged"), member_id(leases[1]))).one
    assert death is not None
    assert json.loads(death.value)["cause"].endswith(", from 127.0.0.1")
