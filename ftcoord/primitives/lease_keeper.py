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
from ftcoord.primitives.lease_keeper_main import config_text

log = logging.getLogger(__name__)

_ROOT: Final = str(Path(ftcoord.__file__).parent.parent)


class LeaseKeeper:
    """Renews leases from a process of its own, which lives as long as there are any, and never longer than this one.

    Where no process can be started a warning says so, and leases depend on this interpreter alone. Thread-safe; does
    nothing in a forked child.
    """

    _known: Final[dict[tuple[int, EtcdConfig], LeaseKeeper]] = {}
    _known_lock: Final = concurrency.lock("LeaseKeeper._known_lock")

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._pid = os.getpid()
        self._lock = concurrency.lock("LeaseKeeper._lock")
        self._leases: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_process(cls, config: EtcdConfig) -> LeaseKeeper:
        """The one for that etcd, of this process."""
        with cls._known_lock:
            return cls._known.setdefault((os.getpid(), config), cls(config))

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        process = self._process
        return process.pid if process else None

    def keep(self, lease_id: int, ttl: int) -> None:
        """Renew a lease of `ttl` seconds from now on."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            if self._process is None:
                self._start()
            self._leases[lease_id] = ttl
            self._send(f"keep {lease_id:x} {ttl}")

    def drop(self, lease_id: int) -> None:
        """Renew it no more."""
        with self._lock:
            if os.getpid() != self._pid or lease_id not in self._leases:
                return
            del self._leases[lease_id]
            self._send(f"drop {lease_id:x}")
            if not self._leases:
                self._end()

    def _start(self) -> None:
        paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ftcoord.primitives.lease_keeper_main", str(self._pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # what a terminal sends is meant for this process
            )
        except OSError as error:
            log.warning("no process could be started to renew leases while this one is busy: %s", error)
            return
        self._send(config_text(self._config))
        for lease_id, ttl in list(self._leases.items()):  # of one that has ended
            self._send(f"keep {lease_id:x} {ttl}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.kill()  # it holds nothing that must be given back
            process.stdin.close()
            process.wait()

    def _send(self, line: str) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            log.warning("the process that renews leases while this one is busy has ended")
            self._end()
