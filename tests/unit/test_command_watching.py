"""What a watch shows, without an etcd."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from ftcoord.commands.output import Terminal
from ftcoord.commands.watching import _Show
from ftcoord.core.layout import decided_key, quorum_prefix, run_prefix
from ftcoord.core.rendezvous_records import NO_ROUND, encode
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import GroupKeys, JobKeys
from ftcoord.operator.status import Rules

RUN = run_prefix("/f", "job")


def keys(outcome: str, revision: int = 5) -> JobKeys:
    record = encode(replace(NO_ROUND, closed="it is over", outcome=outcome))
    decided = KeyValue(decided_key(RUN), record, 1, 1, 1, 0)
    return JobKeys("job", revision, GroupKeys(RUN, decided), GroupKeys(quorum_prefix("/f", "job")), 1)


class Screen:
    """A watch, what it has printed, and an etcd that is there or not."""

    def __init__(self, format: str = "json") -> None:
        self.out = io.StringIO()
        self.show = _Show(Terminal(format, "never", self.out), "job", Rules())
        self.now: JobKeys | None = keys("finished")
        self.asked: list[bool] = []

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
    assert (lost["connected"], lost["error"], lost["status"]["healthy"]) == (False, "it is away\x1b[2J", True)
    assert screen.hear(None) == []
    assert screen.show.code() == 3
    screen.now = keys("failed")
    back = json.loads(*screen.hear(None))
    assert (back["connected"], back["error"], back["status"]["healthy"]) == (True, "", False)
    assert screen.show.code() == 1


def test_lines_say_that_etcd_is_lost() -> None:
    screen = Screen("table")
    screen.hear(keys("finished"))
    screen.now = None
    (line,) = screen.hear(None)
    assert line[9:] == r"ETCD IS LOST: it is away\x1b[2J"


def test_one_that_never_found_etcd_ends() -> None:
    screen = Screen()
    screen.now = None
    with pytest.raises(EtcdUnavailable):
        screen.hear(None)
    assert screen.show.code() == 3
