"""The feeds of the page, in memory and virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import builders
import pytest
from reports import made
from virtual import MemoryClient
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.core import history, rendezvous_records
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import event_key, member_id, member_key, run_prefix
from ftcoord.dashboard import feeds
from ftcoord.dashboard.feeds import LEASE_AGE, LEASE_TIMEOUT, Board, LeaseBook, Shown, TooManyViewers
from ftcoord.errors import ClientClosed, EtcdUnavailable
from ftcoord.etcd.api import Get, RangeResult
from ftcoord.operator.report import JobStatus, NodeStatus, RoundsStatus
from ftcoord.operator.status import Rules

PATIENCE = 60.0
"""Virtual seconds."""


def join(client: MemoryClient, host: str, job: str = "job") -> int:
    lease = client.grant(600).id
    ask = builders.ask(host, port=5, host=host, limits=(2, 4))
    client.put(member_key(run_prefix("/f", job), member_id(lease)), rendezvous_records.encode(ask), lease)
    return lease


def hosts(shown: Shown) -> list[str]:
    status: Any = shown.report
    return [one["host"] for one in status["rounds"]["members"]] if status["rounds"] else []


def jobs_in(shown: Shown) -> list[str]:
    listed: Any = shown.report
    return [one["job"] for one in listed["jobs"]] if listed else []


class Eye:
    """A viewer, and how it is woken."""

    def __init__(self, board: Board, job: str | None = "job") -> None:
        self._woken, self._board = concurrency.event(), board
        self._wake = self._woken.set
        self.feed = board.view(job, self._wake)

    def goes(self) -> None:
        self._board.leave(self.feed, self._wake)

    def sees(self, what: Callable[[Shown], bool]) -> Shown:
        """Wait for wakes alone, as the page's stream does."""
        deadline = concurrency.now() + PATIENCE
        while True:
            self._woken.clear()
            news = self.feed.news
            if news is not None and what(news):
                return news
            assert self._woken.wait(deadline - concurrency.now()), f"nothing such is shown, but {news}"


@simulated
def test_each_change_is_shown_to_all_by_one_follower(world: World) -> None:
    client = world.etcd.client()
    with Board(client, "/f", Rules()) as board:
        eyes = [Eye(board) for _ in range(5)]
        join(client, "a")
        lease = join(client, "b")
        for eye in eyes:
            eye.sees(lambda news: news.report is not None and hosts(news) == ["a", "b"])
        assert board.feeds.keys() == {"job"}
        client.revoke(lease)
        for eye in eyes:
            eye.sees(lambda news: hosts(news) == ["a"])
        for eye in eyes[1:]:
            eye.goes()
        assert board.feeds.keys() == {"job"}
        eyes[0].goes()
        eyes[0].goes()
        assert board.feeds.keys() == set()


@simulated
def test_a_lost_etcd_is_told_and_what_was_missed_when_it_is_back(world: World) -> None:
    client, other = world.etcd.client(), world.etcd.client()
    join(other, "a")
    with Board(client, "/f", Rules()) as board:
        job, jobs = Eye(board), Eye(board, None)
        job.sees(lambda news: not news.error and news.report is not None)
        jobs.sees(lambda news: jobs_in(news) == ["job"])
        client.cut_off()
        lost = job.sees(lambda news: bool(news.error))
        assert hosts(lost) == ["a"]
        jobs.sees(lambda news: bool(news.error) and news.report is not None)
        join(other, "b")
        client.reconnect()
        job.sees(lambda news: not news.error and hosts(news) == ["a", "b"])
        jobs.sees(lambda news: not news.error)


@simulated
def test_an_etcd_that_never_answered_is_told_too(world: World) -> None:
    client, other = world.etcd.client(), world.etcd.client()
    client.cut_off()
    with Board(client, "/f", Rules()) as board:
        job = Eye(board)
        assert job.sees(lambda news: bool(news.error)).report is None
        join(other, "a")
        client.reconnect()
        job.sees(lambda news: not news.error and hosts(news) == ["a"])


@simulated
def test_a_board_that_closes_tells_its_viewers_and_takes_no_more(world: World) -> None:
    board = Board(world.etcd.client(), "/f", Rules())
    eye = Eye(board)
    board.close()
    assert eye.sees(lambda news: news.is_last).error == "the page is closing"
    eye.goes()
    with pytest.raises(ClientClosed):
        Eye(board)


@simulated
def test_a_feed_whose_client_is_closed_ends_and_the_next_viewer_gets_another(world: World) -> None:
    client = world.etcd.client()
    with Board(client, "/f", Rules()) as board:
        eye = Eye(board)
        eye.sees(lambda news: news.report is not None)
        client.close()
        eye.sees(lambda news: news.is_last)
        again = Eye(board)
        assert again.feed.news is not eye.feed.news
        eye.goes()
        assert board.feeds.keys() == {"job"}


def view(board: Board, job: str, client: str) -> None:
    board.view(job, concurrency.event().set, client)


@simulated
def test_whoever_looks_at_jobs_that_are_none_leaves_room_for_others(world: World) -> None:
    with Board(world.etcd.client(), "/f", Rules()) as board:
        for at in range(feeds.MOST_JOBS // 2):
            view(board, f"none {at}", "10.0.0.1")
        with pytest.raises(TooManyViewers, match="from your address"):
            view(board, "one more", "10.0.0.1")
        view(board, "job", "10.0.0.2")
        view(board, "job", "10.0.0.1")
        for _ in range(feeds.MOST_VIEWERS // 2 - feeds.MOST_JOBS // 2 - 1):
            view(board, "job", "10.0.0.1")
        with pytest.raises(TooManyViewers, match="from your address"):
            view(board, "job", "10.0.0.1")


def write_event(client: MemoryClient, reason: str) -> None:
    event = HistoryEvent("recalled", 1, reason=reason)
    client.put(event_key(run_prefix("/f", "job"), client.get("x").revision, "w", 0), history.encode(event))


@simulated
def test_the_past_is_told_to_all_viewers_without_reading_etcd_for_each(world: World) -> None:
    client, other = world.etcd.client(), world.etcd.client()
    lease = join(other, "a")
    write_event(other, "the first")
    reads = list[Get]()

    def read(get: Get, *, timeout: float | None = None) -> RangeResult:
        reads.append(get)
        return MemoryClient.range(client, get, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch, Board(client, "/f", Rules()) as board:
        patch.setattr(client, "range", read)
        eyes = [Eye(board)]
        eyes[0].sees(lambda news: reasons(news) == ["the first"])
        before = len(reads)
        eyes += [Eye(board) for _ in range(9)]
        write_event(other, "the second")
        for eye in eyes:
            eye.sees(lambda news: reasons(news) == ["the first", "the second"])
        assert len(reads) - before <= 2  # whether etcd is there, while nothing comes of it
        other.revoke(lease)
        gone = eyes[0].sees(lambda news: not hosts(news))
        status: Any = gone.report
        assert not status["exists"]
        assert reasons(gone) == ["the first", "the second"]


def reasons(news: Shown) -> list[str]:
    return [one["reason"] for one in news.history["events"]] if news.history else []


class Clerk:
    """Answers for leases, and counts."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        self.asked.append(lease_id)
        return (7, 10) if lease_id else (-1, 0)


def leases_in(book: LeaseBook, *members: str) -> list[int | None]:
    """What a viewer of these members is sent of their leases."""
    nodes = [made(NodeStatus, None, one, one, one, "waiting", "", 1) for one in members]
    found: Any = book.lease(made(JobStatus, 1, "job", 1, True, False, made(RoundsStatus, "forming", members=nodes)))
    return [one["lease_left"] for one in found["rounds"]["members"]]


@simulated
def test_leases_are_asked_once_for_all_who_look(world: World) -> None:
    clerk = Clerk()
    book = LeaseBook(clerk.time_left)
    for _ in range(3):
        assert leases_in(book, "0", "a") == [None, 7]
    assert clerk.asked == [0, 10]
    concurrency.sleep(LEASE_AGE)
    leases_in(book, "a")
    assert clerk.asked == [0, 10, 10]


class AwayClerk:
    """An etcd that does not answer, each time for as long as one waits for it."""

    def __init__(self) -> None:
        self.asked = 0

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        self.asked += 1
        concurrency.sleep(5.0 if timeout is None else timeout)
        raise EtcdUnavailable("away")


@simulated
def test_nobody_waits_for_the_leases_of_others_while_etcd_is_away(world: World) -> None:
    clerk, taken = AwayClerk(), concurrency.inbox()
    book, began = LeaseBook(clerk.time_left), concurrency.now()

    def ask(member: str) -> None:
        assert leases_in(book, member, "ff") == [None, None]
        taken.put(concurrency.now() - began)

    for at in range(10):
        concurrency.thread(ask, f"viewer {at}", f"{at}").start()
    assert max(taken.get(timeout=PATIENCE) for _ in range(10)) < LEASE_TIMEOUT + 0.1
    assert clerk.asked == 1
    concurrency.sleep(LEASE_AGE)
    assert leases_in(book, "a") == [None]
    assert clerk.asked == 2
