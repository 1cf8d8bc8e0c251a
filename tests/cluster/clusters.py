"""Three members of etcd that the scenarios do harm to, and the same as processes of this machine."""

from __future__ import annotations

import threading
from typing import Protocol

from etcd_cluster import EtcdCluster
from helpers import DEADLINE, set_alarm
from lines import Lines

from ftcoord.config import EtcdConfig
from ftcoord.etcd.client import EtcdClient

SIZE = 3


class Cluster(Protocol):
    """What a scenario may do. Members are numbered from 0. Clients find them at `endpoints`, whatever was done."""

    endpoints: str

    def kill(self, i: int) -> None:
        """End it with SIGKILL."""

    def restart(self, i: int, *, wait: bool = True) -> None:
        """Start it again with its data, ending it first if it runs, and wait until it serves."""

    def pause(self, i: int) -> None:
        """It hangs, with its connections open."""

    def resume(self, i: int) -> None:
        """It goes on."""

    def cut_off(self, i: int) -> None:
        """No client reaches it any more."""

    def heal(self, i: int) -> None:
        """Clients reach it again."""

    def leader(self) -> int:
        """Who leads; waits until somebody does."""

    def wipe(self) -> None:
        """All data is gone, and a new cluster is in its place."""

    def restore(self) -> None:
        """All members run and serve."""

    def close(self) -> None:
        """Nothing is left of it."""


class LocalCluster:
    """Processes of this machine; a member is cut off by a line in front of it, its peers still hear it."""

    def __init__(self) -> None:
        self._etcds = EtcdCluster(SIZE)
        self._etcds.start()
        self._lines = Lines([member.get_endpoint() for member in self._etcds.members])
        self.endpoints = self._lines.endpoints

    def kill(self, i: int) -> None:
        self._etcds.kill(i)

    def restart(self, i: int, *, wait: bool = True) -> None:
        self._etcds.restart(i, wait=wait)

    def pause(self, i: int) -> None:
        self._etcds.pause(i)

    def resume(self, i: int) -> None:
        self._etcds.resume(i)

    def cut_off(self, i: int) -> None:
        self._lines.hold(i)

    def heal(self, i: int) -> None:
        self._lines.reset(i)

    def leader(self) -> int:
        return self._etcds.leader()

    def wipe(self) -> None:
        self._etcds.wipe()

    def restore(self) -> None:
        self._lines.reset()
        for i, member in enumerate(self._etcds.members):
            if member.is_paused():
                self._etcds.resume(i)
            if not member.is_running():
                self._etcds.restart(i, wait=False)
        self._etcds.wait_healthy()

    def close(self) -> None:
        self._lines.close()
        self._etcds.stop()


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
