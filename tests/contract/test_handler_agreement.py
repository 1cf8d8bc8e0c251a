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
from rdzv_nodes import MakeNodes, Node, all_signalled, decider_first, is_waiting, join_all, seats_of, waits
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from ftcoord.core import rendezvous_records
from ftcoord.core.rendezvous import FRESH
from ftcoord.core.rendezvous_records import RoundHead
from ftcoord.core.verdict import Standing
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.group.use import Look
from ftcoord.rendezvous import pace

FAILURE = ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "none")})
"""What an agent ends with whose workers have used up their restarts."""


def decided(client: EtcdClient, node: Node) -> RoundHead | None:
    kv = client.get(f"{node.handler._settings.prefix}/decided").one
    return rendezvous_records.parse_decided(kv.key, kv.value) if kv else None


# -- nobody starts alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def late_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes made from now on have clients whose news can be held back."""
    monkeypatch.setattr("ftcoord.rendezvous.handler.SharedClient", Late)


def news_of(node: Node) -> Late:
    assert isinstance(node.handler._etcd, Late)
    return node.handler._etcd


def says_that_it_is_seated(client: EtcdClient, node: Node) -> bool:
    kv = client.get(node.member().group.own.key).one
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


def test_a_round_that_etcd_loses_while_seats_are_taken_is_followed_by_another(
    make_nodes: MakeNodes, client: EtcdClient, late_clients: None
) -> None:
    """Who has taken its seat there asks again (G5)."""
    decider, slow = make_nodes(2, 2).add(2)
    first = waits(decider)
    news_of(slow).hold()
    second = slow.join()
    eventually(lambda: says_that_it_is_seated(client, decider), what="it takes its seat")
    client.delete(Span(f"{decider.handler._settings.prefix}/decided"))
    news_of(slow).release()
    assert seats_of([first, second])[0].round == 2


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


def test_a_node_that_takes_another_lease_is_not_called_back(make_nodes: MakeNodes) -> None:
    """Before it has joined under that it knows of no round, which says nothing about its own (R9)."""
    nodes = make_nodes(2, 2).add(2)
    join_all(nodes)
    participant = nodes[0].handler._node.participant
    nodes[0].member().orphan()
    participant.prepare()
    assert not participant.joined
    assert not nodes[0].signalled()
    eventually(lambda: participant.joined, what="it holds its seat again")
    assert not any(node.signalled() for node in nodes)


def test_who_has_lost_its_lease_takes_no_seat(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """etcd may not have ended the lease yet, and the others would start and wait for it. Nobody waits here: a call that
    waits would join again at once, and revoke the old lease."""
    node = make_nodes(2, 2).one()
    part = node.handler._node
    part.participant.say(part._new_ask(0), part.pace.deadline, part.pace.gone)
    before = client.get(node.member().group.own.key).one
    node.member().orphan()
    part.participant.reaffirm(replace(part._new_ask(0), seated=1), part.pace)
    assert client.get(before.key).one == before  # type: ignore[union-attr]
    assert not says_that_it_is_seated(client, node)


# -- the end of a run -------------------------------------------------------------------------------------------------


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
    # And does not know that it has lost it: else it would be back in its seat before it is missed.
    nodes = make_nodes(2, 2, settle_timeout=60, last_call_timeout=600, lease_ttl=600).add(2)
    join_all(nodes)
    nodes = decider_first(nodes)
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


def test_a_decider_that_leaves_says_why(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """Nobody else reads its word of parting: it must have it read itself, before its key is gone."""
    run = make_nodes(1, 2)
    decider, other = run.add(2)
    joins = [waits(decider), other.join()]
    seats_of(joins)
    decider.fail()
    all_signalled([other])
    assert "left (ValueError)" in str(decided(client, other))
