"""What the sentinel does by itself, on a clock of the test's own and with an etcd that only notes what it is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from virtual import Scheduler

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdError, EtcdNoSpace, EtcdUnavailable
from ftcoord.etcd.api import Lease, Op
from ftcoord.primitives import sentinel_main
from ftcoord.primitives.orphans import GRACE
from ftcoord.primitives.sentinel import Order, config_raw
from ftcoord.primitives.sentinel_main import (
    AGAIN_AFTER,
    CALL_TIMEOUT,
    HELP_AFTER,
    Sentinel,
    WatchedProcess,
    _watch,
    ends_silently,
)

TTL = 10.0
COUNT = 50


class Noting:
    """Stands in for the client of etcd. `problem` is what each call fails with; one that etcd never answers takes its
    time-out."""

    made: Noting

    def __init__(self, _config: EtcdConfig) -> None:
        Noting.made = self
        self.problem: EtcdError | None = None
        self.told: list[tuple[str, int]] = []

    def _tell(self, what: str, lease: int, timeout: float) -> None:
        self.told.append((what, lease))
        if isinstance(self.problem, EtcdUnavailable):
            concurrency.sleep(timeout)
        if self.problem is not None and not (what == "revoke" and isinstance(self.problem, EtcdNoSpace)):
            raise self.problem

    def renew(self, lease: int, *, timeout: float) -> int:
        self._tell("renew", lease, timeout)
        return int(TTL)

    def revoke(self, lease: int, *, timeout: float) -> None:
        self._tell("revoke", lease, timeout)

    def grant(self, ttl: int, *, timeout: float) -> Lease:
        self._tell("grant", ttl, timeout)
        return Lease(1, ttl)

    def txn(self, _compares: object, success: Sequence[Op], *, timeout: float) -> None:
        self._tell("write", len(success), timeout)


class Stub(WatchedProcess):
    """A process that is stopped when the test says so, and ends at a time that the test names."""

    def __init__(self) -> None:
        self.pid, self.pidfd, self.stopped = 1, None, False
        self.ends_at = math.inf
        self.ending = False

    def runs(self) -> bool:
        return not self.stopped

    def has_ended(self, timeout: float = 0) -> bool:
        concurrency.sleep(max(min(timeout, self.ends_at - concurrency.now()), 0))
        return concurrency.now() >= self.ends_at

    def is_ending(self) -> bool:
        return self.ending

    def cause(self) -> str:
        return "it died"


@contextmanager
def standing_by(
    monkeypatch: pytest.MonkeyPatch, count: int = 1, patience: float = 1
) -> Iterator[tuple[Sentinel, Stub]]:
    """One that was told of so many leases just now, in virtual time. `patience`: the request timeout."""
    monkeypatch.setattr(sentinel_main, "_client_of", Noting)
    process = Stub()
    sentinel = Sentinel(process)
    sentinel.obey(Order(etcd=0, config=config_raw(EtcdConfig.load("localhost:1", env={}, request_timeout=patience))))
    assert sentinel._etcds[0].client is Noting.made
    for lease in range(count):
        sentinel.obey(Order(etcd=0, keep=lease, at=concurrency.now(), ttl=TTL, deaths="/d", was=(), rests=False))
    yield sentinel, process


def passes(sentinel: Sentinel) -> None:
    """Let time pass until something is due, and do it."""
    concurrency.sleep(max(sentinel.next_due() - concurrency.now(), 0))
    sentinel.renew()


def virtually(scenario: object) -> None:
    Scheduler(0).run(scenario)  # type: ignore[arg-type]


def test_an_etcd_that_hangs_takes_it_away_for_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many leases are due. In between it hears orders, and that the process has ended."""

    def play() -> None:
        with standing_by(monkeypatch, COUNT) as (sentinel, _):
            Noting.made.problem = EtcdUnavailable("it hangs")
            for number in range(5):
                began = concurrency.now()
                passes(sentinel)
                assert len(Noting.made.told) == number + 1
                assert number == 0 or concurrency.now() - began == pytest.approx(AGAIN_AFTER + CALL_TIMEOUT, abs=0.01)
                assert sentinel.next_due() == pytest.approx(concurrency.now() + AGAIN_AFTER, abs=0.01)

    virtually(play)


def test_of_a_process_that_is_stopped_a_lease_is_renewed_once_and_later_not_even_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been stopped just before it would have renewed: a stop of less than a TTL must not end the lease."""

    def play() -> None:
        with standing_by(monkeypatch) as (sentinel, process):
            process.stopped = True
            passes(sentinel)
            assert Noting.made.told == [("renew", 0)]
            renewed_at, looks = concurrency.now(), 0
            while sentinel.next_due() < math.inf:
                passes(sentinel)
                looks += 1
            assert concurrency.now() == pytest.approx(renewed_at + TTL, abs=AGAIN_AFTER)
            assert looks <= TTL / AGAIN_AFTER
            assert Noting.made.told == [("renew", 0)]
            process.stopped = False
            sentinel.obey(
                Order(etcd=0, keep=0, at=concurrency.now(), ttl=TTL, deaths="/d", was=(), rests=False)
            )  # it renewed in time after all
            passes(sentinel)
            assert Noting.made.told == [("renew", 0)] * 2
            process.stopped = True
            passes(sentinel)
            assert Noting.made.told == [("renew", 0)] * 3, "another stop"

    virtually(play)


class Stubborn:
    """Stands in for the orphans: they run on until they are killed."""

    made: list[Stubborn]

    def __init__(self, mark: str) -> None:
        self.mark, self._deadline = mark, concurrency.now() + GRACE
        self.first_look: float | None = None
        Stubborn.made.append(self)

    def look(self) -> bool:
        if self.first_look is None:
            self.first_look = concurrency.now()
        return bool(self.mark) and concurrency.now() < self._deadline


@pytest.fixture
def orphans(monkeypatch: pytest.MonkeyPatch) -> list[Stubborn]:
    """All that were looked for."""
    Stubborn.made = []
    monkeypatch.setattr(sentinel_main, "Orphans", Stubborn)
    return Stubborn.made


def test_it_tries_to_bury_until_the_leases_have_ended(monkeypatch: pytest.MonkeyPatch, orphans: list[Stubborn]) -> None:
    """And ends the orphans after the first try: they hold what others wait for."""

    def play() -> None:
        with standing_by(monkeypatch) as (sentinel, _):
            sentinel.obey(Order(orphans="mark"))
            Noting.made.problem = EtcdUnavailable("it is away")
            sentinel.bury()
            assert concurrency.now() == pytest.approx(TTL, abs=2)
            assert [one.mark for one in orphans] == ["mark"]
            assert orphans[0].first_look == pytest.approx(CALL_TIMEOUT, abs=0.01)
            tries = TTL / (CALL_TIMEOUT + AGAIN_AFTER)
            assert len(Noting.made.told) == pytest.approx(tries, abs=2), "no pause while the orphans end"

    virtually(play)


@pytest.mark.parametrize(
    ("dies_after", "mark", "ends", "takes"),
    [
        (CALL_TIMEOUT / 2, "", True, CALL_TIMEOUT / 2),
        (TTL * HELP_AFTER, "", True, TTL * HELP_AFTER),
        (2 * TTL, "", False, TTL),
        (2 * TTL, "mark", True, 2 * TTL),
    ],
)
def test_a_process_that_has_closed_its_files_is_buried_if_it_dies_before_its_next_renewal(
    monkeypatch: pytest.MonkeyPatch, dies_after: float, mark: str, ends: bool, takes: float
) -> None:
    """That would start another sentinel. Nobody renews its leases meanwhile, and this one does not outlive them, unless
    it has orphans to end."""

    def play() -> None:
        with standing_by(monkeypatch, 2) as (sentinel, process):
            began = concurrency.now()
            process.ends_at = began + dies_after
            sentinel.obey(Order(orphans=mark))
            assert ends_silently(process, sentinel) == ends
            assert concurrency.now() - began == pytest.approx(takes, abs=0.1)
            assert Noting.made.told == []

    virtually(play)


def test_a_process_that_the_kernel_holds_though_it_is_dead_is_buried_when_it_would_renew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It dumps core: nothing tells, and its pipe stays open."""

    def play() -> None:
        with standing_by(monkeypatch) as (sentinel, process):
            silent = SimpleNamespace(register=lambda *_: None, poll=lambda wait: concurrency.sleep(wait / 1000) or [])
            monkeypatch.setattr(sentinel_main.select, "poll", lambda: silent)
            process.ending = True
            assert _watch(process, sentinel)
            assert concurrency.now() == pytest.approx(TTL * HELP_AFTER, abs=0.1)
            assert Noting.made.told == []

    virtually(play)
