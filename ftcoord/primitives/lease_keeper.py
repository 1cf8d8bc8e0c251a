"""The process that renews leases while this one's interpreter is stuck; see `ftcoord.primitives.lease_keeper_main`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import ftcoord
from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.lease_keeper_main import config_text

log = logging.getLogger(__name__)

_ROOT: Final = str(Path(ftcoord.__file__).parent.parent)


class _Keepers:
    """The lease keepers of this process, one for each etcd."""

    def __init__(self) -> None:
        self.lock = concurrency.lock("_Keepers.lock")  # guards known
        self.known: dict[EtcdConfig, LeaseKeeper] = {}


class LeaseKeeper:
    """Renews leases from a process of its own, which lives while there are leases, and never longer than this one.

    If no process can be started, or it is killed twice, a warning says so, and the leases depend on this interpreter
    alone. Thread-safe; does nothing in a forked child.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._owner = OwnerProcess("this lease keeper belongs to the parent process")
        # Guards all below. Held while the process is started and written to: a pipe, so that takes no time.
        self._lock = concurrency.lock("LeaseKeeper._lock")
        self._leases: dict[int, int] = {}  # TTLs by lease
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_process(cls, config: EtcdConfig) -> LeaseKeeper:
        """This process's own for that etcd."""
        keepers = concurrency.of_process(_Keepers)
        with keepers.lock:
            return keepers.known.setdefault(config, cls(config))

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        process = self._process
        return process.pid if process else None

    def keep(self, lease_id: int, ttl: int) -> None:
        """Renew a lease of `ttl` seconds from now on."""
        if not self._owner.is_current:
            return
        with self._lock:
            self._leases[lease_id] = ttl
            if not self._send(f"keep {lease_id:x} {ttl}"):
                self._start()

    def drop(self, lease_id: int) -> None:
        """Stop renewing a lease."""
        if not self._owner.is_current:
            return
        with self._lock:
            if self._leases.pop(lease_id, None) is None:
                return
            if not self._leases:
                self._end()
            elif not self._send(f"drop {lease_id:x}"):
                self._start()

    # -- with the lock held -------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a process that renews all the leases."""
        paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ftcoord.primitives.lease_keeper_main", str(self._owner.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # what a terminal sends is meant for this process
            )
        except OSError as error:
            log.warning("no process could be started to renew leases while this one is busy: %s", error)
            return
        lines = [config_text(self._config), *(f"keep {lease_id:x} {ttl}" for lease_id, ttl in self._leases.items())]
        if not self._send("\n".join(lines)):
            log.warning("leases depend on this process alone: the process to renew them while it is busy has ended")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.kill()  # it holds nothing that must be given back
            process.stdin.close()
            process.wait()

    def _send(self, text: str) -> bool:
        """Whether there is a process to read it."""
        if self._process is None:
            return False
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{text}\n".encode())
        except BrokenPipeError:
            log.warning("the process that renews leases while this one is busy has ended")
            self._end()
            return False
        return True
