"""This process's sentinel: it renews the leases while this process is stuck, and when the process dies it reports the
cause and revokes them. See `sentinel_main`."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import signal
import site
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final, TypedDict

from ftcoord import concurrency
from ftcoord.config import OFF, Credentials, Endpoint, EtcdConfig, Tls
from ftcoord.fork import OwnerProcess, hide, unhide
from ftcoord.proc import own_pidfd

log = logging.getLogger(__name__)

SWITCH: Final = "FTCOORD_SENTINEL"
"""The variable that switches sentinels off if it is 0, false, no or off."""
NOT_MEANT: Final = signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""The signals that others send: none that can be blocked ends a sentinel. A scheduler sends SIGUSR1 and others to all
processes of a node. Not those of this program's own faults."""
PROGRAM: Final = "ftcoord.primitives.sentinel_main"
START_PAUSE: Final = 3.0
"""Seconds from the start of a process to the next start at the least: where none can run, many leases would each start
one at every renewal."""
ENDS_WITHIN: Final = 1.0
"""Seconds that a killed process may take to end. One that hangs in the kernel must not delay the renewals."""
_ROOT: Final = str(Path(__file__).parents[2])
_AUTHORITIES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_OUR_VARIABLES: Final = ("FTCOORD_", "ETCDCTL_")


class Sentinel:
    """Starts the process beside this one with the first lease, and ends it with the last, unless it is to end this
    process's orphans: then it stays until this process has ended. Thread-safe.

    If it cannot be started, or ends, one warning is logged. The leases then depend on this process alone, until the
    next order starts another one. Does nothing in a forked child.
    """

    def __init__(self) -> None:
        self._owner = OwnerProcess("this sentinel belongs to the parent process")
        # Guards all below. Held while the process is started and told: that waits for nobody.
        self._lock = concurrency.lock("Sentinel._lock")
        self._etcds: dict[EtcdConfig, int] = {}
        self._kept: dict[int, Order] = {}  # the order that told of each lease
        self._mark = ""  # of the processes to end with this one
        self._process: _Process | None = None
        self._next_start = -math.inf
        self._has_warned = False

    @classmethod
    def of_process(cls) -> Sentinel | None:
        """This process's sentinel; None if sentinels are switched off."""
        return None if os.environ.get(SWITCH, "").strip().lower() in OFF else concurrency.of_process(cls)

    @property
    def pid(self) -> int | None:
        """The sentinel's pid, if it runs."""
        process = self._process
        return process.pid if process else None

    def keep(
        self,
        config: EtcdConfig,
        lease_id: int,
        ttl: float,
        deaths: str,
        was: Sequence[str] = (),
        sent_at: float | None = None,
        *,
        starts: bool = True,
    ) -> None:
        """Guard a lease whose last renewal, for `ttl` seconds, was sent at that monotonic time; None for now. May be
        repeated. Without `starts`, from when a sentinel runs for whatever else: what it guards it guards all at once.

        If this process dies, the cause is written under `death_key(deaths, ...)`, and for the members that it `was`.
        """
        if not self._owner.is_current:
            return
        with self._lock:
            number = self._etcds.get(config)
            orders = []
            if number is None:
                number = self._etcds[config] = len(self._etcds)
                orders = [Order(etcd=number, config=config_raw(config))]
            # Not when it is read: a new sentinel may take seconds to start.
            at = concurrency.now() if sent_at is None else sent_at
            order = Order(etcd=number, keep=lease_id, at=at, ttl=ttl, deaths=deaths, was=was, rests=False)
            self._kept[lease_id] = order
            if not self._send(*orders, order) and starts:
                self._start()

    def rest(self, lease_id: int) -> None:
        """Do not renew a lease for now. It is still revoked if this process dies."""
        if not self._owner.is_current:
            return
        with self._lock:
            if lease_id in self._kept:
                order = self._kept[lease_id] = {**self._kept[lease_id], "rests": True}
                self._send(order)

    def end_orphans(self, mark: str) -> None:
        """When this process has ended, however it ends, end all processes with this mark, see
        `ftcoord.primitives.orphans`. A sentinel runs from now on until then. May be repeated."""
        if not self._owner.is_current:
            return
        with self._lock:
            self._mark = mark
            if not self._send(Order(orphans=mark)):
                self._start()

    def drop(self, lease_id: int) -> None:
        """Stop guarding a lease. Idempotent."""
        if not self._owner.is_current:
            return
        with self._lock:
            if self._kept.pop(lease_id, None) is None:
                return
            self._send(Order(drop=lease_id))
            self._end_if_idle()

    # -- with the lock held -------------------------------------------------------------------------------------

    def _end_if_idle(self) -> None:
        if not self._kept and not self._mark:
            self._end()
            self._etcds.clear()
            self._next_start = -math.inf  # it did not fail

    def _start(self) -> None:
        """Start a process that guards all the leases, unless the last one failed just now."""
        now = concurrency.now()
        if now < self._next_start:
            return
        self._next_start = now + START_PAUSE
        try:
            self._process = _Process(self._owner.pid, _text_of(self._all()))
        except OSError as error:
            self._warn("no sentinel could be started: %s", error)

    def _all(self) -> Iterator[Order]:
        """All orders that a new process needs."""
        for config, number in self._etcds.items():
            yield Order(etcd=number, config=config_raw(config))
        yield from self._kept.values()
        yield Order(orphans=self._mark)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _send(self, *orders: Order) -> bool:
        """Whether there is a process that has all of the orders now, or will get them."""
        if self._process is None:
            return False
        try:
            self._process.tell(_text_of(orders))
        except OSError as error:  # it was killed, or is stopped
            self._end()
            self._warn("the sentinel has ended, or hangs: %s", error)
            return False
        return True

    def _warn(self, problem: str, cause: object) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        log.log(
            level, f"{problem}; until there is another one leases depend on this process alone, and end by time", cause
        )


def _text_of(orders: Iterable[Order]) -> bytes:
    return b"".join(json.dumps(order).encode() + b"\n" for order in orders)


class _Process:
    """The process, and the pipe to it. Raises OSError if it cannot be started."""

    def __init__(self, parent: int, orders: bytes) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("this program is no Python that runs modules")
        with ExitStack() as ends, ExitStack() as undo:
            self._pipe = SentinelPipe()
            ends.callback(self._pipe.reader.close)
            undo.callback(self._pipe.close)
            self._pipe.tell(orders)  # first: once it runs this process may die, before it could tell anything
            pidfd = own_pidfd()
            descriptors = () if pidfd is None else (pidfd,)
            for descriptor in descriptors:
                ends.callback(os.close, descriptor)
            # They are meant for this process, which may want its leases until its end. The new one inherits the mask of
            # the thread that starts it, so none comes before it could ignore them.
            ends.callback(
                signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, NOT_MEANT)
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *map(str, (parent, *descriptors))],
                stdin=self._pipe.reader.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # a signal to this process's group or terminal is not meant for it
                pass_fds=descriptors,
            )
            undo.pop_all()
        self.pid, self.tell = self._process.pid, self._pipe.tell  # never change

    def end(self) -> None:
        """End it: it holds nothing that must be given back."""
        with suppress(PermissionError):  # this process has given up root; the end of the pipe ends it
            self._process.kill()
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN)


def _environment() -> dict[str, str]:
    """The environment for the sentinel: this process's, which other threads may be changing, without ftcoord's own
    variables: neither a login, nor the mark of the processes that end with this one. Another Python finds the same
    ftcoord by it."""
    names = [name for name in list(os.environ) if not name.startswith(_OUR_VARIABLES)]
    found = {name: os.environ.get(name) for name in names}
    for name in _AUTHORITIES:  # it has its own working directory
        found[name] = _absolute(found.get(name))
    if not _is_installed():
        found["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [found.get("PYTHONPATH")])])
    return {name: value for name, value in found.items() if value is not None}


def _is_installed() -> bool:
    """Whether ftcoord is installed where every Python looks automatically, after its own modules. With PYTHONPATH
    Python would look there first, and find files of other packages, such as a `dataclasses.py` for an old Python."""
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return os.path.realpath(_ROOT) in map(os.path.realpath, [*site.getsitepackages(), *users])


class SentinelFor:
    """The sentinel, for the leases of one etcd and one prefix: the `Bystander` of each."""

    def __init__(self, sentinel: Sentinel, config: EtcdConfig, deaths: str, was: Sequence[str]) -> None:
        self._sentinel, self._config, self._deaths, self._was = sentinel, config, deaths, was  # never change

    @classmethod
    def of(cls, config: EtcdConfig | None, deaths: str, was: Sequence[str]) -> SentinelFor | None:
        """None if sentinels are switched off, or no other process can reach that etcd."""
        sentinel = Sentinel.of_process() if config is not None else None
        return None if sentinel is None or config is None else cls(sentinel, config, deaths, was)

    def keep(self, lease_id: int, ttl: float, sent_at: float, *, starts: bool = True) -> None:
        """The lease was renewed for `ttl` seconds, by a request that was sent at that monotonic time."""
        self._sentinel.keep(self._config, lease_id, ttl, self._deaths, self._was, sent_at, starts=starts)

    def rest(self, lease_id: int) -> None:
        """The lease is not to be renewed for now."""
        self._sentinel.rest(lease_id)

    def drop(self, lease_id: int) -> None:
        """The lease no longer needs the sentinel."""
        self._sentinel.drop(lease_id)


# -- the orders -------------------------------------------------------------------------------------------------------


class Order(TypedDict, total=False):
    """One line.

    Fields:
        etcd, config: the number of an etcd, and how to reach it; see `config_raw`.
        etcd, keep, at, ttl, deaths, was, rests: a lease. `at` is when it was renewed, on the monotonic clock that all
            processes of a machine share; `ttl` its TTL in seconds; `etcd` the number of its etcd. If the process dies,
            the cause is written below the prefix `deaths`, for the lease's member id and for the ids in `was`.
            `rests`: do not renew it. May be repeated.
        drop: a lease that no longer needs the sentinel.
        orphans: the mark of the processes to end when this one has ended, empty for none; see
            `ftcoord.primitives.orphans`.
    """

    etcd: int
    config: Mapping[str, Any]
    keep: int
    at: float
    ttl: float
    deaths: str
    was: Sequence[str]
    rests: bool
    drop: int
    orphans: str


def config_from(raw: Mapping[str, Any]) -> EtcdConfig:
    """The configuration that `config_raw` returned."""
    return EtcdConfig(
        tuple(Endpoint(*one) for one in raw["endpoints"]),
        Tls(*raw["tls"]) if raw["tls"] else None,
        Credentials(*raw["login"]) if raw["login"] else None,
        raw["request_timeout"],
    )


def config_raw(config: EtcdConfig) -> dict[str, Any]:
    """A configuration for JSON, password included: for a pipe, never for a command line."""
    tls, login = config.tls, config.credentials
    return {
        "endpoints": [astuple(endpoint) for endpoint in config.endpoints],
        "tls": (*map(_absolute, (tls.ca, tls.cert, tls.key)), tls.server_name) if tls else None,
        "login": (login.user, login.password) if login else None,
        "request_timeout": config.request_timeout,
    }


def _absolute(path: str | None) -> str | None:
    """The sentinel has its own working directory."""
    return path and os.path.abspath(path)


# -- the pipe ---------------------------------------------------------------------------------------------------------

HANGS_AFTER: Final = 30.0
"""Seconds without a read after which the reader counts as hung. Starting takes as long on an overloaded machine."""
LARGE: Final = 1 << 20
"""Bytes that may wait for the reader, if the system allows it: the orders for several thousand leases."""
_NO_HARM: Final[int] = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""If nobody reads any more, a write would send SIGPIPE, which ends a program that does not ignore it; Python does."""
_INT: Final = struct.Struct("i")


class SentinelPipe:
    """Two sockets; another process reads from `reader`. Raises OSError if they cannot be made.

    A forked child loses its copy. Not thread-safe.
    """

    def __init__(self) -> None:
        self._ours, self.reader = socket.socketpair()
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE)
        hide(self._ours.fileno())
        self._unsent, self._left = b"", 0  # what there was no room for, and what nobody had read when it was told last
        self._hangs_since = math.inf  # when it was first seen that nothing was read

    def tell(self, text: bytes) -> None:
        """Write without waiting; text for which there is no room goes with the next write.

        Raises OSError when nobody can read any more. Raises TimeoutError when nothing was read for `HANGS_AFTER`
        seconds, as seen by a write: a rare writer notices it late.
        """
        now, left = concurrency.now(), self._unread()
        if left == 0 or left < self._left:
            self._hangs_since = math.inf
        else:  # it counts from here: this process may have been stopped, and the reader too
            self._hangs_since = min(self._hangs_since, now)
        if now > self._hangs_since + HANGS_AFTER:
            raise TimeoutError("it does not read what it is told")
        self._unsent += text
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self._ours.send(self._unsent, _NO_HARM) :]
        self._left = self._unread()

    def _unread(self) -> int:
        """How many bytes were written and not read: at least as many, and 0 only for none. Where the kernel does not
        say, the bytes for which there was no room."""
        sent = bytes(_INT.size)
        with suppress(OSError):
            sent = fcntl.ioctl(self._ours, termios.TIOCOUTQ, sent)
        return int(_INT.unpack(sent)[0]) + len(self._unsent)

    def close(self) -> None:
        """Close the writing end. Idempotent."""
        if self._ours.fileno() >= 0:
            unhide(self._ours.fileno())
            self._ours.close()
