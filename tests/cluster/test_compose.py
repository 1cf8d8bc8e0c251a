"""docker-compose.yml with its two override files: mutual TLS, and users."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import REMOVE, ContainerCluster, free_ports
from helpers import DEADLINE, eventually
from load import everything

from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdUnavailable
from ftcoord.etcd.client import EtcdClient

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.alone, pytest.mark.docker]

Compose = Callable[..., str]


@dataclass(frozen=True)
class Guarded:
    """A project whose etcd wants a login."""

    project: str
    ports: list[int]
    compose: Compose

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]


@contextmanager
def project(command: str, name: str, ports: list[int], override: str) -> Iterator[tuple[Compose, dict[str, str]]]:
    """A project of its own, with other ports; it is removed in the end."""
    variables = {
        **os.environ,
        "ETCD_ROOT_PASSWORD": ROOTS,
        **{f"FTCOORD_ETCD_PORT_{number}": str(port) for number, port in enumerate(ports, 1)},
    }
    files = ["-f", "docker-compose.yml", "-f", f"docker-compose.{override}.yml"]

    def compose(*arguments: str) -> str:
        line = [*command.split(), "-p", name, *files, *arguments]
        done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=2 * DEADLINE)
        assert not done.returncode, done.stderr
        return done.stdout

    try:
        yield compose, variables
    finally:
        compose(*REMOVE.split())


def healthy(compose: Compose) -> bool:
    """Whether Compose says so of all three."""
    ids = compose("ps", "-q").split()
    states = subprocess.run(
        ["docker", "inspect", "-f", "{{.State.Health.Status}}", *ids], check=True, capture_output=True, text=True
    )
    return states.stdout.split() == ["healthy"] * 3


def inspected(compose: Compose, what: str) -> set[str]:
    """The words of this part of `docker inspect` of the three."""
    shown = subprocess.run(
        ["docker", "inspect", "-f", f"{{{{json .{what}}}}}", *compose("ps", "-q").split()],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(re.findall(r"[\w.-]+", shown.stdout))


def purposes(certificate: Path) -> str:
    command = ["openssl", "x509", "-in", certificate, "-noout", "-ext", "extendedKeyUsage"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_mutual_tls(
    image: None,
    docker_compose_command: str,
    docker_compose_project_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):  # the second time, they are there
        subprocess.run([ROOT / "docker" / "certificates.sh", tmp_path / "tls"], check=True, timeout=DEADLINE)
    monkeypatch.setenv("FTCOORD_TLS_DIR", str(tmp_path / "tls"))
    free = free_ports()
    with project(docker_compose_command, f"{docker_compose_project_name}tls", free, "tls") as (compose, _):
        compose("up", "-d")
        eventually(lambda: healthy(compose), what="three members are healthy")
        assert not inspected(compose, "Mounts") & {"ca.key"}
        assert "TLS Web Server" not in purposes(tmp_path / "tls" / "client.pem")
        endpoints = [f"https://127.0.0.1:{port}" for port in free]
        files = {name: tmp_path / "tls" / file for name, file in FILES.items()}
        with EtcdClient(EtcdConfig.load(endpoints, env={}, **files)) as client:
            assert client.put("/key", b"", timeout=DEADLINE).succeeded
        for settings in ({"ca_cert": files["ca_cert"]}, {}):
            names = endpoints if settings else [name.replace("https", "http") for name in endpoints]
            with EtcdClient(EtcdConfig.load(names, env={}, **settings)) as client, pytest.raises(EtcdUnavailable):
                client.get("/key", timeout=1)


FILES = {"ca_cert": "ca.pem", "cert": "client.pem", "key": "client.key"}


USER, PASSWORD, ROOTS = "ftcoord", "swordfish", "mackerel"


@pytest.fixture
def guarded(
    image: None, docker_compose_command: str, docker_compose_project_name: str, tmp_path: Path
) -> Iterator[Guarded]:
    """A cluster with users. Their passwords are in no command line."""
    calls, recorder = tmp_path / "calls", tmp_path / "compose"
    recorder.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {docker_compose_command} "$@"\n')
    recorder.chmod(0o700)
    free = free_ports()
    name = f"{docker_compose_project_name}auth"
    with project(docker_compose_command, name, free, "auth") as (compose, variables):
        compose("up", "-d")
        eventually(lambda: healthy(compose), what="three members are healthy")
        script = [ROOT / "docker" / "users.sh", "-p", name]
        for compose_named in ({"COMPOSE": str(recorder)}, {}):  # the second time, they are there
            environment = {**variables, **compose_named, "FTCOORD_PASSWORD": PASSWORD, "ETCD_ROOT_PASSWORD": ROOTS}
            subprocess.run(script, env=environment, check=True, capture_output=True, timeout=DEADLINE)
        assert "user add" in calls.read_text()
        assert not {PASSWORD, ROOTS} & set(re.split(r"[\s:=]", calls.read_text()))
        assert ROOTS not in inspected(compose, "Config.Healthcheck")
        yield Guarded(name, free, compose)
        eventually(lambda: healthy(compose), what="they are healthy still")


def test_users(guarded: Guarded) -> None:
    with EtcdClient(EtcdConfig.load(guarded.endpoints, env={}, user=USER, password=PASSWORD)) as client:
        assert client.put("/ftcoord/v2/key", b"", timeout=DEADLINE).succeeded
        with pytest.raises(EtcdAuthError):
            client.put("/key", b"")
    with EtcdClient(EtcdConfig.load(guarded.endpoints, env={})) as client, pytest.raises(EtcdError):
        client.get("/ftcoord/v2/key", timeout=1)


def test_the_leader_of_a_cluster_with_users_is_killed(
    guarded: Guarded, prefix: str, figures: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is in use then logs in again at another member."""
    monkeypatch.setenv("FTCOORD_USER", USER)
    monkeypatch.setenv("FTCOORD_PASSWORD", PASSWORD)
    cluster = ContainerCluster(guarded.project, guarded.ports, lambda line: guarded.compose(*line.split()))
    with everything(cluster.endpoints, prefix) as load:
        for _ in range(2):
            load.progress()
            leader = cluster.leader()
            cluster.kill(leader)
            load.progress()
            cluster.restart(leader)
        told = load.end()
    figures(kills=2, **told)
