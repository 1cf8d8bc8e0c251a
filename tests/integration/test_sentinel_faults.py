"""The sentinel where things go wrong: with etcd, with what it needs to run, and with what the process does."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster
from helpers import DEADLINE, eventually, freeze, open_files
from victims import KILLED, LONG_TTL, Victim, a_process, runs

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives import sentinel as owner
from ftcoord.primitives.sentinel import Sentinel

TTL = 10
"""Seconds: longer than an election, also on a crowded machine."""
ORDERS = ("PL", "LP", "SL", "LS", "PSL", "SPL", "PLS", "SLP", "LPS", "LSP")
"""What is killed, in which order: the process, its sentinel, etcd's leader."""
MOST_MEMORY = 45 << 20
QUIET = 3.0
"""Seconds."""
SMALL = 1 << 28
"""Bytes: enough for a process and its sentinel."""


# -- with etcd --------------------------------------------------------------------------------------------------------


def test_killed_in_every_order_with_the_leader(cluster: EtcdCluster, prefix: str) -> None:
    """Each of them is a process of its own, so that one leader that dies does for all."""
    config = EtcdConfig.load(cluster.endpoints, env={}, request_timeout=DEADLINE)
    with ExitStack() as ends:
        client = ends.enter_context(EtcdClient(config))

        def start(order: str) -> Victim:
            ttl = TTL if "S" in order else LONG_TTL  # where the sentinel lives on, nothing is to end by time
            return ends.enter_context(a_process(cluster.endpoints, client, f"{prefix}/{order}", ttl))

        def kill(letters: str, victim: Victim) -> None:
            for letter in letters:
                os.kill(victim.pid if letter == "P" else victim.sentinel, signal.SIGKILL)

        with ThreadPoolExecutor(4) as pool:
            victims = dict(zip(ORDERS, pool.map(start, ORDERS), strict=True))
        for order, victim in victims.items():
            kill(order.partition("L")[0], victim)
        cluster.kill(cluster.leader())
        for order, victim in victims.items():
            kill(order.partition("L")[2], victim)
        for order, victim in victims.items():
            if "P" not in order:
                other = victim.other_sentinel()
                assert victim.lives(), order
                victim.kill()
                assert victim.await_end().endswith(KILLED), order
                victim.await_end_of(other)
            elif "S" in order:  # the sentinel may have been faster
                cause = victim.await_end()
                assert cause == "" or cause.endswith(KILLED), order
            else:
                assert victim.await_end().endswith(KILLED), order


# -- what it costs, and shows -----------------------------------------------------------------------------------------


def test_it_takes_little_memory_and_no_turn_of_a_processor_but_to_renew(
    etcd: EtcdServer, client: EtcdClient, prefix: str
) -> None:
    with a_process(etcd.get_endpoint(), client, prefix) as victim:
        before = eventually(lambda: _settled(victim.sentinel), "it waits")
        threading.Event().wait(QUIET)
        assert _turns(victim.sentinel) == before
        os.kill(victim.pid, signal.SIGSTOP)  # of what is measured nothing changes
        assert _resident(victim.sentinel) <= MOST_MEMORY


def _settled(pid: int) -> int | None:
    """How often it has run, if it has loaded all and sleeps, and not only just now."""
    first = _turns(pid)
    threading.Event().wait(0.5)
    return first if first is not None and first == _turns(pid) and _status(pid)["State"].split()[0] == "S" else None


def _turns(pid: int) -> int | None:
    """How often a process has waited, or was made to; None while it has another thread, the one that loads gRPC."""
    status = _status(pid)
    return int(status["voluntary_ctxt_switches"]) if int(status["Threads"]) == 1 else None


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def _resident(pid: int) -> int:
    """Bytes of its own and its share of what others use too: the interpreter is the process's as well."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in rollup[1:]}
    return 1024 * found["Rss:"]


def test_its_command_line_and_environment_tell_no_login(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOORD_PASSWORD", "swordfish")
    monkeypatch.setenv("ETCDCTL_USER", "somebody:swordfish")
    config = EtcdConfig.load(etcd.get_endpoint(), env={}, user="somebody", password="swordfish")
    sentinel = Sentinel()
    sentinel.keep(config, 1, LONG_TTL, "/deaths")
    shown = Path(f"/proc/{sentinel.pid}")
    eventually(lambda: b"sentinel_main" in (shown / "cmdline").read_bytes(), "it is that program by now")
    for file in ("cmdline", "environ"):
        assert b"swordfish" not in (shown / file).read_bytes()
        assert (shown / file).read_bytes()
    sentinel.drop(1)


# -- what the process does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["child", "fork", "fork_in_c"])
def test_without_pidfds(etcd: EtcdServer, client: EtcdClient, prefix: str, first: str) -> None:
    """As under a kernel, or a seccomp filter, that has none. A child that keeps the pipe open delays it a little."""
    with a_process(etcd.get_endpoint(), client, prefix, TTL, VICTIM_NO_PIDFD="1") as victim:
        assert victim.does(first) == "done"
        victim.kill()
        assert victim.await_end().endswith(KILLED)


@pytest.fixture
def victim(etcd: EtcdServer, client: EtcdClient, prefix: str) -> Iterator[Victim]:
    with a_process(etcd.get_endpoint(), client, prefix) as process:
        yield process


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes may have little memory."""
    group = _group_with(SMALL)
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text(), "nobody is in the group")
    group.rmdir()


def _group_with(limit: int) -> Path:
    """A new one with so many bytes, of either version; skips where none can be made."""
    for root, file in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(root, f"ftcoord-test-{os.getpid()}")
        with suppress(OSError):
            group.mkdir()
            try:
                with (group / file).open("r+") as limits:  # it must be there: else this is no control group
                    limits.write(str(limit))
                return group
            except OSError:
                group.rmdir()
    pytest.skip("no control group with a limit can be made here")


def test_the_kernel_kills_for_lack_of_memory(
    etcd: EtcdServer, client: EtcdClient, prefix: str, small_group: Path
) -> None:
    with a_process(etcd.get_endpoint(), client, prefix, VICTIM_GROUP=str(small_group)) as victim:
        eventually(lambda: _settled(victim.sentinel), "it knows how many were killed before")
        victim.tell("eat")
        assert victim.await_end().endswith("since its control group had no memory left (OOM)")


# -- what it needs to run ---------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM, errno.EACCES], ids=errno.errorcode.get)
def test_where_no_process_can_be_started(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    """EAGAIN: RLIMIT_NPROC is reached."""

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = open_files()
    sentinel = Sentinel()
    for lease in range(10):
        sentinel.keep(client.config, lease, LONG_TTL, "/deaths")
    assert (len(warnings(caplog)), sentinel.pid) == (1, None)
    assert os.strerror(error) in warnings(caplog)[0]
    assert not open_files() - before
    for lease in range(10):
        sentinel.drop(lease)


@contextmanager
def interpreter(monkeypatch: pytest.MonkeyPatch, path: Path, *lines: str) -> Iterator[Sentinel]:
    """A sentinel whose process does this instead."""
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    sentinel = Sentinel()
    try:
        yield sentinel
    finally:
        for lease in list(sentinel._kept):
            sentinel.drop(lease)
        assert sentinel.pid is None


def test_one_that_reads_nothing_is_replaced_and_nobody_waits_for_it(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner, "HANGS_AFTER", 0.1)
    with interpreter(monkeypatch, tmp_path / "python", "exec sleep 600") as sentinel:
        sentinel.keep(client.config, 1, LONG_TTL, "/deaths")
        first = sentinel.pid
        assert first is not None
        freeze(first)

        def replaced() -> bool:
            for _ in range(1000):
                sentinel.keep(client.config, 1, LONG_TTL, "/deaths")
                if sentinel.pid not in (None, first):  # at once: the other one does not read either
                    return True
            return False

        eventually(replaced, "there is another one")
        assert not runs(first)
    assert len(warnings(caplog)) == 1
    assert "does not read" in warnings(caplog)[0]
