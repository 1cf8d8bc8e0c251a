"""`ftcoord watch`: the state of a job, whenever it changes, and whether etcd still answers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.commands.codes import HEALTHY, UNHEALTHY, UNREACHABLE
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, add, etcd_config
from ftcoord.commands.jobs import RULE_FLAGS, add_job, rules_of, terminal_of
from ftcoord.commands.looking import health_of, status_lines
from ftcoord.commands.output import Terminal, to_line
from ftcoord.config import full_text
from ftcoord.escaping import counted, neutral
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.told import JobStatus, Watched
from ftcoord.operator.watching import JobWatch, TimerLook, newest, probe

SCREEN: Final = 20
"""Rows of each table on the screen."""
_CLEAR: Final = "\x1b[H\x1b[2J"


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    watch = commands.add_parser(
        "watch",
        help="show the status of a job whenever it changes, until Ctrl-C",
        description="Show the status of a job whenever it changes, until Ctrl-C: one screen on a terminal, otherwise a"
        " line for each change. Reports lost contact with etcd within a few seconds. The exit status is that of the"
        " last state shown.",
    )
    add_job(watch)
    add(watch, (*ETCD_FLAGS, KEYS_FLAG, *RULE_FLAGS, *OUTPUT_FLAGS))
    watch.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.operator.following import follow_job

    job, config, terminal = full_text("JOB", options.job), etcd_config(options), terminal_of(options)
    inbox: concurrency.Queue[JobKeys | BaseException | None] = concurrency.inbox()
    with _no_warnings(), EtcdClient(config) as etcd, follow_job(etcd, options.key_prefix, job, inbox.put, inbox.put):
        timers = TimerLook(etcd, options.key_prefix, job)
        show = _Show(terminal, JobWatch(job, rules_of(options), timers.newest, every_timer=terminal.is_live))
        try:
            while True:
                show.next(newest(inbox), lambda lost: probe(etcd, options.key_prefix, job, lost=lost))
        except KeyboardInterrupt:
            return show.code()


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep ftcoord's warnings off the screen, which shows the same facts itself."""
    package = logging.getLogger("ftcoord")
    before = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(before)


class _Show:
    """What is shown, and was last."""

    def __init__(self, terminal: Terminal, watch: JobWatch) -> None:
        self._terminal, self._watch = terminal, watch

    def next(self, keys: JobKeys | None, probe: Callable[[bool], JobKeys | None]) -> None:
        """Show what has changed, see `JobWatch.next`. Raises EtcdError if etcd never answered."""
        if (now := self._watch.next(keys, probe)) is not None:
            self._tell(now)

    def code(self) -> int:
        """The exit code: of what was shown last."""
        last = self._watch.last
        if last is None or not last.connected:
            return UNREACHABLE
        return HEALTHY if last.status.healthy else UNHEALTHY

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


def _summary(now: Watched) -> str:
    """One line."""
    if not now.connected:
        return f"ETCD IS LOST: {neutral(now.error)}"
    parts = [f"revision {now.status.revision}", *_parts(now.status)]
    return "; ".join(parts) if now.status.exists else f"{parts[0]}; etcd has no key of this job"


def _parts(status: JobStatus) -> Iterator[str]:
    yield health_of(status)
    if (rounds := status.rounds) is not None:
        gone = "".join(f", without {one.host}" for one in rounds.missing[:3])
        leavers = [one.host for one in rounds.members if one.standing == "draining"]
        going = "".join(f", draining {host}" for host in leavers[:3])
        last = f"round {rounds.number} of {counted(rounds.size, 'node')}" if rounds.number else "no round yet"
        yield neutral(f"rendezvous {rounds.state}, {last}{gone}{going}")
        ends = {"closed": rounds.closed, "recalled": rounds.recalled, "the round before ended": rounds.before}
        yield from (neutral(f"{what}: {why}") for what, why in ends.items() if why)
        yield neutral(f"next: {rounds.next.reason}")
    if (quorum := status.quorum) is not None:
        gone = "".join(f", without {one.replica_id}" for one in quorum.missing[:3])
        yield neutral(f"quorums {quorum.state}, quorum {quorum.id} of {quorum.size} replicas{gone}")
        yield neutral(f"next: {quorum.next.reason}")
    for timer in [timer for timer in status.timers if timer.standing != "running"][:3]:
        yield neutral(f"timer {timer.standing}: {timer.scope!r} of {timer.host} (pid {timer.pid})")
    for one in status.unreadable:
        yield neutral(f"unreadable: {one.key}")


def _time() -> str:
    return datetime.fromtimestamp(concurrency.wall()).strftime("%H:%M:%S")
