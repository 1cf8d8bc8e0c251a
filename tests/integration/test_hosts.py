"""Nodes on several hosts: each is a network namespace of its own. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import name_server
import pytest
import rdzv_nodes
from helpers import DEADLINE, eventually

from ftcoord.embedded.server import find_etcd

HOSTS = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
NEEDED = ("ip", "nsenter", "unshare")


class Host:
    """A network, a host name and an `/etc/hosts` of its own, where its name means 127.0.1.1, as in Debian's."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._others: list[subprocess.Popen[bytes]] = []
        self._holder = subprocess.Popen(["unshare", "-n", "-m", "-u", "sleep", "600"])
        own = os.readlink("/proc/self/ns/uts")
        eventually(
            lambda: self._holder.poll() is not None or os.readlink(f"{self.namespaces}/uts") != own, "it is there"
        )
        names = {"localhost": "127.0.0.1", **HOSTS, name: "127.0.1.1"}
        hosts = folder / f"hosts.{name}"
        hosts.write_text("".join(f"{address} {host}\n" for host, address in names.items()))
        self.run("mount", "--bind", str(hosts), "/etc/hosts")
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def namespaces(self) -> str:
        return f"/proc/{self._holder.pid}/ns"

    def command(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self._holder.pid), "-n", "-m", "-u", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.command(*command), check=True, capture_output=True, timeout=DEADLINE)

    def connect(self, other: Host) -> None:
        """Join the two by a cable."""
        self.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(other._holder.pid))
        for host in (self, other):
            host.run("ip", "addr", "add", f"{HOSTS[host.name]}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")

    def serve_names(self, folder: Path, records: name_server.Records) -> None:
        """Have this host's programs find these SRV records."""
        resolv = folder / f"resolv.{self.name}"
        resolv.write_text("nameserver 127.0.0.1\n")
        self.run("mount", "--bind", str(resolv), "/etc/resolv.conf")
        command = self.command(sys.executable, name_server.__file__, json.dumps(records))
        self._others.append(subprocess.Popen(command))

    def end(self) -> None:
        for process in (*self._others, self._holder):
            process.kill()
            process.wait()


class RemoteNode:
    """A node on a host: `rdzv_nodes` as a program."""

    def __init__(self, host: Host, endpoint: str, log: Path, **conf: Any) -> None:
        request = {"endpoint": endpoint, "run_id": "hosts", "nodes": (2, 2), "clock_offset": 0.0, "conf": conf}
        command = host.command(sys.executable, rdzv_nodes.__file__, json.dumps(request))
        self.log = log / host.name
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def ask(self, *commands: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.writelines(f"{command}\n" for command in commands)
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def asked(self, command: str) -> Any:
        self.ask(command)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts and a cable between them; an etcd on the first one listens at all of its addresses."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    may = not missing and subprocess.run(["unshare", "-n", "-m", "-u", "true"], capture_output=True).returncode == 0
    if not may:
        pytest.skip(f"network namespaces need root and {', '.join(missing or NEEDED)}")
    with contextlib.ExitStack() as undo:
        made = []
        for name in HOSTS:
            made.append(Host(name, tmp_path))
            undo.callback(made[-1].end)
        made[0].connect(made[1])
        at = {"client-urls": "http://0.0.0.0:2379", "peer-urls": "http://127.0.0.1:2380"}
        options = [f"--listen-{kind}={url}" for kind, url in at.items()]
        options += ["--advertise-client-urls=http://10.77.0.1:2379", f"--data-dir={tmp_path / 'etcd'}"]
        with (tmp_path / "etcd.log").open("wb") as log:
            etcd = subprocess.Popen(made[0].command(str(find_etcd()), *options), stdout=log, stderr=log)
        undo.callback(etcd.wait)
        undo.callback(etcd.kill)
        yield made


def seats(hosts: Sequence[Host], endpoints: Sequence[str], log: Path, **conf: Any) -> tuple[list[Any], list[str]]:
    """What the nodes are told of a round, and what they log."""
    nodes = []
    with contextlib.ExitStack() as undo:
        for host, endpoint in zip(hosts, endpoints, strict=True):
            nodes.append(RemoteNode(host, endpoint, log, **conf))
            undo.callback(nodes[-1].end)
            nodes[-1].ask("join")
        told = [node.answer() for node in nodes]
        return told, [node.log.read_text() for node in nodes]


@pytest.mark.parametrize("endpoint", ["hosta:2379", "localhost:2379"])
def test_the_workers_of_two_hosts_meet_where_both_reach_it(hosts: list[Host], endpoint: str, tmp_path: Path) -> None:
    """The first one reaches etcd through loopback, and its name means loopback there."""
    told, logs = seats(hosts, [endpoint, "10.77.0.1:2379"], tmp_path, local_addr=None)
    assert {seat["address"] for seat in told} <= {*HOSTS.values()}
    assert "--local-addr" not in "".join(logs)


def test_all_nodes_warn_of_a_loopback_address_in_a_round_of_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    told, logs = seats(hosts, ["10.77.0.1:2379"] * 2, tmp_path, local_addr="127.0.0.1")
    (first,) = [host.name for host, seat in zip(hosts, told, strict=True) if seat["rank"] == 0]
    trouble = f"cannot reach 127.0.0.1 (MASTER_ADDR): it is an address of one host only; start {first} (pid"
    assert all(trouble in log for log in logs)


def test_agents_and_their_sentinels_find_etcd_by_a_domain(hosts: list[Host], tmp_path: Path) -> None:
    nodes = []
    with contextlib.ExitStack() as undo:
        for host in hosts:
            host.serve_names(tmp_path, {"_etcd-client._tcp.etcd.example": [("hosta", 2379)]})
            nodes.append(RemoteNode(host, "srv://etcd.example", tmp_path, local_addr=None))
            undo.callback(nodes[-1].end)
            nodes[-1].ask("join")
        assert {node.answer()["address"] for node in nodes} <= {*HOSTS.values()}
        nodes[1].end()
        eventually(lambda: nodes[0].asked("waiting") > 0, "the first one is called back")
        assert "was killed by signal 9 (SIGKILL)" in nodes[0].log.read_text()
