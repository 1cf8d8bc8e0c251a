"""What a watch shows, without an etcd."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import builders
import pytest
from held import TIMER, expired_kv, timers_kv

from ftcoord.commands.output import Terminal
from ftcoord.commands.watching import _Show
from ftcoord.core.layout import decided_key, member_id, member_key, quorum_prefix, run_prefix
from ftcoord.core.rendezvous_records import NO_ROUND, Seat, encode
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import GroupKeys, JobKeys
from ftcoord.operator.status import Rules
from ftcoord.operator.watching import JobWatch

RUN = run_prefix("/f", "job")


def keys(outcome: str, revision: int = 5) -> JobKeys:
    record = encode(replace(NO_ROUND, closed="it is over", outcome=outcome))
    decided = KeyValue(decided_key(RUN), record, 1, 1, 1, 0)
    return JobKeys("job", revision, GroupKeys(RUN, decided), GroupKeys(quorum_prefix("/f", "job")), 1)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


class Screen:
    """A watch, what it has printed, and an etcd that is there or not."""

    def __init__(self, format: str = "json", out: io.StringIO | None = None) -> None:
        self.out = out or io.StringIO()
        self.timers: tuple[KeyValue, ...] | None = ()
        terminal = Terminal(format, "never", self.out)
        watch = JobWatch("job", Rules(), self.find_timers, every_timer=terminal.is_live)
        self.show = _Show(terminal, watch)
        self.now: JobKeys | None = keys("finished")
        self.asked: list[bool] = []

    def find_timers(self) -> tuple[KeyValue, ...]:
        if self.timers is None:
            raise EtcdUnavailable("it stalls")
        return self.timers

    def probe(self, lost: bool) -> JobKeys | None:
        self.asked.append(lost)
        if self.now is None:
            raise EtcdUnavailable("it is away\x1b[2J")
        return self.now if lost else None

    def hear(self, found: JobKeys | None) -> list[str]:
        """The lines that this adds."""
        before = len(self.out.getvalue())
        self.show.next(found, self.probe)
        return self.out.getvalue()[before:].splitlines()


def test_what_has_not_changed_is_not_shown_again() -> None:
    screen = Screen()
    assert len(screen.hear(keys("finished"))) == 1
    assert screen.hear(keys("finished", revision=6)) == []
    assert screen.hear(None) == []
    assert screen.asked == [False]
    assert screen.show.code() == 0


def test_one_that_lost_etcd_says_so_once_and_shows_what_there_is_now_when_it_is_back() -> None:
    screen = Screen()
    screen.hear(keys("finished"))
    screen.now = None
    lost = json.loads(*screen.hear(None))
    assert (lost["connected"], lost["error"], lost["status"]["healthy"]) == (False, r"it is away\x1b[2J", True)
    assert screen.hear(None) == []
    assert screen.show.code() == 3
    screen.now = keys("failed")
    back = json.loads(*screen.hear(None))
    assert (back["connected"], back["error"], back["status"]["healthy"]) == (True, "", False)
    assert screen.show.code() == 1


def test_a_timer_that_runs_or_is_released_makes_no_line_and_one_that_expires_does() -> None:
    """A worker may hold another one at each of its steps."""
    screen = Screen()
    screen.hear(keys("finished"))
    screen.timers = (timers_kv(RUN),)
    assert screen.hear(None) == []
    screen.timers = (timers_kv(RUN, replace(TIMER, token=2, wall_ms=1_009_000)),)
    assert screen.hear(None) == []
    screen.timers = (timers_kv(RUN), expired_kv(RUN))
    (line,) = screen.hear(None)
    assert [one["standing"] for one in json.loads(line)["status"]["timers"]] == ["expired"]
    screen.timers = ()
    assert len(screen.hear(None)) == 1


def test_a_screen_that_is_redrawn_shows_each_timer() -> None:
    screen = Screen("table", Tty())
    screen.hear(keys("finished"))
    screen.timers = (timers_kv(RUN),)
    assert any("node7" in line for line in screen.hear(None))
    screen.timers = ()
    shown = screen.hear(None)
    assert shown
    assert not any("node7" in line for line in shown)


def test_a_line_names_who_is_to_leave() -> None:
    lease = member_id(9)
    record = replace(NO_ROUND, number=1, seats=(Seat(lease, "n", "host7"),), drained=("n",), min_nodes=1, max_nodes=2)
    ask = builders.ask("n", port=5, host="host7", seated=1)
    decided = KeyValue(decided_key(RUN), encode(record), 1, 1, 1, 0)
    member = KeyValue(member_key(RUN, lease), encode(ask), 1, 1, 1, 9)
    rounds = GroupKeys(RUN, decided, below_members=(member,))
    (line,) = Screen("table").hear(JobKeys("job", 5, rounds, GroupKeys(quorum_prefix("/f", "job")), 2))
    assert ", draining host7" in line


def test_one_that_never_found_etcd_ends() -> None:
    screen = Screen()
    screen.now = None
    with pytest.raises(EtcdUnavailable):
        screen.hear(None)
    assert screen.show.code() == 3
