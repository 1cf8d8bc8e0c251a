"""The cluster that the scenarios run on: local processes, or containers where a Docker engine answers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, LocalCluster
from containers import REMOVE, ContainerCluster, compose_command, engine_problem, free_ports
from helpers import DEADLINE

ROOT = Path(__file__).parents[2]
IMAGE = "ftcoord-etcd"
LOCAL, CONTAINERS = "local", "containers"
FORMS = [one for one in os.environ.get("FTCOORD_TEST_FORMS", "").split(",") if one]
"""The forms that every scenario runs in, whatever it is marked with; none for each in its own."""
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def docker_compose_command() -> str:
    """Compose, v1 or v2; skips where there are no containers. FTCOORD_TEST_DOCKER=1 makes that a failure."""
    problem = engine_problem()
    if problem and os.environ.get("FTCOORD_TEST_DOCKER"):
        pytest.fail(problem)
    if problem:
        pytest.skip(f"{problem}; `make test-cluster` starts one of its own")
    command = compose_command()
    assert command is not None
    return command


@pytest.fixture(scope="session")
def docker_compose_file() -> str:
    return str(ROOT / "docker-compose.yml")


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return [REMOVE]


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    return ["up -d"]


@pytest.fixture(scope="session")
def image(docker_compose_command: str) -> Iterator[None]:
    """That of the members: one of the local etcd, unless FTCOORD_ETCD_IMAGE names another."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("FTCOORD_ETCD_IMAGE"):
            subprocess.run([sys.executable, ROOT / "docker" / "image.py", IMAGE], check=True, timeout=DEADLINE)
            patch.setenv("FTCOORD_ETCD_IMAGE", IMAGE)
        yield


@pytest.fixture(scope="session")
def ports(image: None) -> Iterator[list[int]]:
    """The members' ports: free ones, so that the tests get along with a cluster that is up."""
    free = free_ports()
    with pytest.MonkeyPatch.context() as patch:
        for number, port in enumerate(free, 1):
            patch.setenv(f"FTCOORD_ETCD_PORT_{number}", str(port))
        yield free


@pytest.fixture(scope="session")
def container_cluster(ports: list[int], docker_services: Any, docker_compose_project_name: str) -> ContainerCluster:
    return ContainerCluster(docker_compose_project_name, ports, docker_services._docker_compose.execute)


@pytest.fixture(scope="session")
def local_cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster()
    yield cluster
    cluster.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A scenario runs in one form: on local processes, unless `forms` marks it. Its claim is the same in both."""
    if "cluster" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("forms")
        marks = {LOCAL: (), CONTAINERS: pytest.mark.docker}
        forms = FORMS or (mark.args if mark else (LOCAL,))
        metafunc.parametrize("cluster", [pytest.param(one, marks=marks[one]) for one in forms], indirect=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three members to do harm to; whole again afterwards."""
    fixtures = {LOCAL: "local_cluster", CONTAINERS: "container_cluster"}
    cluster: Cluster = request.getfixturevalue(fixtures[request.param])
    yield cluster
    cluster.restore()


@pytest.fixture
def prefix() -> str:
    """The start of the keys of this test alone."""
    return f"/ftcoord/v2/scenario-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`figures(kills=5, evictions=0)`: for the table at the end of the run."""

    def note(**counted: float | int) -> None:
        text = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in counted.items())
        scenario, _, form = request.node.name.removeprefix("test_").replace("_", " ").partition("[")
        request.node.user_properties.append(("figures", " | ".join((scenario, form.rstrip("]"), text))))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        one for kind in terminalreporter.stats.values() for one in kind if getattr(one, "when", "") == "teardown"
    ]
    rows = [row for report in reports for name, row in report.user_properties if name == "figures"]
    if rows:
        terminalreporter.section("what was counted while etcd failed")
        for row in rows:
            terminalreporter.line(f"| {row} |")
