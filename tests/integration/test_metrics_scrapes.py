"""Metrics of real agents, managers and gateways, and of all runs on an etcd, as Prometheus scrapes them."""

from __future__ import annotations

import logging
import platform
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually, own_port
from jobs import Job
from monitored import dashboard, named_in, rules
from natives import Natives
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from rdzv_nodes import MakeNodes

from ftcoord.config import EtcdConfig
from ftcoord.coordination import ManagerClient, ManagerServer
from ftcoord.core.layout import KEY_PREFIX, decided_key, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdError, ServerError
from ftcoord.etcd.client import EtcdClient
from ftcoord.metrics.exporter import MetricsAddress, MetricsServer, serve_process
from ftcoord.metrics.process import collect_process
from ftcoord.operator import reading as runs
from ftcoord.operator.reading import RunsCollector

LONG = timedelta(seconds=DEADLINE)
ANY_PORT = MetricsAddress("127.0.0.1", 0)


def scrape(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples by name, and by the values of their labels in the order of these."""
    with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def collector_of(endpoint: str, request_timeout: float = DEADLINE) -> RunsCollector:
    return RunsCollector(EtcdConfig.load(endpoint, env={}, request_timeout=request_timeout), KEY_PREFIX)


@pytest.fixture
def url(serves_no_metrics: None) -> str:
    """Where this process serves its own."""
    found = serve_process(ANY_PORT)
    assert found is not None
    return found


def test_a_run_exports_all_that_the_dashboard_and_the_alerts_ask_for(
    etcd: EtcdServer, make_nodes: MakeNodes, url: str
) -> None:
    (node,) = make_nodes(1, 1, run_id="measured", timers=1).add(1)
    node.join().result(DEADLINE)
    with ExitStack() as stack:
        job = f"etcd://{etcd.get_endpoint()}/measured"
        manager = ManagerServer("r0", job, "127.0.0.1", "127.0.0.1:0", "s:1", 1, timedelta(seconds=1), LONG, 0)
        stack.callback(manager.shutdown)
        rank = ManagerClient(manager.address(), LONG)
        rank._quorum(0, 5, "", False, True, 0, LONG)
        assert not rank.should_commit(0, 5, False, LONG)
        dead = stack.enter_context(EtcdClient(EtcdConfig.load("127.0.0.1:1", env={}, request_timeout=0.1)))
        with pytest.raises(EtcdError):
            dead.status()
        server = stack.enter_context(MetricsServer(ANY_PORT, collector_of(etcd.get_endpoint()).collect))
        eventually(lambda: "ftcoord_timers_active" in scrape(url), "the timer server has had a turn")
        found = {**scrape(url), **scrape(server.url)}
    assert not (named_in(dashboard()) | named_in(rules())) - found.keys()
    run = ("measured",)
    assert found["ftcoord_agent_round"][run] == found["ftcoord_run_round"][run] == 1
    assert found["ftcoord_agent_rounds_total"][run] == found["ftcoord_agent_join_seconds_count"][run] == 1
    assert found["ftcoord_run_nodes"][run] == found["ftcoord_run_round_seats"][run] == 1
    assert found["ftcoord_run_healthy"][run] == found["ftcoord_etcd_up"][()] == 1
    assert found["ftcoord_replica_step"][run] == found["ftcoord_run_max_step"][run] == 5
    assert found["ftcoord_quorum_id"][run] == found["ftcoord_run_quorum_id"][run]
    assert found["ftcoord_votes_total"]["abort",] >= 1
    assert found["ftcoord_run_state"]["training", "running", "measured"] == 1
    assert 0 < found["ftcoord_lease_remaining_seconds"][()] <= 10
    assert found["ftcoord_leases"][()] >= 2
    assert found["ftcoord_etcd_request_failures_total"]["EtcdUnavailable", "Status"] >= 1


def test_agents_on_one_host_that_are_given_the_same_port(etcd: EtcdServer, tmp_path: Path) -> None:
    """The first tells its numbers there, the second says once that it does not; both train."""
    port = own_port()
    env = {"FTCOORD_METRICS_PORT": str(port), "LOGLEVEL": "INFO"}
    with Job(tmp_path, etcd.get_endpoint(), "2", "idle.py", env=env) as job:
        job.start("ab")
        job.round_of("ab", kind="started")
        said = eventually(lambda: re.findall(r"metrics of this process are at (\S+)", job.terminals()), job.story)
        assert said == [f"http://127.0.0.1:{port}/metrics"]
        found = scrape(said[0])
        assert found["ftcoord_agent_round"][tmp_path.name,] == 1
        assert found["ftcoord_agent_round_seats"][tmp_path.name,] == 2
        assert found["ftcoord_etcd_request_seconds_count"]["Txn",] >= 1
        assert job.terminals().count("serves no metrics, and goes on without") == 1
        job.finish("ab")


@pytest.mark.skipif(
    sys.version_info >= (3, 14) or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="torchft 0.2.0 has wheels for Linux on x86_64 and Python up to 3.13 only; see setup.cfg",
)
def test_a_gateway_tells_how_many_replicas_it_speaks_for(natives: Natives, etcd: EtcdServer) -> None:
    job = f"etcd://{etcd.get_endpoint()}/measured-gateway?min_replicas=2"
    command = [sys.executable, "-m", "ftcoord.cli", "gateway", "--etcd", job, "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--metrics-port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(3)]
            address = said[1].strip().partition("=")[2]
            url = said[2].strip().removeprefix("metrics are at ")
            natives.manage(address, "r0", "r1")
            natives.ask("r0", "r1")
            found = scrape(url)
            assert found["ftcoord_gateway_replicas"]["measured-gateway",] == 2
            assert found["ftcoord_quorums_total"]["measured-gateway",] == 2
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0


def test_the_command_serves_until_it_is_told_to_end(etcd: EtcdServer, make_nodes: MakeNodes) -> None:
    (node,) = make_nodes(1, 1, run_id="by command").add(1)
    node.join().result(DEADLINE)
    command = [sys.executable, "-m", "ftcoord.cli", "metrics", "--endpoints", etcd.get_endpoint()]
    with subprocess.Popen([*command, "--metrics-port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"are at (\S+);", process.stdout.readline())
            assert url is not None
            assert scrape(url[1])["ftcoord_run_round"]["by command",] == 1
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0


def test_an_etcd_that_is_away_is_told_and_nothing_else(fragile: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers of before would look as if all were well."""
    with MetricsServer(ANY_PORT, collector_of(fragile.get_endpoint(), request_timeout=1).collect) as server:
        # On a busy machine it may take longer than a request at first, here and in the end: that is another problem.
        eventually(lambda: scrape(server.url)["ftcoord_etcd_up"] == {(): 1}, "etcd is there")
        caplog.clear()
        fragile.kill()
        for _ in range(2):
            assert scrape(server.url) == {"ftcoord_etcd_up": {(): 0}}
        (warned,) = (one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING)
        assert "cannot read etcd, so only ftcoord_etcd_up is exported" in warned
        fragile.restart()
        eventually(lambda: scrape(server.url)["ftcoord_etcd_up"] == {(): 1}, "etcd is back")


def test_jobs_beyond_the_first_are_counted(
    etcd: EtcdServer, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_RUNS", 2)
    for job in ("b1", "b2", "b3"):
        client.put(decided_key(run_prefix("/past", job)), b"{}")
    config = EtcdConfig.load(etcd.get_endpoint(), env={})
    found = {one.name: one.samples for one in RunsCollector(config, "/past").collect()}
    assert {sample.labels["run"] for sample in found["ftcoord_run_healthy"]} == {"b1", "b2"}
    assert found["ftcoord_runs"][0].value == 3
    assert found["ftcoord_runs_not_exported"][0].value == 1


def test_a_scrape_that_fails_hurts_nobody(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    broken = threading.Event()

    def collect() -> Iterator[Metric]:
        if broken.is_set():
            raise RuntimeError("of the test")
        yield GaugeMetricFamily("a", "", value=1)

    with MetricsServer(ANY_PORT, collect) as server:
        broken.set()
        with pytest.raises(urllib.error.HTTPError):
            scrape(server.url)
        broken.clear()
        assert scrape(server.url) == {"a": {(): 1}}
    assert scrape(url)["ftcoord_info"]


@pytest.mark.usefixtures("serves_no_metrics")
def test_a_taken_port_is_an_error_of_a_server_and_one_line_of_a_process(caplog: pytest.LogCaptureFixture) -> None:
    with MetricsServer(ANY_PORT, collect_process) as server:
        taken = MetricsAddress("127.0.0.1", int(server.url.rpartition(":")[2].partition("/")[0]))
        with pytest.raises(ServerError, match="choose another address"):
            MetricsServer(taken, collect_process)
        assert serve_process(taken) is None
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "this process serves no metrics, and goes on without"
    ]


def test_prometheus_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ServerError, match="pip install prometheus_client"):
        MetricsServer(ANY_PORT, collect_process)
