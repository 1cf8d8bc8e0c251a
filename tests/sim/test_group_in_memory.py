"""Groups under accidents, with the real Group, Session, Mirror and Renewer: many histories of minutes in a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from members import Door, Roll
from virtual import REFUSED, Call, Fate, flaky
from worlds import PREFIX, TTL, Host, World, simulated

from ftcoord import concurrency
from ftcoord.core.lease import SessionState
from ftcoord.errors import LeaseLost
from ftcoord.etcd.api import (
    Began,
    Etcd,
    Event,
    Span,
    Watch,
    WatchItem,
)
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group import membership
from ftcoord.primitives.group.group import CHECK_AFTER, Group
from ftcoord.primitives.group.membership import Membership
from ftcoord.primitives.session import Session


@simulated
def test_members_come_and_go(world: World) -> None:
    first, second = world.host(), world.host()
    world.agree(first, second)
    third = world.host()
    world.agree(first, second, third)
    second.leave()
    world.agree(first, third)
    first.leave()
    assert world.agree(third)["by"] == third.node.id
    world.check_one_history()


@simulated
def test_a_decider_that_dies_is_replaced_when_its_lease_ends(world: World) -> None:
    hosts = [world.host() for _ in range(3)]
    decider = world.agree(*hosts)["by"]
    died = world.scheduler.time
    hosts.pop([host.node.id for host in hosts].index(decider)).crash()
    assert world.agree(*hosts)["by"] in {host.node.id for host in hosts}
    assert 2 / 3 * TTL - 1 < world.scheduler.time - died < TTL + 2
    world.check_one_history()


@simulated
def test_several_that_die_at_once(world: World) -> None:
    hosts = [world.host() for _ in range(5)]
    world.agree(*hosts)
    for host in (hosts[0], hosts[1], hosts[3]):
        host.crash()
    assert world.agree(hosts[2], hosts[4])["by"] in {hosts[2].node.id, hosts[4].node.id}
    world.check_one_history()


@simulated
def test_a_decider_that_stood_still_beyond_its_lease_decides_no_more(world: World) -> None:
    """SIGSTOP, a suspended machine: when it wakes up it believes for a moment that it is the decider still."""
    first, second = world.host(), world.host()
    world.agree(first, second)
    first.pause()
    world.agree(second)
    third = world.host()
    world.agree(second, third)
    first.resume()
    fourth = world.host()
    world.agree(second, third, fourth)
    with pytest.raises(LeaseLost):
        first.node.ask("as if nothing had happened")
    world.until(lambda: first.node.session.state is SessionState.LOST, "it hears that its lease is gone")
    world.check_one_history()


@simulated
def test_a_lease_that_ends_early(world: World) -> None:
    first, second = world.host(), world.host()
    world.agree(first, second)
    world.etcd.expire(first.lease)
    assert world.agree(second)["by"] == second.node.id
    world.until(lambda: first.node.session.state is SessionState.LOST, "its holder hears of it")
    world.check_one_history()


@simulated
def test_requests_and_answers_that_are_lost_or_late(world: World) -> None:
    def fate(number: int) -> object:
        return flaky(
            10 * world.seed + number, refused=0.05, lost_requests=0.1, lost_answers=0.15, late=0.05, delay=0.05
        )

    hosts = [world.host(fate(number)) for number in range(4)]
    world.agree(*hosts)
    hosts[0].leave()
    late = world.host(fate(9))
    world.agree(*hosts[1:], late)
    world.check_one_history()


@simulated
def test_an_outage_longer_than_every_lease_costs_nobody_its_membership(world: World) -> None:
    """etcd counts no time while it is down, and a new leader begins every lease again."""
    hosts = [world.host() for _ in range(3)]
    before = world.agree(*hosts)
    with world.etcd.outage():
        world.sleep(5 * TTL)
        assert {host.node.session.state for host in hosts} == {SessionState.SUSPENDED}
    world.until(
        lambda: {host.node.session.state for host in hosts} == {SessionState.CONNECTED}, "all are connected again"
    )
    world.sleep(2 * TTL)
    assert world.agree(*hosts) == before
    world.agree(*hosts, world.host())
    world.check_one_history()


@simulated
def test_a_member_that_is_cut_off_is_suspended_and_then_lost(world: World) -> None:
    first, second = world.host(), world.host()
    world.agree(first, second)
    first.client.cut_off()
    world.sleep(TTL * 2 / 3 + 0.1)
    assert first.node.session.state is SessionState.SUSPENDED
    assert world.observer.get(first.node.group.key).one is not None, "it stopped trusting before anybody saw it go"
    assert world.agree(second)["by"] == second.node.id
    assert first.node.session.state is SessionState.SUSPENDED, "nobody has told it yet"
    first.client.reconnect()
    world.until(lambda: first.node.session.state is SessionState.LOST, "it is told")
    world.agree(second, world.host())
    world.check_one_history()


@simulated
def test_a_compaction_while_members_are_cut_off(world: World) -> None:
    """Their watches cannot go on where they were: they read again, and miss nothing that counts."""
    hosts = [world.host(ttl=600) for _ in range(3)]
    world.agree(*hosts)
    for host in hosts:
        host.client.cut_off()
    for number in range(5):
        world.observer.put(f"{PREFIX}/else", str(number).encode())
    world.decide(hosts[0].node.rolls[-1]["number"] + 1)
    world.etcd.compact()
    for host in hosts:
        host.client.reconnect()
    world.agree(*hosts, world.host())
    world.check_one_history()


@simulated
def test_a_new_leader_of_etcd_interrupts_watches_and_loses_nothing(world: World) -> None:
    hosts = [world.host() for _ in range(3)]
    for _ in range(3):
        world.etcd.change_leader()
        hosts.append(world.host())
        world.etcd.change_leader()
        world.agree(*hosts)
        hosts.pop(0).leave()
    world.agree(*hosts)
    world.check_one_history()


@simulated
def test_every_key_of_a_member_that_is_deleted_comes_back(world: World) -> None:
    hosts = [world.host() for _ in range(4)]
    world.agree(*hosts)
    order = [0, 1, 2, 3, 2, 0]
    for index in order:
        world.observer.delete(Span(hosts[index].node.group.key))
        world.etcd.change_leader()
        world.until(lambda index=index: world.keys(hosts[index].node.group.key), "its key is back")
    world.agree(*hosts, world.host())


class BeganOnce(Door):
    """Does not tell when a watch stands again, as to one who came to share it while it was interrupted."""

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        told: list[WatchItem] = []

        def once(item: WatchItem) -> None:
            if isinstance(item, Began):
                told.append(item)
            if len(told) < 2 or not isinstance(item, Began):
                deliver(item)

        return self.real.watch(span, start_revision, once, **how)


@simulated
def test_a_decider_finds_out_that_a_decision_was_lost(world: World) -> None:
    """etcd lost it, and others wrote before the decider was back: no revision tells it, and perhaps no watch."""
    first = world.host(door=BeganOnce if world.seed % 2 else Door, ttl=600)
    world.agree(first)
    world.sleep(1)
    before = world.etcd.snapshot()
    lost = world.decide(50)
    world.until(lambda: first.node.rolls[-1]["number"] == 50, "it heard of it")
    first.client.cut_off()
    world.etcd.rewind(before)
    while world.observer.put("/elsewhere", b"").revision < lost:
        pass
    first.client.reconnect()
    second = world.host(ttl=600)
    world.agree(first, second)


@simulated
def test_another_decision_with_the_revision_of_a_lost_one_is_heard(world: World) -> None:
    hosts = [world.host(ttl=600) for _ in range(3)]
    world.agree(*hosts)
    world.sleep(1)
    before = world.etcd.snapshot()
    lost = world.decide(50)
    world.until(lambda: all(host.node.rolls[-1]["number"] == 50 for host in hosts), "all heard of it")
    for host in hosts:
        host.client.cut_off()
    world.etcd.rewind(before)
    assert world.decide(60) == lost
    for host in hosts:
        host.client.reconnect()
    world.until(lambda: all(host.node.rolls[-1]["number"] == 60 for host in hosts), "all heard of the other one")
    world.agree(*hosts, world.host(ttl=600))


@simulated
def test_an_etcd_that_was_wiped_gets_all_members_again(world: World) -> None:
    """Their leases are gone with everything else, so they come back under new ones."""
    empty = world.etcd.snapshot()
    first, second = world.host(), world.host()
    world.agree(first, second)
    world.etcd.rewind(empty)
    world.until(lambda: {host.node.session.state for host in (first, second)} == {SessionState.LOST}, "both are told")
    world.agree(world.host(), world.host(), world.host())


@simulated
def test_nothing_is_decided_while_etcd_has_no_space(world: World) -> None:
    hosts = [world.host() for _ in range(3)]
    before = world.agree(*hosts)
    world.etcd.set_no_space(True)
    hosts.pop(1).leave()
    world.sleep(3 * TTL)
    assert {host.node.session.state for host in hosts} == {SessionState.CONNECTED}, "leases are renewed all the same"
    assert [host.node.rolls[-1] for host in hosts] == [before] * 2
    world.etcd.set_no_space(False)
    world.agree(*hosts)
    world.check_one_history()


@simulated
def test_a_record_that_is_deleted_is_written_again(world: World) -> None:
    first, second = world.host(), world.host()
    for _ in range(3):
        number = world.agree(first, second)["number"]
        world.observer.delete(Span(f"{PREFIX}/decided"))
        world.until(
            lambda number=number: min(host.node.rolls[-1]["number"] for host in (first, second)) > number,
            "both hear of the new one",
        )
    world.check_one_history()


def miss_a_decision(world: World) -> tuple[list[Host], Host]:
    """Three who have heard of a decision, and one whose watch has lost it."""
    first, second, third = world.host(), world.host(), world.host()
    before = world.agree(first, second, third)
    lost: list[Event] = []

    def loses(event: Event) -> bool:
        if event.kv.key.endswith("/decided"):
            lost.append(event)
        return event in lost

    third.client.loses = loses
    fourth = world.host()
    world.agree(first, second, fourth, third, heard_by=(first, second, fourth))
    assert lost
    assert third.node.rolls[-1] == before
    return [first, second, fourth], third


@simulated
def test_changes_that_a_watch_missed_are_made_up_for(world: World) -> None:
    """gRPC's watches lost one change in 2,000 around fork(): the next change of the key shows it."""
    informed, third = miss_a_decision(world)
    third.client.loses = lambda _event: False
    world.agree(*informed, third, world.host())
    world.check_one_history()


@simulated
def test_the_last_change_that_a_watch_missed_is_found_too(world: World) -> None:
    """No later one shows it: the others may all wait for this member."""
    informed, third = miss_a_decision(world)
    before, decided = third.node.rolls[-1], world.etcd.revision
    world.scheduler.sleep(CHECK_AFTER[1] * TTL + 2)
    assert third.node.rolls[-1] == informed[0].node.rolls[-1] != before
    assert world.etcd.revision == decided, "nothing had to be written for it"
    world.check_one_history()


@simulated
def test_a_member_whose_join_the_decider_missed_is_found(world: World) -> None:
    """No later change of its key shows that: it waits for an answer."""
    first, second = world.host(), world.host()
    world.agree(first, second)
    lost: list[Event] = []

    def loses(event: Event) -> bool:
        if "/members/" in event.kv.key:
            lost.append(event)
        return event in lost

    first.client.loses = loses
    third = world.host()
    world.until(lambda: bool(lost), "the join is lost")
    first.client.loses = lambda _event: False
    world.agree(first, second, third)
    world.check_one_history()


@simulated
def test_a_decider_that_missed_a_decision_reads_the_members_again_too(world: World) -> None:
    """They may be those of before that decision, or of an etcd that was restored since."""
    first, second = world.host(), world.host()
    world.agree(first, second)
    first.client.loses = lambda _event: True
    third = world.host()
    world.decide(50)
    world.sleep(1)
    first.client.loses = lambda _event: False
    assert world.agree(first, second, third)["number"] == 51


@simulated
def test_a_member_whose_thread_is_slow(world: World) -> None:
    """It stands still for a while again and again, shorter than its lease lives: nobody takes it for dead."""
    first, second, third = world.host(), world.host(), world.host()
    world.agree(first, second, third)
    for number in range(6):
        slow = (first, second, third)[number % 3]
        slow.pause()
        world.observer.put(f"{PREFIX}/else", b"")
        world.sleep(TTL / 2)
        slow.resume()
        world.sleep(0.5)
    assert [host.node.session.state for host in (first, second, third)] == [SessionState.CONNECTED] * 3
    first.node.ask("again")
    world.until(lambda: third.node.rolls[-1]["members"][first.node.id].startswith("again"), "the third hears of it")
    world.check_one_history()


@simulated
def test_the_record_outlives_its_lease_as_long_as_somebody_decides(world: World) -> None:
    first, second = world.host(), world.host()
    world.agree(first, second)
    kept = world.keys(f"{PREFIX}/decided")
    world.sleep(5 * TTL)
    assert world.keys(f"{PREFIX}/decided") == kept
    for host in (first, second):
        host.crash()
    world.until(lambda: not world.keys(PREFIX), "everything expires")


@simulated
def test_a_host_whose_renewals_alone_get_lost_is_dead_to_the_others(world: World) -> None:
    def fate(call: Call) -> Fate:
        return REFUSED if call.method == "renew" else Fate()

    first, second = world.host(), world.host()
    world.agree(first, second)
    first.client.fate = fate
    assert world.agree(second)["by"] == second.node.id
    world.check_one_history()


@simulated
def test_a_lease_that_ends_while_its_group_is_made_is_told(world: World) -> None:
    """As of a process that is stopped just then. The thread that renews leases does not fail of it."""
    client, changed, told = world.etcd.client(), concurrency.condition("test"), list[str]()

    def late(etcd: Etcd, session: Session, *arguments: Any, **options: Any) -> Group:
        world.etcd.expire(session.lease_id)
        world.sleep(2 * TTL)
        assert session.state is SessionState.LOST
        return Group(etcd, session, *arguments, **options)

    with patch.object(membership, "Group", late):
        member = Membership(
            client,
            PREFIX,
            Roll(PREFIX),
            lambda _key, value, _roster: value,
            changed,
            ttl=TTL,
            record_ttl=60,
            within=TimeLimit(1.0),
            dies_with_process=False,
            lost=lambda: told.append("lost"),
        )
    assert (member.lost, told) == (True, [])
    member.leave(1.0)
    host = world.host()
    assert world.agree(host)["by"] == host.node.id
