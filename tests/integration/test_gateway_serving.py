"""A gateway's page, and kills of torchft's own managers behind a gateway."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator

import pytest
from helpers import DEADLINE
from natives import Natives

from ftcoord import EtcdServer, concurrency
from ftcoord.coordination import Gateway
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.replica import order_kill
from ftcoord.etcd.client import EtcdClient

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14) or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="torchft 0.2.0 has wheels for Linux on x86_64 and Python up to 3.13 only; see setup.cfg",
)

TOKEN = "0123456789abcdef"


@pytest.fixture
def job(etcd: EtcdServer) -> str:
    """The address of a job of this test's own."""
    return f"etcd://{etcd.get_endpoint()}/{uuid.uuid4().hex}?min_replicas=1"


def ends_with_1(mortal: Natives) -> bool:
    return bool(mortal._process.wait(DEADLINE) == 1)


def test_an_order_through_etcd_ends_a_native_manager(natives: Natives, etcd: EtcdServer, client: EtcdClient) -> None:
    """The one that was meant, behind the gateway that speaks for it."""
    job = f"etcd://{etcd.get_endpoint()}/{uuid.uuid4().hex}?min_replicas=2"
    with Gateway(job) as gateway, Gateway(job) as other, Natives() as mortal:
        natives.manage(gateway.address(), "a")
        mortal.manage(other.address(), "b")
        both = [one.do("quorum", name=name) for one, name in ((natives, "a"), (mortal, "b"))]
        for one in both:
            one.result(DEADLINE)
        order_kill(client, parse_address(job).prefix, "b", "why", concurrency.now() + DEADLINE)
        assert ends_with_1(mortal)
        assert natives._process.poll() is None


@contextlib.contextmanager
def gateway_with_a_page(job: str, *arguments: str, token: str = "") -> Iterator[tuple[str, str]]:
    """The addresses of `ftcoord gateway` and of its page."""
    command = [sys.executable, "-m", "ftcoord.cli", "gateway", "--etcd", job, "--listen", "127.0.0.1:0"]
    env = {**os.environ, "FTCOORD_DASHBOARD_TOKEN": token}
    with subprocess.Popen(
        [*command, "--page-port", "0", *arguments], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            assert process.stdout is not None
            found = [process.stdout.readline() for _ in range(3)]
            page = re.fullmatch(r"the page is at (http://127\.0\.0\.1:\d+)\n", found[2])
            assert page is not None, found
            yield found[1].strip().removeprefix("TORCHFT_LIGHTHOUSE="), page[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0


def kill(page: str, job: str, name: str, token: str = "") -> tuple[int, str]:
    """What the page answers to an order."""
    order = {"what": "kill", "job": parse_address(job).name, "name": name, "who": "ann"}
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{page}/api/act", json.dumps(order).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_gateways_page_kills_with_its_token(job: str) -> None:
    with gateway_with_a_page(job, token=TOKEN) as (lighthouse, page), Natives() as mortal:
        mortal.manage(lighthouse, "b")
        mortal.ask("b")
        with urllib.request.urlopen(f"{page}/", timeout=DEADLINE) as shown:  # it leads to the job's page
            assert shown.status == 200
        assert kill(page, job, "nobody", TOKEN)[0] == 409
        assert kill(page, job, "b")[0] == 401
        code, said = kill(page, job, "b", TOKEN)
        assert (code, "killed the manager of 'b'" in said) == (200, True)
        assert ends_with_1(mortal)


def test_a_gateways_page_without_a_token_is_read_only(job: str) -> None:
    with gateway_with_a_page(job) as (_lighthouse, page):
        assert kill(page, job, "b")[0] == 403
