"""Whom a member follows that joins: the tail says who joined last, and is only a shortcut."""

from __future__ import annotations

from typing import Any

from members import Counting, Overtaken
from worlds import PREFIX, Host, World, simulated

from ftcoord import concurrency
from ftcoord.core.layout import member_key, members_span, tail_key
from ftcoord.etcd.api import Etcd, Get, RangeResult, Span
from ftcoord.primitives.group.succession import FIRST_READ_AFTER


class Follower(Counting):
    """Knows whom its owner follows, and whether that needed a look at all members."""

    def __init__(self, real: Etcd) -> None:
        super().__init__(real)
        self.sorted = 0

    def range(self, get: Get, **how: Any) -> RangeResult:
        self.sorted += get.order == "newest"
        return self.real.range(get, **how)


class Row:
    """Hosts that join one after the other, and their doors."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.hosts: list[Host] = []
        self.doors: list[Follower] = []

    def join(self, inner: Any = lambda real: real) -> None:
        def door(real: Etcd) -> Follower:
            self.doors.append(Follower(inner(real)))
            return self.doors[-1]

        self.hosts.append(self._world.host(door=door))

    def follows(self, one: int, ahead: int) -> None:
        """Until host number `one` watches host number `ahead`, and no other member."""
        wanted = [self.hosts[ahead].node.group.key]
        self._world.until(lambda: self._ahead_of(one) == wanted, f"host {one} follows host {ahead}")

    def _ahead_of(self, one: int) -> list[str]:
        members = members_span(PREFIX).start
        return [span.start for span in self.doors[one].watched if span.start.startswith(members) and not span.is_prefix]


@simulated
def test_each_follows_who_joined_before_and_nobody_sorts(world: World) -> None:
    row = Row(world)
    for _ in range(5):
        row.join()
    for number in range(1, 5):
        row.follows(number, number - 1)
    assert [door.sorted for door in row.doors] == [1, 0, 0, 0, 0], "only who finds no tail looks for others"
    assert [host.node.group.place for host in row.hosts] == [1, 2, 3, 4, 5]
    world.agree(*row.hosts)


@simulated
def test_the_tail_goes_with_its_member(world: World) -> None:
    row = Row(world)
    for _ in range(3):
        row.join()
    last = row.hosts[2]
    assert world.observer.get(tail_key(PREFIX)).one.value == last.node.id.encode()
    last.leave()
    assert world.observer.get(tail_key(PREFIX)).one is None
    row.join()
    row.follows(3, 1)
    assert row.doors[3].sorted == 1
    row.join()
    row.follows(4, 3)
    assert row.doors[4].sorted == 0
    world.agree(row.hosts[0], row.hosts[1], *row.hosts[3:])


@simulated
def test_a_tail_that_somebody_else_wrote_is_not_followed(world: World) -> None:
    row = Row(world)
    row.join()
    row.join()
    stranger = world.observer.grant(600).id
    for lease in (0, stranger):
        world.observer.put(tail_key(PREFIX), row.hosts[0].node.id.encode(), lease)
        row.join()
        row.follows(len(row.hosts) - 1, len(row.hosts) - 2)
        assert row.doors[-1].sorted == 1
    world.agree(*row.hosts)


@simulated
def test_who_was_not_answered_when_it_joined_does_not_follow_itself(world: World) -> None:
    """By the second attempt the tail is its own, or that of one who came after it."""
    for somebody_comes in (False, True):
        row = Row(world)
        row.join()
        others: list[Host] = []
        row.join(lambda real: Overtaken(real, lambda: others.append(world.host()) if somebody_comes else None))  # noqa: B023
        row.follows(1, 0)
        world.agree(*row.hosts, *others)
        for host in (*row.hosts, *others):
            host.leave()


@simulated
def test_a_tail_whose_key_is_gone_for_a_moment_is_followed_until_it_is_back(world: World) -> None:
    """Its key was deleted while it lived: it is put back, and is then newer than who follows it."""
    row = Row(world)
    for _ in range(3):
        row.join()
    world.observer.delete(Span(member_key(PREFIX, row.hosts[2].node.id)))
    row.join()
    world.etcd.change_leader()  # so that it looks whether its key is there
    world.until(lambda: world.keys(row.hosts[2].node.group.key), "its key is back")
    row.follows(3, 1)
    row.hosts[0].leave()
    world.agree(*row.hosts[1:])


@simulated
def test_a_dead_members_key_that_somebody_deletes_before_the_next_one_joins_is_missed_soon(world: World) -> None:
    """Its lease lives, and so does the tail; no watch tells of a deletion that came before it."""
    row = Row(world)
    row.join()
    world.agree(*row.hosts)
    row.hosts[0].crash()
    world.observer.delete(Span(row.hosts[0].node.group.key))
    joined = concurrency.now()
    row.join()
    assert row.doors[1].watched[-1].start == row.hosts[0].node.group.key
    world.until(lambda: row.hosts[1].node.group._succession.is_first, "it decides")
    assert concurrency.now() - joined < FIRST_READ_AFTER * 2


@simulated
def test_a_dead_members_key_that_a_stranger_took_is_found_out(world: World) -> None:
    """The watch tells only of its deletion, which never comes; nobody waits for a round who would decide instead."""
    row = Row(world)
    for _ in range(3):
        row.join()
    world.agree(*row.hosts)
    dead = row.hosts[0].node.group.key
    world.observer.put(dead, b"a stranger's")
    row.hosts[0].crash()
    world.until(lambda: row.hosts[1].node.group._succession.is_first, "the next one decides")
    assert dead in world.keys(dead)
