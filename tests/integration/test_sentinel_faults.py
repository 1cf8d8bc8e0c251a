"""The sentinel where things go wrong: with etcd, with what it needs to run, and with what the process does."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
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
from helpers import DEADLINE, eventually, freeze, open_files, set_alarm
from victims import KILLED, LONG_TTL, SHORT_TTL, Holder, Victim, a_process, runs, sentinels_of

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Get, Span
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
CHURNING = 6


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


def test_where_etcd_takes_no_cause_the_lease_is_given_up_all_the_same(fragile: EtcdServer, prefix: str) -> None:
    """NOSPACE: it takes neither a key nor a lease."""
    with fragile.get_client() as client, a_process(fragile.get_endpoint(), client, prefix) as victim:
        set_alarm(fragile.get_endpoint(), True)
        victim.kill()
        assert victim.await_end() == ""


def test_whoever_reads_what_the_process_says_does_not_wait_for_etcd(fragile: EtcdServer, prefix: str) -> None:
    """The sentinel inherits standard error, and would else hold it until the lease has ended by time."""
    endpoint = fragile.get_endpoint()
    with fragile.get_client() as client, a_process(endpoint, client, prefix, stderr=subprocess.PIPE) as victim:
        fragile.pause()
        victim.kill()
        victim.await_end_of_errors()
        assert runs(victim.sentinel)
        fragile.resume()
        assert victim.await_end().endswith(KILLED)


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


@pytest.mark.parametrize("closed", ["0", "02", "012"])
def test_standard_streams_that_are_closed(etcd: EtcdServer, client: EtcdClient, prefix: str, closed: str) -> None:
    """What is opened next then has their numbers."""
    with a_process(etcd.get_endpoint(), client, prefix, MOURNED_CLOSED=closed) as victim:
        victim.does("fork_in_c")  # a child that keeps the pipe open: only the pidfd tells
        victim.kill()
        assert victim.await_end().endswith(KILLED)


@pytest.mark.parametrize("first", ["child", "fork", "fork_in_c"])
def test_without_pidfds(etcd: EtcdServer, client: EtcdClient, prefix: str, first: str) -> None:
    """As under a kernel, or a seccomp filter, that has none. A child that keeps the pipe open delays it a little."""
    with a_process(etcd.get_endpoint(), client, prefix, TTL, VICTIM_NO_PIDFD="1") as victim:
        assert victim.does(first) == "done"
        victim.kill()
        assert victim.await_end().endswith(KILLED)


def test_a_storm_of_forks(victim: Victim) -> None:
    assert victim.does("storm 100") == "done"
    assert victim.does("pid") == str(victim.sentinel)
    assert victim.lives()
    victim.kill()
    assert victim.await_end().endswith(KILLED)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_multiprocessing_have_sentinels_of_their_own(
    victim: Victim, client: EtcdClient, prefix: str, method: str
) -> None:
    child = Holder(victim.does(f"start {method}"), client, prefix)
    assert child.sentinel != victim.sentinel
    os.kill(child.pid, signal.SIGKILL)
    cause = child.await_end()
    # Who waits for it at once leaves nothing for others, before Linux 6.15.
    assert cause.endswith((KILLED, "ended, and nobody could tell how"))
    child.await_end_of(child.sentinel)
    assert victim.lives()


@pytest.fixture
def victim(etcd: EtcdServer, client: EtcdClient, prefix: str) -> Iterator[Victim]:
    with a_process(etcd.get_endpoint(), client, prefix) as process:
        yield process


def test_killed_at_any_moment_while_sentinels_start_and_stop(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    """What nobody told the sentinel in time ends by time. No process is left."""
    dice, churned = random.Random(prefix), Get(Span(f"{prefix}/churn-", is_prefix=True))
    with ExitStack() as ends:
        victims = [
            ends.enter_context(a_process(etcd.get_endpoint(), client, prefix, SHORT_TTL)) for _ in range(CHURNING)
        ]
        for victim in victims:
            assert victim.does("close") == "done"
            victim.tell("churn")
        for victim in victims:
            threading.Event().wait(dice.uniform(0, 1))
            victim.kill()
        eventually(lambda: not client.range(churned).kvs, "no key is left")
        for victim in victims:
            eventually(lambda victim=victim: not any(map(runs, sentinels_of(victim.pid))), "no sentinel is left")


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


@pytest.mark.parametrize("executable", [None, "", "/nowhere/python"])
def test_where_the_interpreter_is_not_known(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, executable: str | None
) -> None:
    """It is embedded in a program, or this process has changed its root."""
    monkeypatch.setattr(sys, "executable", executable)
    sentinel = Sentinel()
    sentinel.keep(client.config, 1, LONG_TTL, "/deaths")
    assert (len(warnings(caplog)), sentinel.pid) == (1, None)
    sentinel.drop(1)


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


def test_one_that_fails_again_and_again_is_not_started_with_each_renewal(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = tmp_path / "starts"
    with interpreter(monkeypatch, tmp_path / "python", f"echo >> {starts}", "exit 1") as sentinel:

        def renewed_by_all() -> bool:
            for lease in range(100):
                sentinel.keep(client.config, lease, LONG_TTL, "/deaths")
            return starts.exists() and len(starts.read_text()) >= 3

        eventually(renewed_by_all, "it is tried again")
        assert len(starts.read_text()) == 3
    assert len(warnings(caplog)) == 1


def test_one_that_reads_nothing_is_replaced_and_nobody_waits_for_it(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ftcoord.primitives.sentinel.HANGS_AFTER", 0.1)
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


def test_thousands_of_leases_are_told_though_the_pipe_does_not_hold_them(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count, told = 5000, tmp_path / "told"
    with interpreter(monkeypatch, tmp_path / "python", f"exec cat > {told}") as sentinel:
        works, sys.executable = sys.executable, "/nowhere/python"
        for lease in range(count):
            sentinel.keep(client.config, lease, LONG_TTL, "/deaths")
        monkeypatch.setattr(sys, "executable", works)

        def all_told() -> bool:
            sentinel.keep(client.config, count, LONG_TTL, "/deaths")
            *whole, _ = told.read_text().split("\n") if told.exists() else [""]
            return {order["keep"] for order in map(json.loads, whole) if "keep" in order} == {*range(count + 1)}

        eventually(all_told, "all are told")
    assert len(warnings(caplog)) == 1, "that the first one could not be started"


def test_what_it_is_told_never_lands_in_a_file_of_somebody_else(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A library has closed all files that it did not know, and opened another one."""
    with interpreter(monkeypatch, tmp_path / "python", "exec cat") as sentinel, open(tmp_path / "mine", "w+") as mine:
        sentinel.keep(client.config, 1, LONG_TTL, "/deaths")
        process = sentinel._process
        assert process is not None
        number = process._pipe._ours
        os.dup2(mine.fileno(), number)

        def another_one() -> bool:
            sentinel.keep(client.config, 1, LONG_TTL, "/deaths")
            return sentinel.pid not in (None, process.pid)

        eventually(another_one, "there is another one")
        os.fstat(number)  # it is not closed
        os.close(number)
        assert mine.read() == ""
    assert "not his" in warnings(caplog)[0]


def test_its_environment_is_read_while_others_write_to_it() -> None:
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            os.environ["SENTINEL_TEST"] = ""
            del os.environ["SENTINEL_TEST"]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(500):
            assert owner._environment()["PATH"] == os.environ["PATH"]
    finally:
        done.set()
        thread.join()
