"""The sentinel: it buries a process that died, in every way to die, and disturbs nobody that lives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import DEADLINE, freeze
from victims import KILLED, LONG_TTL, PROGRAM, SHORT_TTL, Victim, a_process, runs

import ftcoord
from ftcoord.config import Credentials, EtcdConfig, Tls
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.orphans import MARK, Orphans
from ftcoord.primitives.sentinel import config_from, config_raw
from ftcoord.proc import fate_of


@pytest.fixture
def victim(etcd: EtcdServer, client: EtcdClient, prefix: str) -> Iterator[Victim]:
    with a_process(etcd.get_endpoint(), client, prefix) as process:
        yield process


@pytest.mark.parametrize(
    ("act", "fate"),
    [
        ("signal SIGKILL", KILLED),
        ("signal SIGUSR1", "was killed by signal 10 (SIGUSR1)"),
        ("exit 3", "exited with code 3"),
        ("exit 0", "exited with code 0"),
        ("group", KILLED),
        ("session", KILLED),
        ("daemon", "exited with code 0"),
    ],
)
def test_a_death_is_told_with_its_cause(victim: Victim, act: str, fate: str) -> None:
    victim.tell(act)
    assert victim.await_end() == f"{os.uname().nodename} (pid {victim.pid}) {fate}"
    victim.await_end_of(victim.sentinel)


def test_signals_that_a_scheduler_sends_to_all_processes_are_not_meant_for_it(victim: Victim) -> None:
    """Such as SIGUSR1, some time before it ends them."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number not in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            os.kill(victim.sentinel, number)
    os.kill(victim.pid, signal.SIGUSR1)
    assert victim.await_end().endswith("was killed by signal 10 (SIGUSR1)")


def test_it_is_in_no_session_of_the_process(victim: Victim) -> None:
    assert os.getsid(victim.sentinel) == victim.sentinel


def test_forks_and_programs_of_the_process_leave_it_alone(victim: Victim) -> None:
    assert victim.does("fork") == "done"
    assert victim.does("child") == "done"
    assert victim.does("pid") == str(victim.sentinel)
    assert victim.lives()
    os.kill(victim.pid, signal.SIGKILL)  # the forked child lives on
    assert "SIGKILL" in victim.await_end()


def test_the_leases_of_a_process_that_becomes_another_program_expire(
    etcd: EtcdServer, client: EtcdClient, prefix: str
) -> None:
    with a_process(etcd.get_endpoint(), client, prefix, SHORT_TTL) as victim:
        victim.tell("exec")
        assert victim.await_end() == ""
        victim.await_end_of(victim.sentinel)
        assert runs(victim.pid)


def test_no_lease_left_no_sentinel_left(victim: Victim) -> None:
    assert victim.does("close") == "done"
    victim.await_end_of(victim.sentinel)
    assert victim.does("pid") == "None"
    assert victim.await_end() == ""


def test_a_process_that_is_stuck_in_c_keeps_its_lease(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    ttl = 3 * SHORT_TTL  # where a crowded machine can renew in time
    with a_process(etcd.get_endpoint(), client, prefix, ttl) as victim:
        assert victim.does(f"hang {2 * ttl}") == "done"
        assert victim.lives()


def test_a_process_that_is_stopped_is_not_dead_but_keeps_no_lease(
    etcd: EtcdServer, client: EtcdClient, prefix: str
) -> None:
    with a_process(etcd.get_endpoint(), client, prefix, SHORT_TTL) as victim:
        freeze(victim.pid)
        assert victim.await_end() == ""
        assert runs(victim.sentinel)


def test_one_that_was_killed_is_replaced(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    with a_process(etcd.get_endpoint(), client, prefix, 3 * SHORT_TTL) as victim:
        os.kill(victim.sentinel, signal.SIGKILL)
        other = victim.other_sentinel()
        assert victim.lives()
        os.kill(victim.pid, signal.SIGKILL)
        assert "SIGKILL" in victim.await_end()
        victim.await_end_of(other)


@pytest.mark.parametrize("word", ["0", "false", "No", " off "])
def test_it_can_be_switched_off(etcd: EtcdServer, client: EtcdClient, prefix: str, word: str) -> None:
    with a_process(etcd.get_endpoint(), client, prefix, SHORT_TTL, FTCOORD_SENTINEL=word) as victim:
        assert victim.sentinel == 0
        os.kill(victim.pid, signal.SIGKILL)
        assert victim.await_end() == ""


def refused(_pid: int) -> int:
    raise PermissionError(errno.EPERM, "by a seccomp filter")


@pytest.mark.parametrize(
    ("status", "was_oom", "fate"),
    [
        (9, True, "was killed by the kernel, since its control group had no memory left (OOM)"),
        (15, True, "was killed by signal 15 (SIGTERM)"),
        (7 << 8, False, "exited with code 7"),
        (6 | 0x80, False, "was killed by signal 6 (SIGABRT)"),  # with a core dump
        (40, False, "was killed by signal 40 (a real-time signal)"),
        (None, False, "ended, and nobody could tell how"),
    ],
)
def test_fates_in_words(status: int | None, was_oom: bool, fate: str) -> None:
    assert fate_of(status, was_oom) == fate


def test_a_password_and_a_name_for_each_file_reach_it_through_the_pipe() -> None:
    """Its working directory is another, so relative paths would mean other files."""
    config = EtcdConfig.load("https://h1:2379", env={}, user="a", password="secret")
    ours = EtcdConfig(config.endpoints, Tls("ca.pem", None, None, None))
    domain = EtcdConfig.load("https+srv://etcd.example", env={})
    assert config_from(config_raw(config)) == config
    assert config_from(config_raw(domain)) == domain
    assert config.credentials == Credentials("a", "secret")
    assert config_raw(ours)["tls"][0] == os.path.abspath("ca.pem")


def test_heartbeats_and_sessions_tell_who_died_of_what(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    run = prefix.strip("/")
    where = f"{run!r}, 'h', {LONG_TTL}, etcd={etcd.get_endpoint()!r}"
    program = f"import ftcoord; b = ftcoord.Heartbeat({where}).__enter__()"
    wait = "from ftcoord.primitives.sentinel import Sentinel; from helpers import eventually"
    more = "eventually(lambda: Sentinel.of_process().pid, ''); print('', flush=True); import time; time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{wait}; {program}; {more}"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(PROGRAM).parent)},
    )
    try:
        with ftcoord.watch_heartbeats(run, client) as watch:
            assert next(watch).kind == "joined"
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()
            lost = next(watch)
    finally:
        process.kill()
        process.communicate()
    assert (lost.kind, lost.reason) == ("lost", "died")
    assert lost.cause.endswith(f"(pid {process.pid}) was killed by signal 9 (SIGKILL)")


def a_mark() -> str:
    """One that no other test has: the processes with it are looked for on the whole machine, where other tests run."""
    return uuid.uuid4().hex


@pytest.fixture
def mark() -> str:
    return a_mark()


@pytest.mark.parametrize("pidfds", ["there", "refused", "unknown"])
def test_orphans_are_ended_and_nobody_else(monkeypatch: pytest.MonkeyPatch, pidfds: str, mark: str) -> None:
    """One that ends when it is asked to, one that does not, a grandchild, and three that must live."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(''); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {stubborn!r}])"
    ours, others = {MARK: mark}, {MARK: a_mark()}
    if pidfds == "refused":
        monkeypatch.setattr(os, "pidfd_open", refused)
    elif pidfds == "unknown":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    with ExitStack() as ends:

        def start(env: dict[str, str], *command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}, start_new_session=True
            )
            ends.callback(process.communicate)
            ends.callback(process.kill)
            return process

        dies = [start(ours, "sleep", "600"), start(ours, sys.executable, "-uc", stubborn)]
        dies.append(start(ours, sys.executable, "-uc", parent))
        lives = [start(others, "sleep", "600"), start({}, "sleep", "600"), start({MARK: ""}, "sleep", "600")]
        assert not Orphans("").look()
        for process in dies[1:]:
            assert process.stdout is not None
            process.stdout.readline()  # it, or its child, ignores SIGTERM from now on
        orphans = Orphans(mark, grace=0.2)
        while orphans.look():
            threading.Event().wait(0.05)
        assert [process.wait(DEADLINE) for process in dies[:2]] == [-signal.SIGTERM, -signal.SIGKILL]
        dies[2].wait(DEADLINE)
        assert [process.poll() for process in lives] == [None] * 3


def test_nobody_is_left_with_a_mark_that_nobody_has() -> None:
    orphans = Orphans("nobody has this one")
    assert orphans.look(), "one may be just being started"
    assert not orphans.look()
