"""The sentinel of a process: renews its leases while its interpreter is stuck. When it ends, reports the cause and
revokes them.

    python -m ftcoord.primitives.sentinel_main PARENT_PID [PIDFD]

Run as a module, never imported by others. A pidfd reports that the process has ended, for whatever reason. The sentinel
then *buries* it: it writes the cause into etcd, revokes the leases, and ends the processes with the mark of the dead
one. A process that is stopped or traced is not dead: its leases are not renewed meanwhile, and expire. The sentinel has
no terminal, listens on nothing, and ends when it has done this.

The kernel may hold a dead process for minutes before the pidfd reports it: while it dumps core, or hangs in a driver.
So the sentinel checks before it renews a lease in place of the process.

Orders come through standard input, see `ftcoord.primitives.sentinel`. If that ends while the process is alive,
the process has closed its files, and starts another sentinel at its next renewal; or it has become another program by
`exec`, and its leases expire. Until then this sentinel renews nothing, but still buries the process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Final

from ftcoord import concurrency, proc
from ftcoord.config import EtcdConfig
from ftcoord.core.death_records import REMEMBERED_FOR, Death, encode
from ftcoord.core.layout import death_key, member_id
from ftcoord.core.lease import LeaseTimes
from ftcoord.errors import ConfigError, EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown, ThreadNotStarted
from ftcoord.etcd.api import Etcd, Put
from ftcoord.log_once import LogOnce
from ftcoord.primitives.orphans import Orphans
from ftcoord.primitives.sentinel import Order, config_from
from ftcoord.proc import LONGEST_POLL

log = logging.getLogger(__name__)

HELP_AFTER: Final = 1 / 2
"""The part of a TTL after which the sentinel renews a lease that the process, which renews earlier, has not renewed."""
CALL_TIMEOUT: Final = 1.0
"""Seconds that one call may take, or"""
CALL_TIMEOUT_PART: Final = 0.3
"""this part of the etcd's `request_timeout` if that is more: meanwhile the sentinel sees nothing else."""
CLIENT: Final = "ftcoord.etcd.client"
"""The module that loads gRPC, which takes a tenth of a second: a thread does it while the sentinel already watches."""
AGAIN_AFTER: Final = 0.5
"""Seconds between two attempts to renew, or to bury."""
NEXT_LOOK_AFTER: Final = 0.1
"""Seconds between two looks for orphans, once the leases are given up."""
DEATHS_AT_ONCE: Final = 100
"""Causes in one transaction: etcd takes 128 operations."""
_DOES_NOT_RUN: Final = frozenset("TtZXx")
"""States of a process: stopped, traced, zombie, dead."""
_LOOK_AGAIN: Final = 0.01
"""Seconds between two checks without a pidfd."""


class WatchedProcess:
    """This process's parent, which may have ended already.

    Args:
        pid: its pid.
        pidfd: a pidfd of it, which this process has inherited: readable when it has ended. None without pidfds.
    """

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid, self.pidfd = pid, pidfd
        self._born = proc.started(os.getpid())
        self._oom_kills = proc.oom_kills(pid)

    def runs(self) -> bool:
        """Whether it exists and is not stopped. Without /proc, only whether it exists."""
        if os.getppid() != self.pid:  # somebody else may have its number
            return False
        stat = self._own_stat()
        return stat is None or stat.state not in _DOES_NOT_RUN

    def has_ended(self, timeout: float = 0) -> bool:
        """Whether it has ended, or does within `timeout` seconds."""
        if self.pidfd is not None:
            return proc.has_ended(self.pidfd, timeout)
        deadline = concurrency.now() + timeout
        while os.getppid() == self.pid:
            if concurrency.now() >= deadline:
                return False
            concurrency.sleep(_LOOK_AGAIN)
        return True

    def is_ending(self) -> bool:
        """Whether it never returns to its program, though it has not ended yet: it dumps core, frees gigabytes, or was
        killed while it hangs in a driver. That may take minutes. False without /proc."""
        return self._own_stat() is not None and proc.is_doomed(self.pid)

    def status(self) -> int | None:
        """Its status, as `os.wait` returns it; None if it is unknown. For a process that has ended, or is ending.

        /proc has it until the parent has reaped it; afterwards its pidfd does, on a kernel of 2025 or later.
        """
        found = self._status_by_pidfd()
        if found is None and (stat := self._own_stat()) is not None:
            found = proc.status_of(self.pid, stat)
        return self._status_by_pidfd() if found is None else found  # it may have been waited for in between

    def told(self) -> None:
        """Note that it has just reported something: an earlier OOM kill was not of this process."""
        if self._oom_kills is not None:
            self._oom_kills.note()

    def was_oom(self) -> bool:
        """Whether the kernel has killed a process of its control group for lack of memory, shortly before this one's
        last report, or since. For a process that was killed."""
        return self._oom_kills is not None and self._oom_kills.grew()

    def cause(self) -> str:
        """One line: which process it was, and how it ended. For a process that has ended."""
        return f"{socket.gethostname()} (pid {self.pid}) {proc.fate_of(self.status(), self.was_oom())}"

    def _own_stat(self) -> proc.Stat | None:
        """The process in /proc; None if there is none, or it is another process with the same pid: that one is younger
        than this process, and a parent is not."""
        stat = proc.stat_of(self.pid)
        is_older = stat is not None and self._born is not None and stat.started <= self._born
        return stat if is_older else None

    def _status_by_pidfd(self) -> int | None:
        return None if self.pidfd is None else proc.status_after_wait(self.pidfd)


@dataclass(slots=True)
class _Kept:
    """A lease that the sentinel guards, and the member ids `was` that its owner had before.

    `due` is when the sentinel renews it, unless the process does before. `was_spared`: it was renewed once since the
    process was found stopped.
    """

    id: int
    etcd: int
    deaths: str
    was: Sequence[str]
    times: LeaseTimes
    due: float
    was_spared: bool = False


class EtcdOfProcess:
    """An etcd of the process. Its client is made when it is first needed, so that nothing else waits for gRPC.

    Args:
        config: how to reach it.
        client: the client, if there is one already.
    """

    def __init__(self, config: EtcdConfig, client: Etcd | None = None) -> None:
        self._config, self._client = config, client
        self.timeout = max(CALL_TIMEOUT, CALL_TIMEOUT_PART * config.request_timeout)  # of a call; never changes

    @property
    def client(self) -> Etcd:
        """Raises EtcdUnavailable while its TLS files cannot be read."""
        if self._client is None:
            try:
                self._client = _client_of(self._config)
            except ConfigError as error:
                raise EtcdUnavailable(str(error)) from None
        return self._client


def _client_of(config: EtcdConfig) -> Etcd:
    from ftcoord.etcd.client import EtcdClient  # loads gRPC, unless the thread of `main` has

    return EtcdClient(config)


class Sentinel:
    """The orders of the process, and how they are carried out. Not thread-safe."""

    def __init__(self, process: WatchedProcess) -> None:
        self._process = process
        self._etcds: dict[int, EtcdOfProcess] = {}
        self._problem = LogOnce(log)
        self._kept: dict[int, _Kept] = {}
        self._mark = ""

    def next_due(self) -> float:
        """When `renew` has something to do; infinite: not before another order comes."""
        return min((one.due for one in self._kept.values()), default=inf)

    def time_left(self) -> float:
        """Seconds until the last of its leases has expired, if nobody renews any; infinite if it has orphans to end. A
        process that ends closes the pipe when Python frees its objects, on a busy machine seconds before its end."""
        if self._mark:
            return inf
        now = concurrency.now()
        return max((one.times.sent_at + one.times.ttl - now for one in self._kept.values()), default=0.0)

    def obey(self, order: Order) -> None:
        """Carry out one order."""
        if "config" in order:
            self._etcds[order["etcd"]] = EtcdOfProcess(config_from(order["config"]))
        elif "keep" in order:
            lease, at, ttl = order["keep"], order["at"], order["ttl"]
            due = inf if order["rests"] else at + ttl * HELP_AFTER
            self._kept[lease] = _Kept(lease, order["etcd"], order["deaths"], order["was"], LeaseTimes(at, ttl), due)
        elif "orphans" in order:
            self._mark = order["orphans"]
        else:
            self._kept.pop(order["drop"], None)

    def renew(self) -> None:
        """Renew the lease that is due first, if one is due and the process runs. Only one: each may take
        its etcd's `timeout`, and meanwhile the sentinel sees nothing."""
        now = concurrency.now()
        one = min(self._kept.values(), key=attrgetter("due"), default=None)
        if one is None or one.due > now:
            return
        runs = self._process.runs()
        if not runs and one.was_spared:  # once it does again, it says so, or its lease has ended
            one.due = now + AGAIN_AFTER if now < one.times.sent_at + one.times.ttl else inf
            return
        one.was_spared = False
        try:
            etcd = self._etcds[one.etcd]
            ttl = etcd.client.renew(one.id, timeout=etcd.timeout)
        except LeaseLost:  # the process finds out by itself
            del self._kept[one.id]
        except EtcdError as error:  # a lease outlives an outage of etcd
            self._problem.say(f"the sentinel of this process cannot renew its leases: {error}")
            self._put_off(one.etcd)
        else:
            self._problem.forget()
            one.times = LeaseTimes(now, ttl)
            one.due = now + ttl * HELP_AFTER
            one.was_spared = not runs  # or a stop of less than a TTL could end a lease that was about to be renewed

    def _put_off(self, etcd: int) -> None:
        """Pause renewals at this etcd for a moment: every attempt would take as long, and fail."""
        again = concurrency.now() + AGAIN_AFTER
        for one in self._kept.values():
            if one.etcd == etcd:
                one.due = max(one.due, again)

    def bury(self) -> None:
        """Report the cause of the process's death, revoke its leases, and end its orphans.

        Tries until the leases have expired.
        """
        value = encode(Death(self._process.cause(), int(concurrency.wall() * 1000)))
        last = concurrency.now() + max((one.times.ttl for one in self._kept.values()), default=0)
        self._give_up_all(value)  # first: else the others would see workers end, and not know why
        orphans = Orphans(self._mark)
        while orphans.look() or (self._kept and concurrency.now() < last):
            concurrency.sleep(AGAIN_AFTER if self._kept else NEXT_LOOK_AFTER)
            self._give_up_all(value)  # also while orphans are left: the others need not wait for those

    def _give_up_all(self, value: bytes) -> None:
        for number, leases in groupby(sorted(self._kept.values(), key=attrgetter("etcd")), attrgetter("etcd")):
            self._give_up(self._etcds[number], list(leases), value)

    def _give_up(self, etcd: EtcdOfProcess, leases: Sequence[_Kept], value: bytes) -> None:
        """The cause is written first, so anyone who sees that a lease has ended finds it. `bury` repeats failed calls:
        writing the cause twice is harmless."""
        try:
            self._say(etcd, leases, value)
        except (EtcdUnavailable, OutcomeUnknown):
            return
        except EtcdError:  # it takes no cause (no space, no permission), but a lease can be given up all the same
            pass
        with suppress(EtcdError):
            for one in leases:
                etcd.client.revoke(one.id, timeout=etcd.timeout)
                del self._kept[one.id]

    def _say(self, etcd: EtcdOfProcess, leases: Sequence[_Kept], value: bytes) -> None:
        keys = [death_key(one.deaths, name) for one in leases if one.deaths for name in (member_id(one.id), *one.was)]
        if not keys:
            return
        grave = etcd.client.grant(REMEMBERED_FOR, timeout=etcd.timeout).id
        for at in range(0, len(keys), DEATHS_AT_ONCE):
            puts = [Put(key, value, grave) for key in keys[at : at + DEATHS_AT_ONCE]]
            etcd.client.txn((), puts, timeout=etcd.timeout)


def stand_by(process: WatchedProcess) -> None:
    """Carry out orders until the process has ended; then bury it."""
    sentinel = Sentinel(process)
    if not _watch(process, sentinel):
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # whoever reads what the process has said is not to wait for its sentinel
    sentinel.bury()


def _watch(process: WatchedProcess, sentinel: Sentinel) -> bool:
    """Whether the process has ended. Otherwise it is alive, and has closed the pipe."""
    received = b""
    waits = select.poll()
    waits.register(0, select.POLLIN)
    if process.pidfd is not None:
        waits.register(process.pidfd, select.POLLIN)
    while True:
        left = max(sentinel.next_due() - concurrency.now(), 0)
        ready = {fd for fd, _ in waits.poll(None if left == inf else math.ceil(1000 * min(left, LONGEST_POLL)))}
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return ends_silently(process, sentinel)
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                sentinel.obey(json.loads(line))
            process.told()
        elif ready or (process.pidfd is None and process.has_ended()):  # a child may have kept the pipe open
            return True  # only now, since it may have told of leases just before
        elif sentinel.next_due() <= concurrency.now() and process.is_ending():  # which no descriptor says
            return True
        sentinel.renew()


def ends_silently(process: WatchedProcess, sentinel: Sentinel) -> bool:
    """Whether a process that has closed the pipe ends, before it would start another sentinel. One that becomes another
    program closes the pipe too, and nothing else shows that: so its leases are not renewed."""
    if process.has_ended(CALL_TIMEOUT) or process.is_ending():  # which closes it a moment before it shows elsewhere
        return True
    return process.has_ended(max(sentinel.time_left(), 0.0))


def main() -> None:
    try:
        os.fstat(2)
    except OSError:  # the process has none: the number would be a connection's
        os.open(os.devnull, os.O_WRONLY)
    with suppress(ThreadNotStarted):  # then it is loaded when it is needed
        concurrency.thread(import_module, "ftcoord-load", CLIENT).start()
    pid, *pidfd = map(int, sys.argv[1:])
    stand_by(WatchedProcess(pid, pidfd[0] if pidfd else None))


if __name__ == "__main__":
    main()
