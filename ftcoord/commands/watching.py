"""`ftcoord watch`: what is told of a job, whenever it changes. One that has lost etcd says so."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.commands.doctor import UNREACHABLE
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, add, etcd_config
from ftcoord.commands.looking import HEALTHY, RULE_FLAGS, UNHEALTHY, add_job, rules_of, status_lines, terminal_of
from ftcoord.commands.output import Terminal, neutral, to_line
from ftcoord.config import full_text
from ftcoord.core.layout import run_prefix, run_span
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Get
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import FORMAT, JobStatus, Watched

if TYPE_CHECKING:
    from ftcoord.etcd.client import EtcdClient

PROBE: Final = 2.0
"""Seconds without a change after which etcd is asked whether it is there; and seconds that it may take to answer."""
SCREEN: Final = 20
"""Members of a table that is shown again and again."""
_CLEAR: Final = "\x1b[H\x1b[2J"


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    watch = commands.add_parser("watch", help="the status of a job, whenever it changes, until Ctrl-C")
    add_job(watch)
    add(watch, (*ETCD_FLAGS, KEYS_FLAG, *RULE_FLAGS, *OUTPUT_FLAGS))
    watch.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.operator.following import follow_job

    job, config, terminal = full_text("JOB", options.job), etcd_config(options), terminal_of(options)
    inbox: concurrency.Queue[JobKeys | BaseException] = concurrency.inbox()
    with _no_warnings(), EtcdClient(config) as etcd, follow_job(etcd, options.key_prefix, job, inbox.put, inbox.put):
        show = _Show(terminal, job, rules_of(options))
        try:
            while True:
                show.next(_newest(inbox), lambda lost: _probe(etcd, options.key_prefix, job, lost=lost))
        except KeyboardInterrupt:
            return show.code()


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What ftcoord would warn of is shown here, in its place."""
    package = logging.getLogger("ftcoord")
    before = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(before)


def _newest(inbox: concurrency.Queue[JobKeys | BaseException]) -> JobKeys | None:
    """The last of what has come, None if nothing did for a while. Raises what ended the follower."""
    try:
        found = inbox.get(timeout=PROBE)
        while not inbox.empty():
            found = inbox.get()
    except concurrency.Empty:
        return None
    if isinstance(found, BaseException):
        raise found
    return found


def _probe(etcd: EtcdClient, key_prefix: str, job: str, *, lost: bool) -> JobKeys | None:
    """See whether etcd answers; if it was lost, also what it has now: nobody knows yet what was missed.

    Raises EtcdError.
    """
    etcd.range(Get(run_span(run_prefix(key_prefix, job)), limit=1, keys_only=True), timeout=PROBE)
    return read_job(etcd, key_prefix, job) if lost else None


class _Show:
    """What is shown, and was last."""

    def __init__(self, terminal: Terminal, job: str, rules: Rules) -> None:
        self._terminal, self._job, self._rules = terminal, job, rules
        self._last: Watched | None = None

    def next(self, keys: JobKeys | None, probe: Callable[[bool], JobKeys | None]) -> None:
        """Show what has changed: the job, or whether etcd answers. Raises EtcdError if it never did.

        Args:
            keys: what has just come from etcd; None if nothing did for a while.
            probe: asks etcd, and is told whether etcd was lost: then it has to return what etcd has now.
        """
        error, status = "", self._last.status if self._last else None
        if keys is None:
            try:
                keys = probe(self._last is not None and not self._last.connected)
            except EtcdError as problem:
                if self._last is None:
                    raise
                error = str(problem)
        if keys is not None:
            status = tell_job(keys, self._rules)
        if status is None:
            return  # etcd answers, and the keys are on their way
        now = Watched(FORMAT, self._job, not error, error, status)
        if _says_the_same(self._last, now):
            self._last = now
            return
        self._last = now
        self._tell(now)

    def code(self) -> int:
        """The exit code: of what was shown last."""
        if self._last is None or not self._last.connected:
            return UNREACHABLE
        return HEALTHY if self._last.status.healthy else UNHEALTHY

    def _tell(self, now: Watched) -> None:
        if self._terminal.format != "table":
            self._terminal.write(to_line(now, self._terminal.format))
        elif self._terminal.is_live:
            self._terminal.write(_CLEAR + "".join(f"{line}\n" for line in self._screen(now)))
        else:
            self._terminal.write(f"{_time()} {_summary(now)}\n")

    def _screen(self, now: Watched) -> Iterator[str]:
        yield f"{_time()}  watching; Ctrl-C ends it"
        if not now.connected:
            yield self._terminal.colour(f"ETCD IS LOST, and what is below is old: {neutral(now.error)}", "bad")
        yield from status_lines(now.status, self._terminal, SCREEN)


def _says_the_same(last: Watched | None, now: Watched) -> bool:
    """Whether only etcd's revision, or the words of an error, differ. Leases are not followed."""
    if last is None or last.connected != now.connected:
        return False
    one, other = last.status, now.status
    return (one.rounds, one.quorum, one.unreadable) == (other.rounds, other.quorum, other.unreadable)


def _summary(now: Watched) -> str:
    """One line."""
    if not now.connected:
        return f"ETCD IS LOST: {neutral(now.error)}"
    parts = [f"revision {now.status.revision}", *_parts(now.status)]
    return "; ".join(parts) if now.status.exists else f"{parts[0]}; etcd has no key of this job"


def _parts(status: JobStatus) -> Iterator[str]:
    yield "healthy" if status.healthy else "needs a look"
    if (rounds := status.rounds) is not None:
        gone = "".join(f", without {one.host}" for one in rounds.missing[:3])
        yield neutral(f"rendezvous {rounds.state}, round {rounds.number} of {rounds.size} nodes{gone}")
        yield neutral(f"next: {rounds.next.reason}")
    if (quorum := status.quorum) is not None:
        gone = "".join(f", without {one.replica_id}" for one in quorum.missing[:3])
        yield neutral(f"quorums {quorum.state}, quorum {quorum.id} of {quorum.size} replicas{gone}")
        yield neutral(f"next: {quorum.next.reason}")
    for one in status.unreadable:
        yield neutral(f"unreadable: {one.key}")


def _time() -> str:
    return datetime.fromtimestamp(concurrency.wall()).strftime("%H:%M:%S")
