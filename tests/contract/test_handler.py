"""What torch's own tests ask of a rendezvous handler, and what ours adds: rounds, spares, close, stores, addresses."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import MakeNodes, Node, all_signalled, join_all, seats_of, waits
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import RoundOver

SHORT = timedelta(milliseconds=200)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_names(make_nodes: MakeNodes) -> None:
    node = make_nodes(1, 1, run_id="my run").one()
    assert node.handler.get_backend() == "etcd-v3"
    assert node.handler.get_run_id() == "my run"
    assert node.handler.num_nodes_waiting() == 0


def test_all_nodes_join(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(8, 8).add(8)
    seats = join_all(nodes)
    assert {(seat.world, seat.round) for seat in seats} == {(8, 1)}
    assert not any(node.signalled() for node in nodes)


def test_a_job_of_one_node_without_an_id_is_a_run_of_its_own(make_nodes: MakeNodes) -> None:
    nodes = [make_nodes(1, 1, run_id="none").one() for _ in range(2)]
    for node in nodes:
        assert join_all([node])[0].round == 1
    assert len({"none", *(node.handler.get_run_id() for node in nodes)}) == 3


def test_a_node_that_timed_out_may_try_again(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, 2)
    impatient = nodes.one(join_timeout=2)
    with pytest.raises(RendezvousTimeoutError):
        impatient.join().result(DEADLINE)
    node = impatient.handler._node
    node._settings = replace(node._settings, times=replace(node._settings.times, join_timeout=DEADLINE))
    other = waits(nodes.one())
    assert len(seats_of([impatient.join(), other])) == 2


# -- late nodes and spares --------------------------------------------------------------------------------------------


def test_a_late_node_is_signalled_and_admitted(make_nodes: MakeNodes) -> None:
    run = make_nodes(2, 3, last_call_timeout=5)
    old = run.add(2)
    before = join_all(old)
    late = run.one()
    join = late.join()
    all_signalled(old)
    assert not join.done()
    after = seats_of([join, *(node.join() for node in old)])
    assert (len(after), after[0].round) == (3, 2)
    assert join.result().rank == 2
    assert after[0] != before[0]
    assert not any(node.signalled() for node in [*old, late])


def test_redundancy_list(make_nodes: MakeNodes) -> None:
    """Spares beyond max are not signalled, wait longer than the join time-out, and replace who is lost."""
    run = make_nodes(2, 2, join_timeout=3)
    first, second = run.add(2, join_timeout=DEADLINE)
    join_all([first, second])
    spare, other = run.add(2, join_timeout=DEADLINE)
    waiting = {spare: waits(spare), other: waits(other)}
    impatient = waits(run.one())
    threading.Event().wait(3.5)
    assert not any(join.done() for join in (impatient, *waiting.values()))
    assert not any(node.signalled() for node in (first, second))
    second.fail()
    all_signalled([first])
    seats_of([first.join(), waiting[spare]])
    assert first.info is not None
    assert (first.info.rank, first.info.world_size) == (0, 2)
    assert not first.signalled()
    assert not waiting[other].done()


# -- ranks and addresses ----------------------------------------------------------------------------------------------


def test_survivors_keep_their_ranks_and_get_a_new_address(make_nodes: MakeNodes) -> None:
    run = make_nodes(2, 4)
    nodes = [run.one(local_addr=f"127.0.0.{host}") for host in (2, 3, 4, 5)]
    by_rank = dict(zip((seat.rank for seat in join_all(nodes)), nodes, strict=True))
    old = by_rank[0].info
    by_rank[0].crash()
    survivors = [by_rank[rank] for rank in (1, 2, 3)]
    all_signalled(survivors)
    seats = dict(zip(survivors, join_all(survivors), strict=True))
    assert seats[by_rank[1]].rank == 0
    assert seats[by_rank[2]].rank == 2
    assert seats[by_rank[3]].rank == 1  # its old rank does not exist any more: it fills the gap
    assert old is not None
    assert old.bootstrap_store_info is not None
    assert seats[by_rank[1]].address == by_rank[1].handler._address != old.bootstrap_store_info.master_addr


def test_local_addr_and_its_default(make_nodes: MakeNodes) -> None:
    (given,) = join_all([make_nodes(1, 1, run_id="given").one(local_addr="localhost")])
    assert given.address == "localhost"
    (found,) = join_all([make_nodes(1, 1, run_id="found").one(local_addr=None)])
    with closing(socket.create_connection((found.address, found.port), timeout=DEADLINE)):
        pass


def test_handlers_of_one_process_share_its_connection(make_nodes: MakeNodes) -> None:
    """Making a further one costs no thread, and the end of one leaves the others their watches."""
    run = make_nodes(1, 3)
    nodes = [run.one()]
    before = set(threading.enumerate())
    nodes += run.add(2)
    assert not set(threading.enumerate()) - before
    join_all(nodes)
    nodes[0].handler._leave()
    all_signalled(nodes[1:])
    join_all(nodes[1:])


# -- stores -----------------------------------------------------------------------------------------------------------


def bootstrap(node: Node) -> TCPStore:
    """As a worker: a client of the store at MASTER_ADDR:PORT."""
    assert node.info is not None
    assert node.info.bootstrap_store_info is not None
    where = node.info.bootstrap_store_info
    return TCPStore(where.master_addr, where.master_port, is_master=False, timeout=timedelta(seconds=DEADLINE))


def test_stores_are_shared_in_a_round_and_fresh_in_the_next(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, 2).add(2)
    join_all(nodes)
    agents = [node.info.store for node in nodes if node.info]
    workers = [bootstrap(node) for node in nodes]
    for writer, reader in (agents, workers):
        writer.set("key", b"1")
        assert reader.get("key") == b"1"
    join_all(nodes)
    for store in [*(node.info.store for node in nodes if node.info), bootstrap(nodes[0]), bootstrap(nodes[1])]:
        assert not store.check(["key"])
        with pytest.raises(DistStoreError, match="timeout"):
            store.wait(["key"], SHORT)


def test_writes_to_the_store_of_an_old_round_are_refused(make_nodes: MakeNodes) -> None:
    """Invariant S3, for a node that was cut off and believes that its round still runs."""
    slow, other = make_nodes(1, 2).add(2)
    join_all([slow, other])
    assert slow.info is not None
    slow.info.store.set("key", b"1")
    slow.cut_off()
    all_signalled([other])
    join_all([other])
    with pytest.raises(RoundOver, match="join the next one"):
        slow.info.store.set("key", b"2")
    assert not slow.info.store.check(["key"])


def test_use_agent_store(make_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_nodes(1, 1).one()
    assert node.handler.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not node.handler.use_agent_store
    (seat,) = join_all([node])
    with closing(socket.create_server((seat.address, seat.port))):
        pass  # the port is free for rank 0's worker


# -- closing ----------------------------------------------------------------------------------------------------------


def test_set_closed_is_seen_by_all(make_nodes: MakeNodes) -> None:
    run = make_nodes(2, 2)
    nodes = run.add(2)
    late = run.one()
    join_all(nodes)
    assert not any(node.handler.is_closed() for node in [*nodes, late])
    nodes[0].handler.set_closed()
    nodes[0].handler.set_closed()
    for node in [*nodes, late]:
        eventually(node.handler.is_closed, what="the run is closed")
    all_signalled(nodes)  # each agent stops its workers, and comes back to hear why
    for node in [*nodes, late]:
        with pytest.raises(RendezvousClosedError, match="is over: closed by"):
            node.join().result(DEADLINE)


def test_shutdown_closes_the_run_and_may_be_called_twice(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, 2).add(2)
    join_all(nodes)
    assert nodes[0].finish()
    eventually(nodes[1].handler.is_closed, what="the run is closed")
    assert nodes[0].finish()
    assert nodes[1].finish()
    assert nodes[0].handler.num_nodes_waiting() == 0


def test_a_spare_leaves_cleanly_when_the_run_closes(make_nodes: MakeNodes) -> None:
    run = make_nodes(1, 1)
    worker, spare, strict = run.one(), run.one(), run.one(on_spare_close="raise")
    join_all([worker])
    exits, raises = waits(spare), waits(strict)
    worker.finish()
    with pytest.raises(SystemExit) as left:
        exits.result(DEADLINE)
    assert left.value.code == 0
    with pytest.raises(RendezvousGracefulExitError):
        raises.result(DEADLINE)
    with pytest.raises(RendezvousClosedError):
        run.one().join().result(DEADLINE)


@pytest.mark.parametrize("error", [ValueError("local"), SystemExit(0), RendezvousTimeoutError(), KeyboardInterrupt()])
def test_a_local_error_leaves_the_run_to_the_others(make_nodes: MakeNodes, error: BaseException) -> None:
    run = make_nodes(1, 2, settle_timeout=60)
    nodes = run.add(2)
    join_all(nodes)
    nodes[0].end_with(error)
    all_signalled(nodes[1:])
    assert not nodes[1].handler.is_closed()
    assert len(join_all([nodes[1], run.one()])) == 2


# -- errors and events ------------------------------------------------------------------------------------------------


def test_an_etcd_that_starts_later_is_waited_for(fragile: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    """As a pod's that starts before etcd's."""
    fragile.kill()
    later = threading.Timer(2, fragile.restart)
    later.start()
    try:
        node = Node(fragile.get_endpoint(), "later", (1, 1), read_timeout=0.5)
    finally:
        later.join()
    join_all([node])
    node.finish()
    said = [message for message in caplog.messages if "trying again" in message]
    assert len(said) == 1
    assert re.match(r"no etcd at .*: connection refused.* trying again for \d+ s \(join_timeout\)", said[0])


def test_settings_that_do_not_fit_are_not_waited_for(etcd: EtcdServer) -> None:
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="it does not answer in TLS"):
        Node(f"https://{etcd.get_endpoint()}", "run", (1, 1), read_timeout=1, join_timeout=10 * DEADLINE)
    assert time.monotonic() - began < DEADLINE
