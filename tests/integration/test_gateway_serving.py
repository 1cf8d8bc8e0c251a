"""A gateway's page, and kills of torchft's own managers behind a gateway."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from helpers import DEADLINE, eventually
from natives import Natives

from ftcoord import EtcdServer, concurrency
from ftcoord.coordination import Gateway
from ftcoord.coordination.address import fresh_name, parse_address
from ftcoord.coordination.kills import order_kill
from ftcoord.core.layout import members_span
from ftcoord.etcd.api import Get
from ftcoord.etcd.client import EtcdClient

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14) or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="torchft 0.2.0 has wheels for Linux on x86_64 and Python up to 3.13 only; see setup.cfg",
)

TOKEN = "0123456789abcdef"


@pytest.fixture
def job(etcd: EtcdServer) -> str:
    """The address of a job of this test's own."""
    return f"etcd://{etcd.get_endpoint()}/{fresh_name()}?min_replicas=1"


def ends_with_1(mortal: Natives) -> bool:
    return bool(mortal._process.wait(DEADLINE) == 1)


def test_an_order_through_etcd_ends_a_native_manager(natives: Natives, etcd: EtcdServer, client: EtcdClient) -> None:
    """The one that was meant, behind the gateway that speaks for it."""
    job = f"etcd://{etcd.get_endpoint()}/{fresh_name()}?min_replicas=2"
    with Gateway(job) as gateway, Gateway(job) as other, Natives() as mortal:
        natives.manage(gateway.address(), "a")
        mortal.manage(other.address(), "b")
        both = [one.do("quorum", name=name) for one, name in ((natives, "a"), (mortal, "b"))]
        for one in both:
            one.result(DEADLINE)
        order_kill(client, parse_address(job).prefix, "b", "why", concurrency.now() + DEADLINE)
        assert ends_with_1(mortal)
        assert natives._process.poll() is None


def test_an_order_ends_a_native_manager_that_only_beats(etcd: EtcdServer, client: EtcdClient) -> None:
    """It hangs in its step while its gateway is started again, so it has asked no gateway that is there now."""
    job = f"etcd://{etcd.get_endpoint()}/{fresh_name()}?min_replicas=1"
    prefix = parse_address(job).prefix

    def members() -> set[str]:
        return {kv.key for kv in client.range(Get(members_span(prefix), keys_only=True)).kvs}

    with Natives() as hung:
        with Gateway(job) as first:
            hung.manage(first.address(), "a")
            hung.ask("a")
            before = members()
        with Gateway(job, first.address().removeprefix("http://")):
            eventually(lambda: members() - before, "it beats through the new one")
            order_kill(client, prefix, "a", "why", concurrency.now() + DEADLINE)
            assert ends_with_1(hung)


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
            page = re.fullmatch(r"the page is at (http://127\.0\.0\.1:\d+), and torchft's /status\n", found[2])
            assert page is not None, found
            yield found[1].strip().removeprefix("TORCHFT_LIGHTHOUSE="), page[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0


def ask(address: str, method: str = "GET", token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_torchfts_paths_are_where_its_users_look_for_them(job: str, token: str) -> None:
    allowed = [] if token else ["--allow-kill"]
    with gateway_with_a_page(job, *allowed, token=token) as (lighthouse, page), Natives() as mortal:
        assert "Current quorum_id: 0" in ask(f"{page}/status")[1]
        mortal.manage(lighthouse, "b")
        mortal.ask("b", step=7)

        def told() -> str:
            status = ask(f"{page}/status")[1]
            return status if "Current quorum_id: 1" in status else ""

        status = eventually(told, "the quorum is told")
        assert all(text in status for text in ("<b>b</b>", "Step: 7", "store-of-b"))
        assert ask(f"{page}/")[0] == 200  # it leads to the job's page
        code, said = ask(f"{page}/replica/nobody/kill", "POST", token)
        assert (code, "no live replica" in said) == (409, True)
        if token:
            assert ask(f"{page}/replica/b/kill", "POST")[0] == 401
        code, said = ask(f"{page}/replica/b/kill", "POST", token)
        assert (code, said.startswith("killed the manager of 'b'")) == (200, True)
        assert ends_with_1(mortal)


def test_a_page_kills_for_nobody_unless_it_was_told_to(job: str) -> None:
    with gateway_with_a_page(job) as (_lighthouse, page):
        assert ask(f"{page}/replica/b/kill", "POST")[0] == 403
