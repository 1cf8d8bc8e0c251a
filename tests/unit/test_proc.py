"""Descriptors of processes, also in a Python that knows none."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftcoord import proc
from ftcoord.primitives.sentinel_main import WatchedProcess

LARGE = 2000
"""More than the 1024 that `select` takes."""


@pytest.mark.parametrize("known", [True, False])
def test_a_process_is_sent_a_signal_and_seen_to_end(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    if not known:
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = proc.open_pidfd(process.pid)
        try:
            assert not os.get_inheritable(descriptor)
            assert not proc.has_ended(descriptor)
            proc.send(descriptor, signal.SIGKILL)
            assert proc.has_ended(descriptor, 60)
            found = os.waitid(proc.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            assert found is not None
            assert found.si_status == signal.SIGKILL
            process.wait()
            with pytest.raises(ProcessLookupError):
                proc.send(descriptor, signal.SIGKILL)
            with pytest.raises(ProcessLookupError):
                proc.open_pidfd(process.pid)
        finally:
            os.close(descriptor)


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may have more than 2,000 open."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most <= LARGE:
        pytest.skip("no process may have so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, LARGE + 1), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.usefixtures("many_files")
def test_one_of_a_process_that_has_many_files_open_has_a_large_number() -> None:
    """A sentinel inherits it under that number, and must not fail at the death that it is there for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        first = proc.open_pidfd(process.pid)
        large = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, LARGE)
        os.close(first)
        try:
            watched = WatchedProcess(process.pid, large)
            assert not watched.has_ended()
            process.kill()
            assert watched.has_ended(60)
        finally:
            os.close(large)
