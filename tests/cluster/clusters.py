"""Three members of etcd that the scenarios do harm to, and the same as processes of this machine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from cutting import Lines
from etcd_cluster import EtcdCluster
from helpers import DEADLINE, set_alarm

from ftcoord.config import EtcdConfig
from ftcoord.etcd.client import EtcdClient

if TYPE_CHECKING:
    from containers import ContainerCluster

SIZE = 3
Cluster: TypeAlias = "LocalCluster | ContainerCluster"


class LocalCluster(EtcdCluster):
    """Processes of this machine; a member is cut off by a line in front of it, its peers still hear it.

    What it has, `ContainerCluster` has too. Clients find the members at `endpoints`, whatever was done to them.
    """

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.start()
        self._lines = Lines([member.get_endpoint() for member in self.members])

    @property
    def endpoints(self) -> str:
        return self._lines.endpoints

    def cut_off(self, i: int) -> None:
        """No client reaches it any more."""
        self._lines.hold(i)

    def heal(self, i: int) -> None:
        """Clients reach it again."""
        self._lines.reset(i)

    def restore(self) -> None:
        """All members run and serve."""
        self._lines.reset()
        for i, member in enumerate(self.members):
            if member.is_paused():
                self.resume(i)
            if not member.is_running():
                self.restart(i, wait=False)
        self.wait_healthy()

    def close(self) -> None:
        """Nothing is left of it."""
        self._lines.close()
        self.stop()


def client_of(cluster: Cluster, *numbers: int) -> EtcdClient:
    """A client that knows these members only; all, if none are named."""
    endpoints = cluster.endpoints.split(",")
    return EtcdClient(EtcdConfig.load([endpoints[number] for number in numbers or range(SIZE)]))


def revokes_wrongly(cluster: Cluster) -> bool:
    """Whether this etcd is older than 3.5.13: a leader of its that was stopped for long revokes the leases which its
    successor has kept alive (etcd issue 15247)."""
    with client_of(cluster) as client:
        version = tuple(int(part) for part in client.status(timeout=DEADLINE).version.split("-")[0].split("."))
    return version < (3, 5, 13)


def alarm(cluster: Cluster, on: bool) -> None:
    """Raise the alarm NOSPACE, as a member does that has no space left, or disarm it."""
    set_alarm(cluster.endpoints.split(",")[0], on)


def pass_time(seconds: float) -> None:
    """For the passing of time itself, never for a condition."""
    threading.Event().wait(seconds)
