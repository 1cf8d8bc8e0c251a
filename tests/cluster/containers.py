"""The members of docker-compose.yml, for the scenarios of this directory."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from collections.abc import Callable
from typing import Any

from clusters import SIZE
from etcd_cluster import leader_of
from helpers import DEADLINE, eventually, own_port

from ftcoord.config import Endpoint, EtcdConfig

HOST = "127.0.0.1"
REMOVE = "down -v -t 0"
"""Kills at once what is removed with its data."""
NETWORKS = {"clients": "etcd", "peers": "peer"}
"""The networks that every member is on, and the first part of its name there."""


def docker(*arguments: str) -> str:
    """Run docker; what it printed. Raises CalledProcessError."""
    done = subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE)
    return done.stdout.strip()


def engine_problem() -> str:
    """Why no containers can be run here; empty if they can."""
    try:
        docker("version")
    except FileNotFoundError:
        return "there is no docker command"
    except subprocess.SubprocessError as error:
        return f"no Docker engine answers: {(getattr(error, 'stderr', '') or str(error)).strip().splitlines()[-1]}"
    return "" if compose_command() else "there is no Docker Compose"


def compose_command() -> str | None:
    """Compose v2, else v1, else None."""
    for command in ("docker compose", "docker-compose"):
        with contextlib.suppress(OSError):
            if not subprocess.run([*command.split(), "version"], capture_output=True).returncode:
                return command
    return None


def free_ports() -> list[int]:
    """For the members of a project. While this process lives nobody else gets them, whatever is connected beside it
    meanwhile: Docker sets SO_REUSEADDR, as etcd does."""
    return [own_port() for _ in range(SIZE)]


class ContainerCluster:
    """Containers; who is cut off is disconnected from all networks, so that its peers do not hear it either.

    Args:
        project: the name of the Compose project, which is up.
        ports: of its members, on this machine.
        compose: runs Compose with such arguments.
    """

    def __init__(self, project: str, ports: list[int], compose: Callable[[str], object]) -> None:
        self._project, self._ports, self._compose = project, ports, compose
        self.endpoints = ",".join(f"{HOST}:{port}" for port in ports)
        self.restore()

    def kill(self, i: int) -> None:
        docker("kill", "--signal=KILL", self._id(i))

    def restart(self, i: int, *, wait: bool = True) -> None:
        docker("restart", "--time=2", self._id(i))
        if wait:
            self._await(i)

    def pause(self, i: int) -> None:
        docker("pause", self._id(i))

    def resume(self, i: int) -> None:
        docker("unpause", self._id(i))

    def cut_off(self, i: int) -> None:
        for network in NETWORKS:
            docker("network", "disconnect", f"{self._project}_{network}", self._id(i))

    def heal(self, i: int) -> None:
        for network in NETWORKS:
            self._connect(i, network)

    def leader(self) -> int:
        """Who leads; waits until somebody does."""
        configs = {i: EtcdConfig((Endpoint(HOST, port),), request_timeout=2) for i, port in enumerate(self._ports)}
        (found,) = eventually(lambda: {leader_of(configs)} - {None}, what="a leader")
        return int(found)  # type: ignore[arg-type]

    def wipe(self) -> None:
        self._compose(REMOVE)
        self._compose("up -d")
        self.restore()

    def restore(self) -> None:
        for i in range(SIZE):
            state = json.loads(docker("inspect", self._id(i)))[0]
            if state["State"]["Paused"]:
                self.resume(i)
            for network in NETWORKS:
                if f"{self._project}_{network}" not in state["NetworkSettings"]["Networks"]:
                    self._connect(i, network)
            docker("start", self._id(i))
        for i in range(SIZE):
            self._await(i)

    def close(self) -> None:
        """pytest-docker takes it down."""

    def _id(self, i: int) -> str:
        service = f"label=com.docker.compose.service=etcd-{i + 1}"
        return docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={self._project}", "--filter", service)

    def _connect(self, i: int, network: str) -> None:
        alias = f"--alias={NETWORKS[network]}-{i + 1}"
        docker("network", "connect", alias, f"{self._project}_{network}", self._id(i))

    def _await(self, i: int) -> None:
        eventually(lambda: (self._ask(i, "/health") or {}).get("health") == "true", f"member {i} to serve")

    def _ask(self, i: int, path: str) -> dict[str, Any] | None:
        connection = http.client.HTTPConnection(HOST, self._ports[i], timeout=2)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            answer: dict[str, Any] | None = json.loads(response.read()) if response.status == 200 else None
            return answer
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
