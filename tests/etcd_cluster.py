"""etcds that a test may hurt: a single one, and a cluster of several on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftcoord.config import Endpoint, EtcdConfig
from ftcoord.embedded.server import HTTP_TIMEOUT, LOOPBACK, POLL_INTERVAL, EtcdServer
from ftcoord.errors import EtcdError, ServerError
from ftcoord.etcd.api import EMBEDDED_NAMES
from ftcoord.etcd.client import EtcdClient

STATUS_TIMEOUT = 2.0


class FragileEtcd(EtcdServer):
    """An etcd that can also be stopped with SIGSTOP, and lose its data. Takes the arguments of `EtcdServer`."""

    _paused = False

    def is_paused(self) -> bool:
        """Whether `pause` was called, and since then no `resume`, `kill` or `restart`."""
        return self._paused

    def pause(self) -> None:
        """Stop etcd with SIGSTOP: it hangs, with its connections open, until `resume`. No effect if it has ended."""
        if not self.is_running():
            return
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it has ended before
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self._paused = self.is_running()

    def resume(self) -> None:
        """Let a paused etcd continue."""
        if self.is_running():
            os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def kill(self) -> None:
        super().kill()
        self._paused = False

    def stop(self) -> None:
        super().stop()
        self._paused = False

    def restart(self, timeout: float = 60, *, wait: bool = True) -> None:
        """As `EtcdServer.restart`. Without `wait` it returns as soon as the process runs: a member without a majority
        cannot serve yet."""
        self._started().close()
        self._paused = False
        self._launch()
        if wait:
            self._wait_ready(timeout)

    def wipe(self) -> None:
        """End etcd with SIGKILL and remove its data, as if its host were lost. Its port is kept for `restart`."""
        self.kill()
        shutil.rmtree(os.path.join(self._data, "member"))

    def http(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout: float = HTTP_TIMEOUT
    ) -> dict[str, Any] | None:
        """Send a request to etcd's HTTP side; returns the JSON object. None for any answer but status 200 with a JSON
        object, and for no answer within `timeout` seconds."""
        connection = http.client.HTTPConnection(LOOPBACK, self.get_port(), timeout=timeout)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            response = connection.getresponse()
            found = json.loads(response.read()) if response.status == http.client.OK else None
            return found if isinstance(found, dict) else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def state_of(pid: int) -> str:
    """The state of a process, as /proc has it: "T" for one that is stopped, "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Member(FragileEtcd):
    """One member of an `EtcdCluster`."""

    def __init__(self, name: str, extra_args: Sequence[str]) -> None:
        super().__init__()
        self._given, self._member_name = tuple(extra_args), f"{EMBEDDED_NAMES}{name}"

    def prepare(self) -> str:
        """Reserve its ports. Returns its part of ``--initial-cluster``."""
        self._prepare()
        return f"{self._member_name}={self._peer_url()}"

    def launch(self, cluster: str) -> None:
        """Start it as a member of the cluster that all `prepare` made together. Does not wait until it serves."""
        self._extra_args = (f"--name={self._member_name}", f"--initial-cluster={cluster}", *self._given)
        self._launch()

    def get_host(self) -> str:
        return LOOPBACK

    def wait_ready(self, timeout: float) -> None:
        self._wait_ready(timeout)


class EtcdCluster:
    """`n` etcd members on 127.0.0.1, each with temporary data that is removed on `stop`.

        with EtcdCluster(3) as cluster:
            cluster.kill(cluster.leader())

    Without a majority no member serves, and `restart(i)` of one member waits in vain (use ``wait=False``).

    Methods that take the index of a member, from 0 to `n` - 1, raise IndexError for a bad one, and ServerError before
    `start()` and after `stop()`.

    Args:
        extra_args: for every member, as in `EtcdServer`.
    """

    def __init__(self, n: int = 3, *, extra_args: Sequence[str] = ()) -> None:
        self.members: tuple[Member, ...] = tuple(Member(f"m{i}", extra_args) for i in range(n))
        self._started = False

    @property
    def endpoints(self) -> str:
        """``host:port`` of every member, in order, joined by commas. Raises ServerError if never started."""
        return ",".join(Endpoint(LOOPBACK, member.get_port()).target for member in self.members)

    def start(self, timeout: float = 60) -> None:
        """Start all members, and wait until each one serves: `timeout` seconds in all. Raises ServerError, with the end
        of the log."""
        if self._started:
            raise ServerError(f"the cluster is started already on {self.endpoints}: use it, or call stop()")
        self._start(time.monotonic() + timeout)

    def stop(self) -> None:
        """End all members and remove their data. Idempotent; does nothing in a forked child."""
        for member in self.members:
            member.stop()
        self._started = False

    def kill(self, i: int) -> None:
        """End member `i` with SIGKILL; its data and port are kept for `restart`."""
        self.members[i].kill()

    def restart(self, i: int, timeout: float = 60, *, wait: bool = True) -> None:
        """Start member `i` again, on the same port with the same data, as `FragileEtcd.restart` does."""
        self.members[i].restart(timeout, wait=wait)

    def pause(self, i: int) -> None:
        """Stop member `i` with SIGSTOP: it hangs, with its connections open, until `resume`. No effect if it ended."""
        self.members[i].pause()

    def resume(self, i: int) -> None:
        """Let a paused member go on."""
        self.members[i].resume()

    def wipe(self, timeout: float = 60) -> None:
        """Kill all members, remove their data, and start a new cluster on the same ports; wait until it serves."""
        for member in self.members:
            member.wipe()
        for member in self.members:
            member.restart(wait=False)
        self.wait_healthy(timeout)

    def leader(self, timeout: float = 60) -> int:
        """The index of the leader among the members that run and are not paused. Waits for an election if need be.
        Raises ServerError if there is no leader within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (index := self._leader()) is None:
            if time.monotonic() >= deadline:
                raise ServerError(f"no leader within {timeout:g} s: restart or resume members until a majority runs")
            time.sleep(POLL_INTERVAL)
        return index

    def wait_healthy(self, timeout: float = 60) -> None:
        """Wait until every member that is neither killed nor paused serves. Raises ServerError if one does not within
        `timeout` seconds, or ends meanwhile; or no member is running."""
        deadline = time.monotonic() + timeout
        active = self._active()
        if not active:
            raise ServerError("no member of the cluster is running: call start(), restart(i) or resume(i)")
        self._wait_ready(active, deadline)

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _start(self, deadline: float) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            initial_cluster = ",".join([member.prepare() for member in self.members])
            for member in self.members:
                member.launch(initial_cluster)
            self._started = True
            self._wait_ready(range(len(self.members)), deadline)
            undo.pop_all()

    def _wait_ready(self, indices: Iterable[int], deadline: float) -> None:
        for i in indices:
            self.members[i].wait_ready(deadline - time.monotonic())

    def _active(self) -> list[int]:
        return [i for i, member in enumerate(self.members) if member.is_running() and not member.is_paused()]

    def _leader(self) -> int | None:
        return leader_of({i: self.members[i].config(STATUS_TIMEOUT) for i in self._active()})


def leader_of(members: Mapping[int, EtcdConfig]) -> int | None:
    """The member that claims to lead, in the highest term: a member that was just resumed may still claim to."""
    claims: list[tuple[int, int]] = []
    for i, config in members.items():
        with contextlib.suppress(EtcdError), EtcdClient(config) as client:
            status = client.member_status()
            if status.leader_id == status.member_id:
                claims.append((status.raft_term, i))
    return max(claims)[1] if claims else None
