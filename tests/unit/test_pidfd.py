"""Descriptors of processes, also in a Python that knows none."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from ftcoord import pidfd


@pytest.mark.parametrize("known", [True, False])
def test_a_process_is_sent_a_signal_and_seen_to_end(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    if not known:
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = pidfd.open_pidfd(process.pid)
        try:
            assert not os.get_inheritable(descriptor)
            assert select.select([descriptor], [], [], 0)[0] == []
            pidfd.send(descriptor, signal.SIGKILL)
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
            found = os.waitid(pidfd.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            assert found is not None
            assert found.si_status == signal.SIGKILL
            process.wait()
            with pytest.raises(ProcessLookupError):
                pidfd.send(descriptor, signal.SIGKILL)
            with pytest.raises(ProcessLookupError):
                pidfd.open_pidfd(process.pid)
        finally:
            os.close(descriptor)
