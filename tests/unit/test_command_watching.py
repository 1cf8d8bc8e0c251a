"""What a watch shows, with an etcd in memory that may be away."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import builders
import pytest
from doors import Door
from held import TIMER, expired_kv, timers_kv
from virtual import MemoryEtcd
from virtual.etcd import MemoryClient

from ftcoord.commands.ls_status_watch_history_why_doctor import show_change
from ftcoord.commands.shared import Terminal
from ftcoord.core.layout import KEY_PREFIX, decided_key, member_id, member_key, run_prefix, timers_span
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Seat, encode
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Get, KeyValue, RangeResult
from ftcoord.operator import reading
from ftcoord.operator.reading import JobWatch, read_job
from ftcoord.operator.status import Rules

RUN = run_prefix(KEY_PREFIX, "job")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stalling(Door):
    """An etcd that does not answer, or not where timers are asked for."""

    away = stalls = False

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        if self.away:
            raise EtcdUnavailable("it is away\x1b[2J")
        if self.stalls and get.span == timers_span(RUN):
            raise EtcdUnavailable("it stalls")
        return super().range(get, timeout=timeout)


class Screen:
    """A watch, what it has printed, and an etcd that is there or not."""

    def __init__(self, client: MemoryClient, format: str = "json", out: io.StringIO | None = None) -> None:
        self.client, self.etcd, self.out = client, Stalling(client), out or io.StringIO()
        self._terminal = Terminal(format, "never", self.out)
        self.watch = JobWatch(self.etcd, KEY_PREFIX, "job", Rules(), every_timer=self._terminal.is_live)

    def hold(self, *timers: KeyValue) -> None:
        """These are the timers from now on."""
        self.client.delete(timers_span(RUN))
        for kv in timers:
            self.client.put(kv.key, kv.value)

    def ends(self, outcome: str) -> None:
        """The run is over."""
        self.client.put(decided_key(RUN), encode(replace(NO_ROUND, closed="it is over", outcome=outcome)))

    def hear(self, outcome: str = "") -> list[str]:
        """The lines that are added: by the news that the run has ended so, or else by none."""
        if outcome:
            self.ends(outcome)
        before = len(self.out.getvalue())
        if (now := self.watch.take(read_job(self.client, KEY_PREFIX, "job") if outcome else None)) is not None:
            show_change(now, self._terminal)
        return self.out.getvalue()[before:].splitlines()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryClient]:
    monkeypatch.setattr(reading, "TIMERS_INTERVAL", 0)
    monkeypatch.setattr(reading, "TIMERS_REST", 0)
    with MemoryEtcd() as server:
        yield server.client()


@pytest.fixture
def screen(client: MemoryClient) -> Iterator[Screen]:
    made = Screen(client)
    yield made
    made.watch.close()


@pytest.fixture
def table(client: MemoryClient) -> Iterator[Screen]:
    """Its lines are for people."""
    made = Screen(client, "table")
    yield made
    made.watch.close()


def test_what_has_not_changed_is_not_shown_again(screen: Screen) -> None:
    assert len(screen.hear("finished")) == 1
    assert screen.hear("finished") == [], "etcd's revision alone is no change"
    assert screen.hear() == []


def test_one_that_lost_etcd_reports_it_once_and_shows_what_there_is_now_when_it_is_back(screen: Screen) -> None:
    screen.hear("finished")
    screen.etcd.away = True
    lost = json.loads(*screen.hear())
    assert (lost["connected"], lost["error"], lost["status"]["healthy"]) == (False, r"it is away\x1b[2J", True)
    assert screen.hear() == []
    screen.etcd.away = False
    screen.ends("failed")
    back = json.loads(*screen.hear())
    assert (back["connected"], back["error"], back["status"]["healthy"]) == (True, "", False)


def test_a_timer_that_runs_or_is_released_makes_no_line_and_one_that_expires_does(screen: Screen) -> None:
    """A worker may hold another one at each of its steps."""
    screen.hear("finished")
    screen.hold(timers_kv(RUN))
    assert screen.hear() == []
    screen.hold(timers_kv(RUN, replace(TIMER, token=2, wall_ms=1_009_000)))
    assert screen.hear() == []
    screen.hold(timers_kv(RUN), expired_kv(RUN))
    (line,) = screen.hear()
    assert [one["standing"] for one in json.loads(line)["status"]["timers"]] == ["expired"]
    screen.hold()
    assert len(screen.hear()) == 1


def test_an_etcd_that_stalls_while_it_is_asked_for_timers_is_lost_at_once(screen: Screen) -> None:
    """It is not waited for twice; and what had just come is reported all the same."""
    screen.hear("finished")
    screen.etcd.stalls = True
    lost = json.loads(*screen.hear("failed"))
    assert (lost["connected"], lost["error"], lost["status"]["healthy"]) == (False, "it stalls", False)
    screen.etcd.stalls = False
    screen.ends("finished")
    back = json.loads(*screen.hear())
    assert (back["connected"], back["status"]["healthy"]) == (True, True)


def test_a_screen_that_is_redrawn_shows_each_timer(client: MemoryClient) -> None:
    screen = Screen(client, "table", Tty())
    with screen.watch:
        screen.hear("finished")
        screen.hold(timers_kv(RUN))
        assert any("node7" in line for line in screen.hear())
        screen.hold()
        shown = screen.hear()
    assert shown
    assert not any("node7" in line for line in shown)


def test_a_line_names_the_timer_that_expired(table: Screen) -> None:
    table.hear("finished")
    late = replace(TIMER, scope="step\x1b")
    table.hold(timers_kv(RUN, late), expired_kv(RUN, late))
    (line,) = table.hear()
    assert r"timer expired: 'step\x1b' of node7 (pid 7)" in line


def test_a_line_names_who_is_to_leave(table: Screen) -> None:
    lease = table.client.grant(60).id
    seats = (Seat(member_id(lease), "n", "host7"),)
    record = builders.round_(1, seats, drained=("n",), limits=(1, 2))
    for key, value in builders.round_keys(RUN, record).items():
        table.client.put(key, value)
    ask = JoinRequest("n", "10.0.0.1", 5, 0, "host7", "n", 1, 2, seated=1)
    table.client.put(member_key(RUN, member_id(lease)), encode(ask), lease)
    now = table.watch.take(read_job(table.client, KEY_PREFIX, "job"))
    assert now is not None
    show_change(now, Terminal("table", "never", table.out))
    assert "; draining: host7" in table.out.getvalue()


def test_one_that_never_found_etcd_ends(screen: Screen) -> None:
    screen.etcd.away = True
    with pytest.raises(EtcdUnavailable):
        screen.hear()
    assert screen.watch.last is None
