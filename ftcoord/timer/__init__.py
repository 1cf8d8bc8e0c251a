"""Expiration timers in etcd, for torch's `configure()` and `expires()`. They survive restarts; every host sees them.

    import torch.distributed.elastic.timer as timer
    timer.configure(ftcoord.timer.EtcdTimerClient())     # in a worker of torchrun, with rdzv_conf timers=1
    with timer.expires(after=60):
        ...

See `docs/timers.md`. `EtcdTimerClient` and `EtcdTimerServer` need torch, and load it when they are first used. The rest
reads a run's timers from any host.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import mmap
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency, proc
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import KEY_PREFIX, is_expired_key, timers_span
from ftcoord.core.timers import MOST_TIMERS, Timer, TimerInfo, Worker, inform, parse_timers
from ftcoord.errors import ConfigError, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue
from ftcoord.etcd.client import Namespace, SharedClient
from ftcoord.primitives.sentinel import config_from, config_raw

if TYPE_CHECKING:
    from ftcoord.timer.etcd_timer import EtcdTimerClient, EtcdTimerServer

log = logging.getLogger(__name__)

VARIABLE: Final = "FTCOORD_TIMERS"
"""The variable in which an agent describes its run and its etcd to its workers."""
_PASSWORDS: Final = ("FTCOORD_PASSWORD", "FTCOORD_PASSWORD_FILE", "ETCDCTL_USER", "ETCDCTL_PASSWORD")
_WIDTH: Final = 8  # bytes of a token in a ledger

__all__ = ["EtcdTimerClient", "EtcdTimerServer", "TimerInfo", "active"]


def __getattr__(name: str) -> Any:
    if name not in {"EtcdTimerClient", "EtcdTimerServer"}:
        raise AttributeError(f"module 'ftcoord.timer' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("ftcoord.timer.etcd_timer"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"ftcoord.timer.{name} needs PyTorch: pip install torch") from error


def active(
    run: str, etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None, *, key_prefix: str = KEY_PREFIX
) -> list[TimerInfo]:
    """The running timers of all hosts, the one with the least time left first. Costs one read.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    Raises ConfigError for bad arguments, before any socket is opened, and EtcdError when etcd cannot be read within the
    client's default timeout (5 s).
    """
    with Namespace.open(run, etcd, key_prefix) as place:
        found = place.etcd.range(Get(timers_span(place.prefix))).kvs
    expired = {timer.token for kv in found if is_expired_key(kv.key) for _, timer in timers_in(kv)}
    running = (pair for kv in found if not is_expired_key(kv.key) for pair in timers_in(kv))
    infos = (_inform(worker, timer) for worker, timer in running if timer.token not in expired)
    return sorted(infos, key=lambda info: info.left)


# -- what a worker holds ----------------------------------------------------------------------------------------------


class Ledger:
    """This process's timers of a run, in memory that other processes of its host can read: for each slot the token of
    the timer in it, 0 for none. It is an anonymous file (memfd), which the kernel frees when the process ends. Written
    through a mapping: fast, and never into another file that got its descriptor."""

    def __init__(self, prefix: str) -> None:
        self.fd = os.memfd_create(_name(prefix))
        os.ftruncate(self.fd, MOST_TIMERS * _WIDTH)
        self._memory = mmap.mmap(self.fd, MOST_TIMERS * _WIDTH)

    def note(self, slot: int, token: int) -> None:
        """Note that the timer `token`, 1 to 2**63 - 1, is held; 0: none is."""
        self._memory[slot * _WIDTH : (slot + 1) * _WIDTH] = token.to_bytes(_WIDTH, "little")

    def close(self) -> None:
        """Release all timers, and free the memory."""
        self._memory.close()
        os.close(self.fd)


def holds(prefix: str, worker: Worker, timer: Timer) -> bool:
    """Whether that very process runs, and holds this timer of this run.

    Raises PermissionError if its memory may not be read: that takes the same user, or the right to trace the process.
    """
    path = f"{proc.PROC}/{worker.pid}/fd/{worker.ledger}"
    try:
        if proc.started(worker.pid) != worker.start or not os.readlink(path).startswith(f"/memfd:{_name(prefix)}"):
            return False
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), _WIDTH, timer.slot * _WIDTH) == timer.token.to_bytes(_WIDTH, "little")
    except (FileNotFoundError, ProcessLookupError):
        return False


@functools.cache
def _name(prefix: str) -> str:
    """The name of a run's ledgers."""
    return f"ftcoord-timers-{hashlib.blake2b(prefix.encode(), digest_size=8).hexdigest()}"


def this_process(ledger: int) -> Worker:
    """This process as a worker. Raises ConfigError without /proc."""
    pid, rank, node = os.getpid(), os.environ.get("RANK", ""), socket.gethostname()
    number = int(rank) if rank.isascii() and rank.isdigit() else -1
    return Worker(host=host_id(), pid=pid, start=proc.started(pid) or 0, node=node, rank=number, ledger=ledger)


def timers_in(kv: KeyValue) -> list[tuple[Worker, Timer]]:
    """The timers in a key; none, with a warning, if it holds something else."""
    try:
        held = parse_timers(kv.key, kv.value)
    except StateError as error:
        log.warning("no timer: %s", error)
        return []
    return [(held.worker, timer) for timer in held.timers]


@functools.cache
def host_id() -> str:
    """Identifies this boot of the machine, and the namespaces of its pids and its monotonic clock.

    Raises ConfigError without /proc.
    """
    try:
        return hashlib.blake2b(proc.host_name().encode(), digest_size=8).hexdigest()
    except OSError as error:
        raise ConfigError(
            "platform", sys.platform, "timers tell processes apart by Linux's /proc: use Linux"
        ) from error


def _inform(worker: Worker, timer: Timer) -> TimerInfo:
    try:
        here = host_id()
    except ConfigError:  # not Linux: it has no timers of its own, but may read those of others
        here = ""
    return inform(worker, timer, here, concurrency.now(), concurrency.wall())


# -- what an agent gives to its workers --------------------------------------------------------------------------------


def describe(prefix: str, config: EtcdConfig, with_password: bool = False) -> str:
    """The variable's value for a run. The password is included only for an embedded etcd: else an agent takes it from
    the environment, or from a file named there, so workers have it."""
    raw = config_raw(config)
    if config.credentials is not None and not with_password:
        raw["login"] = (config.credentials.user, "")
    return json.dumps({"prefix": prefix, **raw})


def inherited(env: Mapping[str, str] | None = None) -> Namespace:
    """The run that the agent serves. Raises ConfigError when there is none, before any socket is opened."""
    variables = os.environ if env is None else env
    if not (text := variables.get(VARIABLE, "")):
        allowed = "name the run, or start this worker with torchrun and timers=1 in --rdzv-conf"
        raise ConfigError("run", None, allowed)
    try:
        told = dict(json.loads(text))
        prefix, config = told["prefix"], config_from(told)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(VARIABLE, "<text>", "this is not what an agent of ftcoord sets; unset it") from error
    if config.credentials is not None and not config.credentials.password:
        passwords = {name: variables[name] for name in _PASSWORDS if name in variables}
        login = EtcdConfig.load(user=config.credentials.user, env=passwords).credentials
        config = replace(config, credentials=login)
    client = SharedClient(config)
    return Namespace(prefix, client, client)
