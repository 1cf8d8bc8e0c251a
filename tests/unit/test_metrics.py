"""Numbers for Prometheus: how they are counted, and how they are told."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

import pytest
import warm
from monitored import DOCS
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from reports import made

from ftcoord import __version__, cli
from ftcoord.commands import demo_server_dashboard_gateway_metrics as serving
from ftcoord.commands.shared import Flag, resolve
from ftcoord.errors import ConfigError, ServerError
from ftcoord.metrics import process
from ftcoord.metrics.exporter import MetricsAddress, port_number, serve_process
from ftcoord.metrics.process import collect_process
from ftcoord.operator import reading as runs
from ftcoord.operator.report import JobStatus, NextDecision, NodeStatus, QuorumStatus, ReplicaStatus, RoundsStatus


@pytest.fixture
def counting() -> Iterator[None]:
    """From the beginning, and of nobody else's concern."""
    process.end_counting()
    process.begin_counting()
    yield
    process.end_counting()


def counted() -> dict[str, float]:
    """The metrics of this process that are not 0."""
    return {name: value for name, value in told(*collect_process()).items() if value}


def test_nothing_is_counted_before_it_is_served() -> None:
    process.end_counting()
    process.ROUNDS.add("a")
    process.begin_counting()
    assert not any("ftcoord_agent_rounds_total" in name for name in told(*collect_process()))
    process.end_counting()


@pytest.mark.usefixtures("counting")
def test_each_kind_of_metric_is_told_as_it_was_counted() -> None:
    process.ROUNDS.add("a")
    process.ROUNDS.add("a")
    process.ROUND.set(7, "a")
    process.VOTES.add("commit")
    process.LEASES_LOST.add()
    process.JOIN_SECONDS.observe(0.0011, "a")
    found = counted()
    assert found.pop('ftcoord_agent_join_seconds_bucket{le="0.0025",run="a"}') == 1
    assert found.pop('ftcoord_agent_join_seconds_bucket{le="+Inf",run="a"}') == 1
    assert {name: value for name, value in found.items() if "_bucket" not in name} == {
        f'ftcoord_info{{version="{__version__}"}}': 1,
        'ftcoord_agent_rounds_total{run="a"}': 2,
        'ftcoord_agent_round{run="a"}': 7,
        'ftcoord_votes_total{outcome="commit"}': 1,
        "ftcoord_leases_lost_total": 1,
        'ftcoord_agent_join_seconds_count{run="a"}': 1,
        'ftcoord_agent_join_seconds_sum{run="a"}': 0.0011,
    }


@pytest.mark.usefixtures("counting")
def test_what_may_happen_begins_at_0() -> None:
    """Prometheus takes a first value of 1 for no increase."""
    process.RECALLS.begin("a")
    found = told(*collect_process())
    assert (found['ftcoord_agent_recalls_total{run="a"}'], found["ftcoord_leases_lost_total"]) == (0, 0)
    process.RECALLS.add("a")
    process.RECALLS.begin("a")
    assert counted()['ftcoord_agent_recalls_total{run="a"}'] == 1


@pytest.mark.usefixtures("counting")
def test_a_gauge_forgets_what_is_gone() -> None:
    process.GATEWAY_REPLICAS.set(2, "a")
    process.GATEWAY_REPLICAS.set(1, "b")
    process.GATEWAY_REPLICAS.drop("a")
    process.GATEWAY_REPLICAS.drop("never")
    assert [name for name in counted() if "gateway" in name] == ['ftcoord_gateway_replicas{run="b"}']


@pytest.mark.usefixtures("counting")
def test_a_forked_child_begins_with_nothing() -> None:
    """Also if another thread was counting at that moment."""
    process.LEASES_LOST.add()
    with process.LEASES_LOST.made._value._lock, process._registry._lock:
        pid = os.fork()
        if not pid:
            process.LEASES_LOST.add()
            os._exit("ftcoord_leases_lost_total" in counted())
    assert os.waitpid(pid, 0)[1] == 0
    assert counted()["ftcoord_leases_lost_total"] == 1


def test_prometheus_is_loaded_by_nobody_who_did_not_ask() -> None:
    code = (
        "import sys, ftcoord.cli, ftcoord.rendezvous.handler, ftcoord.coordination\n"
        "sys.exit('prometheus_client' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("FTCOORD_METRICS")}
    done = warm.run("-c", code, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"FTCOORD_METRICS_PORT": "70000"}, "FTCOORD_METRICS_PORT"),
        ({"FTCOORD_METRICS_PORT": "http"}, "FTCOORD_METRICS_PORT"),
        ({"FTCOORD_METRICS_PORT": "0", "FTCOORD_METRICS_HOST": "a b"}, "FTCOORD_METRICS_HOST"),
        ({"FTCOORD_METRICS_PORT": "0", "FTCOORD_METRICS_CERT": "/c"}, "FTCOORD_METRICS_KEY"),
        ({"FTCOORD_METRICS_PORT": "0", "FTCOORD_METRICS_KEY": "/k"}, "FTCOORD_METRICS_CERT"),
        ({"FTCOORD_METRICS_PORT": "0", "FTCOORD_METRICS_CERT": "/nc", "FTCOORD_METRICS_KEY": "/nk"}, "readable"),
    ],
)
def test_a_wrong_address_is_one_warning(caplog: pytest.LogCaptureFixture, env: dict[str, str], named: str) -> None:
    """It stops no agent: metrics are no part of its work."""
    assert MetricsAddress.of_environment(env) is None
    (line,) = caplog.messages
    assert named in line
    assert "goes on without" in line


SERVICE_LINK = "tcp://10.96.7.5:9464"


def test_a_port_that_kubernetes_set_for_a_service_is_ignored_by_agents(caplog: pytest.LogCaptureFixture) -> None:
    assert MetricsAddress.of_environment({"FTCOORD_METRICS_PORT": SERVICE_LINK}) is None
    (line,) = caplog.messages
    assert f"FTCOORD_METRICS_PORT={SERVICE_LINK} is ignored: Kubernetes set it" in line


def test_ports_that_kubernetes_set_for_services_are_ignored_by_commands() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    serving.add_commands(commands)
    for parser in commands.choices.values():
        flags = [flag for flag in parser.get_default("flags") or () if flag.variable.endswith("_PORT")]
        options = argparse.Namespace(flags=flags, **{flag.dest: None for flag in flags})
        resolve(options, {flag.variable: SERVICE_LINK for flag in flags})
        assert [getattr(options, flag.dest) for flag in flags] == [flag.default for flag in flags]


def test_a_wrong_port_is_refused_by_commands() -> None:
    (flag,) = flags = (Flag("--metrics-port", "FTCOORD_METRICS_PORT", "", port_number),)
    with pytest.raises(ConfigError, match="FTCOORD_METRICS_PORT"):
        resolve(argparse.Namespace(flags=flags, **{flag.dest: None}), {flag.variable: "http"})


def test_nobody_who_gives_no_port_is_served() -> None:
    assert MetricsAddress.of_environment({"FTCOORD_METRICS_HOST": "0.0.0.0", "FTCOORD_METRICS_PORT": " "}) is None
    assert MetricsAddress.of_environment({"FTCOORD_METRICS_PORT": "9"}) == MetricsAddress("127.0.0.1", 9)


@pytest.mark.usefixtures("serves_no_metrics")
@pytest.mark.parametrize(("host", "words"), [("0.0.0.0", 1), ("::", 1), ("127.0.0.1", 0), ("localhost", 0)])
def test_who_can_read_the_metrics_of_a_process_is_logged(
    host: str, words: int, caplog: pytest.LogCaptureFixture
) -> None:
    serve_process(MetricsAddress(host, 0))
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [f"whoever reaches {host} can read the metrics" in one for one in warned] == [True] * words


@pytest.mark.parametrize("command", ["metrics", "gateway", "server"])
def test_a_command_prints_what_whoever_reaches_its_address_can_do(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise ServerError("of the test: nothing is served")

    for name in (f"{serving.__name__}.MetricsServer", "ftcoord.coordination.Gateway"):
        monkeypatch.setattr(name, full)
    monkeypatch.setattr("ftcoord.embedded.server.EtcdServer", full)
    flags = {
        "metrics": ["--metrics-host", "0.0.0.0"],
        "gateway": ["--etcd", "etcd://127.0.0.1:1/job", "--listen", "0.0.0.0:0"],
        "server": ["--host", "0.0.0.0"],
    }
    assert cli.main([command, *flags[command]]) == 1
    assert "whoever reaches 0.0.0.0 can" in capsys.readouterr().err


WAIT = made(NextDecision, "wait", "", "")
NODES = [
    made(NodeStatus, 0, "n0", "h0", "1", "running", "", 1),
    made(NodeStatus, None, "n1", "h1", "2", "spare", "", 2),
    made(NodeStatus, None, "n2", "h2", "3", "waiting", "", 3),
]
REPLICAS = [
    made(ReplicaStatus, 0, "r0", "1", "training", 9, 0, 0, False, 1, "", 1),
    made(ReplicaStatus, 1, "r1", "2", "training", 7, 2, 0, False, 1, "", 2),
]
ROUNDS = made(RoundsStatus, "running", True, 7, 1, True, 1, 2, "h0", 1, "", "", "", "", WAIT, NODES, [])
QUORUM = made(QuorumStatus, "training", True, 5, 4, 2, 9, 1e9, 1, WAIT, REPLICAS, [])


class Fixed:
    """A collector of what is given."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def told(*metrics: Metric) -> dict[str, float]:
    """What Prometheus reads, by name and labels."""
    registry = CollectorRegistry()
    registry.register(Fixed(*metrics))
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_the_numbers_of_a_run_are_those_of_its_status() -> None:
    status = made(JobStatus, 1, 'a "b"\n', 3, True, True, ROUNDS, QUORUM, [])
    gone = made(JobStatus, 1, "gone", 3, False, False, None, None, [])
    found = told(*runs.families_of([status, gone]))
    assert {name.partition("{")[0]: value for name, value in found.items()} == {
        "ftcoord_run_state": 1,
        "ftcoord_run_healthy": 1,
        "ftcoord_run_unreadable_keys": 0,
        "ftcoord_run_round": 7,
        "ftcoord_run_round_seats": 1,
        "ftcoord_run_round_ready": 1,
        "ftcoord_run_nodes": 3,
        "ftcoord_run_nodes_waiting": 2,
        "ftcoord_run_nodes_missing": 0,
        "ftcoord_run_quorum_id": 4,
        "ftcoord_run_quorum_replicas": 2,
        "ftcoord_run_quorum_timestamp_seconds": 1e9,
        "ftcoord_run_max_step": 9,
        "ftcoord_run_replicas": 2,
        "ftcoord_run_replicas_behind": 1,
        "ftcoord_run_replicas_missing": 0,
    }
    assert all('run="a \\"b\\"\\n"' in name for name in found)


def families() -> list[Metric]:
    """All that there are."""
    return [*collect_process(), *(runs._gauge(*what, {}) for what in runs.OF_ETCD), *runs.families_of([])]


def names_of(family: Metric) -> set[str]:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
    return {family.name + suffix for suffix in suffixes.get(family.type, ("",))}


def test_all_numbers_are_described_and_no_others() -> None:
    page = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^- `(ftcoord_\w+)", page, re.MULTILINE))
    known = {name for one in families() for name in ({one.name} if one.type == "histogram" else names_of(one))}
    assert described == known
