"""Rounds that all agree on before anybody starts, limits that all share, and how a run ends and begins again.

torch's agents are deaf from the moment in which `next_rendezvous` returns until all participants of the round have
written to its store: one that returns while another does not is lost for minutes.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import replace

import pytest
from helpers import DEADLINE, eventually
from late import Late
from rdzv_nodes import MakeNodes, Node, all_signalled, is_waiting, join_all, seats_of, waits
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from ftcoord.core import rendezvous_records
from ftcoord.core.rendezvous_records import Round
from ftcoord.core.round_situation import FRESH
from ftcoord.core.verdict import Standing
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import RoundOver
from ftcoord.etcd.api import Batch, Delete, Get, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.group.pace import Look
from ftcoord.rendezvous import pace

FAILURE = ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "none")})
"""What an agent ends with whose workers have used up their restarts."""


def decided(client: EtcdClient, node: Node) -> Round | None:
    kv = client.get(f"{node.handler._settings.prefix}/decided").one
    return rendezvous_records.parse_round(kv.key, kv.value) if kv else None


# -- nobody starts alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def late_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes made from now on have clients whose news can be held back."""
    monkeypatch.setattr("ftcoord.rendezvous.handler.SharedClient", Late)


def news_of(node: Node) -> Late:
    assert isinstance(node.handler._etcd, Late)
    return node.handler._etcd


def test_a_recall_does_not_overtake_the_decision(make_nodes: MakeNodes, client: EtcdClient, late_clients: None) -> None:
    """A node hears of its round only when a newcomer has had it recalled: the others must not have started it."""
    run = make_nodes(2, 3, last_call_timeout=600, settle_timeout=0.2)
    quick, slow = run.add(2, last_call_timeout=1)
    first = waits(quick)
    news_of(slow).hold()
    second = slow.join()
    eventually(lambda: decided(client, quick), what="the first round is decided")
    third = run.one().join()
    recalled = eventually(lambda: (now := decided(client, quick)) and now.recalled and now, what="it is recalled")
    assert not recalled.ready
    news_of(slow).release()
    assert len(seats_of([first, second, third])) == 3


def test_who_hears_late_of_a_round_that_others_started_starts_it_too(
    make_nodes: MakeNodes, client: EtcdClient, late_clients: None
) -> None:
    run = make_nodes(2, 3, last_call_timeout=600)
    quick, slow = run.add(2, last_call_timeout=1)
    first = waits(quick)
    news_of(slow).hold_from(lambda item: isinstance(item, Batch) and b'"ready":true' in item.events[-1].kv.value)
    second = slow.join()
    assert first.result(DEADLINE).round == 1
    newcomer = waits(run.one())
    eventually(lambda: (now := decided(client, quick)) and now.recalled, what="the round is recalled")
    assert not second.done()
    news_of(slow).release_the_last()
    assert seats_of([first, second])[0].world == 2
    assert not newcomer.done()


def test_a_node_that_died_while_it_waited_starts_no_round(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """Its lease lives on, so it is given a seat: torch's agents would wait for it for five minutes."""
    survivor, dead, other, replacement = make_nodes(3, 3, last_call_timeout=600).add(4)
    first = waits(survivor)
    waits(dead)
    dead.crash()
    second = other.join()
    eventually(lambda: decided(client, survivor), what="a round is decided, with the dead one")
    assert not first.done()
    assert not second.done()
    assert len(seats_of([first, second, replacement.join()])) == 3


def test_a_node_that_does_not_take_its_seat_is_left_out(make_nodes: MakeNodes, late_clients: None) -> None:
    """It lives, so its lease does too, but it hears nothing."""
    decider, healthy, deaf = make_nodes(2, 3, last_call_timeout=1).add(3)
    joins = [waits(decider)]
    news_of(deaf).hold()
    deaf.join()
    joins.append(healthy.join())
    assert {seat.world for seat in seats_of(joins)} == {2}
    news_of(deaf).release()


def says_that_it_is_seated(client: EtcdClient, node: Node) -> bool:
    kv = client.get(node.member().group.key).one
    return kv is not None and rendezvous_records.parse_join_request(kv.key, kv.value).seated > 0


def test_a_node_that_died_after_it_took_its_seat_starts_no_round(
    make_nodes: MakeNodes, client: EtcdClient, late_clients: None
) -> None:
    """Its lease lives on while the others wait for a slow one."""
    decider, dead, slow, replacement = make_nodes(3, 3, last_call_timeout=600, lease_ttl=10).add(4)
    first = waits(decider)
    waits(dead)
    news_of(slow).hold()
    third = slow.join()
    eventually(lambda: says_that_it_is_seated(client, dead), what="it takes its seat")
    dead.crash()
    threading.Event().wait(FRESH + 0.5)
    news_of(slow).release()
    assert len(seats_of([first, third, replacement.join()])) == 3


def test_a_join_time_out_ends_no_node_that_has_its_seat(
    make_nodes: MakeNodes, client: EtcdClient, late_clients: None
) -> None:
    run = make_nodes(2, 2)
    impatient, slow = run.one(join_timeout=3), run.one()
    first = waits(impatient)
    news_of(slow).hold()
    second = slow.join()
    eventually(lambda: says_that_it_is_seated(client, impatient), what="it takes its seat")
    threading.Event().wait(3.5)
    assert not first.done()
    news_of(slow).release()
    assert len(seats_of([first, second])) == 2


def test_a_node_that_loses_its_lease_as_its_round_becomes_ready_starts_it(
    make_nodes: MakeNodes, client: EtcdClient
) -> None:
    """The others have started, and are deaf until it has written to the round's store. But not if they have gone on, or
    the run is over: nobody would be there."""
    nodes = make_nodes(2, 2).add(2)
    join_all(nodes)
    node, member = nodes[0].handler._node, nodes[0].member()
    look = Look(Standing.LOST, member.record, replace(node._new_ask(0), after=0, seated=1))
    member.orphan()
    assert node._ready_after_all(look, node.pace) == node.round
    now = decided(client, nodes[1])
    assert now is not None
    key = f"{nodes[1].handler._settings.prefix}/decided"
    client.put(key, rendezvous_records.encode(replace(now, number=now.number + 1)))
    assert node._ready_after_all(look, node.pace) is None
    client.put(key, rendezvous_records.encode(now))
    nodes[1].handler.set_closed()
    assert node._ready_after_all(look, node.pace) is None


def test_who_has_lost_its_lease_takes_no_seat(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """etcd may not have ended the lease yet, and the others would start and wait for it. Nobody waits here: a call that
    waits would join again at once, and revoke the old lease."""
    node = make_nodes(2, 2).one()
    part = node.handler._node
    part.participant.say(part._new_ask(0), part.pace.deadline, part.pace.gone)
    before = client.get(node.member().group.key).one
    node.member().orphan()
    part.participant.reaffirm(replace(part._new_ask(0), seated=1), part.pace)
    assert client.get(before.key).one == before  # type: ignore[union-attr]
    assert not says_that_it_is_seated(client, node)


def test_a_store_whose_number_comes_again_is_empty(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """Of a failed run no fence is left, and somebody has deleted its record."""
    run = make_nodes(1, 1)
    old = run.one()
    join_all([old])
    assert old.info is not None
    old.info.store.set("key", b"old")
    old.end_with(FAILURE)
    client.delete(Span(f"{old.handler._settings.prefix}/decided"))
    new = run.one()
    assert join_all([new])[0].round == 1
    assert new.info is not None
    assert not new.info.store.check(["key"])


def test_a_node_of_a_run_that_was_deleted_writes_nothing_into_the_store_of_the_next_one(
    make_nodes: MakeNodes, client: EtcdClient
) -> None:
    """It is cut off while an operator deletes all keys; so the numbers begin again."""
    run = make_nodes(1, 1)
    old = run.one()
    join_all([old])
    assert old.info is not None
    store = old.info.store
    store.set("key", b"old")
    old.cut_off()
    client.delete(Span(f"{old.handler._settings.prefix}/", is_prefix=True))
    new = run.one()
    assert join_all([new])[0].round == 1
    for late in (lambda: store.set("key", b"old"), lambda: store.add("count", 1), lambda: store.get("absent")):
        with pytest.raises(RoundOver, match="join the next one"):
            late()
    assert new.info is not None
    assert not new.info.store.list_keys()


def test_rounds_go_on_where_they_were_after_the_record_and_all_who_knew_it_are_gone(
    make_nodes: MakeNodes, client: EtcdClient
) -> None:
    run = make_nodes(1, 1)
    old = run.one()
    join_all([old])
    assert join_all([old])[0].round == 2
    assert old.info is not None
    store = old.info.store
    old.crash()
    prefix = old.handler._settings.prefix
    client.txn((), (Delete(Span(f"{prefix}/decided")), Delete(Span(f"{prefix}/members/", is_prefix=True))))
    (seat,) = join_all([run.one()])
    assert seat.round == 3
    assert [kv.key for kv in client.range(Get(Span(f"{prefix}/rounds/", is_prefix=True))).kvs] == [f"{prefix}/rounds/3"]
    with pytest.raises((RoundOver, RuntimeError)):  # the store was closed, and its round is over
        store.set("key", b"late")


def test_a_spare_knows_the_rounds_that_it_heard_of_when_etcd_has_forgotten_them(
    make_nodes: MakeNodes, fragile: EtcdServer
) -> None:
    run = make_nodes(1, 1, on=fragile, lease_ttl=2)
    worker, spare = run.add(2)
    join_all([worker])
    seat = join_all([worker])[0]
    assert seat.round == 2
    join = waits(spare)
    worker.crash()
    fragile.wipe()
    fragile.restart()
    assert join.result(DEADLINE).round > 2


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_node_with_other_limits_is_refused_and_disturbs_nobody(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, 2, run_id="limits").add(2)
    join_all(nodes)
    odd = make_nodes(3, 3, run_id="limits").one()
    with pytest.raises(RendezvousStateError, match=r"--nnodes=2, as .* wants, and this node has --nnodes=3: give all"):
        odd.join().result(DEADLINE)
    assert not any(node.signalled() for node in nodes)


def test_of_nodes_that_contradict_each_other_before_the_first_round_the_newer_is_refused(
    make_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that wait log it at once, and so does the decider."""
    monkeypatch.setattr(pace, "FIRST_LINE", 1e6)
    three, two = make_nodes(3, 3, run_id="contradiction"), make_nodes(1, 3, run_id="contradiction")
    with caplog.at_level(logging.INFO, logger="ftcoord.rendezvous"):
        joins = [waits(three.one()), waits(three.one())]
        with pytest.raises(RendezvousStateError, match=r"--nnodes=3, .* --nnodes=1:3"):
            two.one().join().result(DEADLINE)
    told = [
        one.getMessage()
        for one in caplog.records
        if "was refused: its --nnodes is 1:3, this run's is 3" in one.msg % one.args
    ]
    assert len([one for one in told if "waits for a round: 2 of 3 nodes are there" in one]) == 2
    assert len([one for one in told if "give all nodes the same, or that one another --rdzv-id" in one]) == 1
    assert len(seats_of([*joins, three.one().join()])) == 3


def test_a_node_with_other_limits_is_no_spare_of_the_run(make_nodes: MakeNodes) -> None:
    worker = make_nodes(1, 1, run_id="no spare").one()
    join_all([worker])
    odd = make_nodes(2, 2, run_id="no spare", lease_ttl=600).one()
    join = waits(odd)
    eventually(lambda: odd.handler._node.pace.limits.refusal, what="it knows that it is not wanted")
    worker.finish()
    with pytest.raises(RendezvousStateError, match=r"--nnodes=1, .* --nnodes=2"):
        join.result(DEADLINE)


def test_limits_of_nodes_that_were_killed_bind_nobody(make_nodes: MakeNodes) -> None:
    """Their leases live on for a while, and a new start with other limits must not end for that."""
    old = make_nodes(1, 1, run_id="killed limits", lease_ttl=4).one()
    join_all([old])
    old.crash()
    seats = join_all(make_nodes(2, 2, run_id="killed limits", lease_ttl=4).add(2))
    assert {(seat.world, seat.round) for seat in seats} == {(2, 2)}


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_a_failure_ends_the_run_on_all_nodes(make_nodes: MakeNodes) -> None:
    run = make_nodes(3, 3)
    nodes = run.add(3)
    join_all(nodes)
    nodes[0].end_with(FAILURE)
    all_signalled(nodes[1:])
    for node in nodes[1:]:
        told = r"is over: .* failed; first cause: .* exited with code 1; it may be started again"
        with pytest.raises(RendezvousClosedError, match=told):
            node.join().result(DEADLINE)
    assert nodes[1].info is not None
    with pytest.raises((RoundOver, RuntimeError)):  # so torch's exit barrier waits for nobody
        nodes[1].info.store.set("key", b"late")


def test_workers_that_are_done_disturb_nobody(make_nodes: MakeNodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes = make_nodes(2, 2).add(2)
    join_all(nodes)
    nodes[0].finish()
    eventually(nodes[1].handler.is_closed, what="the run is closed")
    assert not nodes[1].signalled()
    assert nodes[1].info is not None
    nodes[1].info.store.set("torchelastic/agent/terminal_state", b"done")  # the exit barrier goes on
    assert "are stopped" not in caplog.text


def test_a_node_that_the_others_went_on_without_does_not_end_their_run(make_nodes: MakeNodes) -> None:
    run = make_nodes(1, 2)
    cut, other = run.add(2)
    join_all([cut, other])
    cut.cut_off()
    all_signalled([other])
    assert join_all([other])[0].world == 1
    cut.end_with(FAILURE)
    assert not other.handler.is_closed()
    assert not other.signalled()


def test_a_participant_of_a_failed_run_is_no_spare_of_it(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """It lost its lease, and waits as a new incarnation when another one's failure ends the run: no exit code 0."""
    # With a lease that is not renewed just then: it would find out, and be back in its seat before it is missed.
    # And it is not the one that decides, which sees at once that its key is gone.
    nodes = make_nodes(2, 2, settle_timeout=60, last_call_timeout=600, lease_ttl=600).add(2)
    seats_of([waits(nodes[0]), nodes[1].join()])
    client.revoke(nodes[1].lease())
    all_signalled([nodes[1]])
    join = nodes[1].join()
    eventually(lambda: is_waiting(nodes[1], join), what="it waits")
    nodes[0].end_with(FAILURE)
    with pytest.raises(RendezvousClosedError, match="failed"):
        join.result(DEADLINE)


def test_an_agent_that_is_launched_in_an_except_block_closes_the_run_that_it_finished(make_nodes: MakeNodes) -> None:
    run = make_nodes(1, 1)
    node, other = run.add(2)
    try:
        raise ValueError("an earlier try of the user's")
    except ValueError:
        node.handler.next_rendezvous()
        node.handler.shutdown()
    assert other.handler.is_closed()


# -- a run that is started again --------------------------------------------------------------------------------------


def test_a_failed_run_is_started_again_under_its_id(make_nodes: MakeNodes) -> None:
    run = make_nodes(2, 2)
    nodes = run.add(2)
    join_all(nodes)
    nodes[0].end_with(FAILURE)
    again = [node.join() for node in run.add(2)]  # while one of the failed run is still there
    all_signalled(nodes[1:])
    assert not any(join.done() for join in again)
    with pytest.raises(RendezvousClosedError):
        nodes[1].join().result(DEADLINE)
    seats = seats_of(again)
    assert (seats[0].world, seats[0].round) == (2, 2)


def test_a_failed_run_may_be_started_again_with_other_limits_while_a_node_of_it_is_still_ending(
    make_nodes: MakeNodes,
) -> None:
    ttl = 5
    run = make_nodes(2, 2, run_id="other limits again", lease_ttl=ttl)
    failed, slow = run.add(2)
    join_all([failed, slow])
    failed.end_with(FAILURE)
    join = waits(make_nodes(1, 1, run_id="other limits again", lease_ttl=ttl).one())
    threading.Event().wait(2 * ttl)  # longer than it takes to be refused
    assert not join.done()
    slow.fail()
    assert join.result(DEADLINE).round == 2


def test_a_node_that_waited_before_the_end_goes_not_on_from_it(
    make_nodes: MakeNodes, client: EtcdClient, late_clients: None
) -> None:
    """It hears of the end only as a new incarnation."""
    run = make_nodes(1, 2, last_call_timeout=600)
    first = run.one(last_call_timeout=0.5)
    join_all([first])
    late = run.one(lease_ttl=2)
    join = waits(late)
    news_of(late).hold()
    member = late.member()
    first.end_with(FAILURE)
    client.revoke(late.lease())
    eventually(lambda: member.lost, what="its lease is lost")
    news_of(late).release()
    with pytest.raises(SystemExit):
        join.result(DEADLINE)


def test_a_spare_of_a_failed_run_does_not_start_it_again(make_nodes: MakeNodes) -> None:
    run = make_nodes(1, 1)
    worker, spare = run.add(2)
    join_all([worker])
    join = waits(spare)
    worker.end_with(FAILURE)
    with pytest.raises(SystemExit):
        join.result(DEADLINE)
    assert join_all([run.one()])[0].round == 2


@pytest.mark.parametrize(
    ("restart", "failed", "finished", "by_hand"),
    [("failed", True, False, False), ("always", True, True, True), ("never", False, False, False)],
)
def test_which_runs_are_started_again(
    make_nodes: MakeNodes, restart: str, failed: bool, finished: bool, by_hand: bool
) -> None:
    ends = {
        "failed": (failed, lambda node: node.end_with(FAILURE)),
        "finished": (finished, lambda node: node.finish()),
        "by hand": (by_hand, lambda node: (node.handler.set_closed(), node.fail())),
    }
    for name, (goes_on, end) in ends.items():
        run = make_nodes(1, 1, run_id=f"{restart} after {name}", restart=restart)
        first = run.one()
        join_all([first])
        end(first)
        join = run.one().join()
        if goes_on:
            assert join.result(DEADLINE).round == 2
        else:
            with pytest.raises(RendezvousClosedError, match="start a new run under another"):
                join.result(DEADLINE)


# -- what is said -----------------------------------------------------------------------------------------------------


def test_a_join_time_out_says_who_came(make_nodes: MakeNodes) -> None:
    run = make_nodes(3, 3)
    waits(run.one())
    with pytest.raises(RendezvousTimeoutError, match=r"2 of 3 nodes are there \(\S+ \(pid \d+\), \S+ \(pid \d+\)\)"):
        run.one(join_timeout=2).join().result(DEADLINE)


def test_a_node_that_waits_says_for_what(
    make_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace, "FIRST_LINE", 0.2)
    monkeypatch.setattr(pace, "LINE_INTERVAL", 0.2)
    with caplog.at_level(logging.INFO, logger="ftcoord.rendezvous"):
        run, us = make_nodes(2, 4), r"\S+ \(pid \d+\)"

        def logged(line: str) -> None:
            eventually(lambda: re.search(f"waits for a round: {line}", caplog.text), what=line)

        waits(run.one())
        logged(rf"1 of 2 to 4 nodes is there \({us}\); the call ends at \d\d:\d\d:\d\d")
        waits(run.one())
        logged(
            rf"2 of 2 to 4 nodes are there \({us}, {us}\);"
            r" it starts within [56]\d s \(last_call_timeout\), or at once with 2 more"
        )


def test_a_spare_logs_again_and_again_that_it_is_one(
    make_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace, "LINE_INTERVAL", 0.2)
    with caplog.at_level(logging.INFO, logger="ftcoord.rendezvous"):
        run = make_nodes(1, 1)
        join_all(run.add(1))
        waits(run.one())
        line = "round 1 runs on 1 of at most 1 node; this node is a spare"
        eventually(lambda: caplog.text.count(line) > 2, what="it logs it again")


def test_a_decider_that_leaves_says_why(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """Nobody else reads its word of parting: it must have it read itself, before its key is gone."""
    run = make_nodes(1, 2)
    decider, other = run.add(2)
    joins = [waits(decider), other.join()]
    seats_of(joins)
    decider.fail()
    all_signalled([other])
    assert "left (ValueError)" in str(decided(client, other))


def test_why_a_round_ended_is_known_as_far_as_it_can_be(
    make_nodes: MakeNodes, client: EtcdClient, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_nodes(1, 3, lease_ttl=5)
    nodes = run.add(3)
    join_all(nodes)
    nodes[2].fail()
    all_signalled(nodes[:2])
    assert "left (ValueError)" in str(decided(client, nodes[0]))
    join_all(nodes[:2])
    nodes[1].crash()
    all_signalled(nodes[:1])
    assert "is gone (its lease ended)" in str(decided(client, nodes[0]))
    with caplog.at_level(logging.INFO, logger="ftcoord.rendezvous"):
        join_all(nodes[:1])
    assert "round 3: this node is rank 0 of 1, on " in caplog.text
    assert "the round before ended: " in caplog.text
    assert "is gone (its lease ended)" in caplog.text
