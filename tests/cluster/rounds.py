"""Nodes that meet in one round after the other, as agents whose workers fail now and then; and what they were told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from copy import copy

from helpers import DEADLINE, Seen
from invariants import check_succession
from rdzv_nodes import Node, Nodes, Seat, spawn
from store_history import History, Operation, check_reads

from ftcoord.core import layout, rendezvous_records
from ftcoord.etcd.api import Batch, Get, KeyValue, Span
from ftcoord.etcd.client import EtcdClient

LOOK = 0.02
"""Seconds between two looks of an agent (torch's own looks every 100 ms, and every 30 s by default)."""


class Rounds:
    """Nodes of a run; each comes back when it is called, or when its own workers fail: after half a second at most.

    Args:
        endpoints: for each node.
        client: to read etcd's own record with.
        lease_ttl: seconds.
    """

    def __init__(self, endpoints: Sequence[str], client: EtcdClient, run_id: str, lease_ttl: float) -> None:
        self.operations: list[Operation] = []
        self.seats: list[Seat] = []
        self.answered = [0] * len(endpoints)
        self.errors: list[BaseException] = []
        self._client, self._prefix = client, layout.run_prefix(layout.KEY_PREFIX, run_id)
        self._key = layout.decided_key(self._prefix)
        self._from = client.get(self._key).revision + 1
        self._stopping = threading.Event()
        conf = {"lease_ttl": lease_ttl, "last_call_timeout": 2 * DEADLINE, "join_timeout": 2 * DEADLINE}
        self._nodes = [Nodes(one, run_id, (2, len(endpoints)), **conf) for one in endpoints]
        self._threads = [
            threading.Thread(target=self._agent, args=(number, nodes.one())) for number, nodes in enumerate(self._nodes)
        ]
        for thread in self._threads:
            thread.start()

    def small(self) -> int:
        """In how many rounds somebody was missing."""
        return len({seat.round for seat in list(self.seats) if seat.world < len(self._nodes)})

    def stop(self) -> None:
        """Whoever waits for a round then has no answer."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors

    def judge(self) -> None:
        """After `stop`: what the nodes were told fits etcd's own record, in which no number comes twice."""
        asked = [copy(one) for one in list(self.operations)]  # of a round that comes about after this nothing is known
        ranks = [(seat.round, seat.rank) for seat in list(self.seats)]
        assert len(set(ranks)) == len(ranks), "two nodes have one rank"
        findings = check_reads(asked, self._history())
        assert not findings, findings

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for nodes in self._nodes:
            nodes.end()

    def _history(self) -> History:
        """Each round, and the revision that it was decided at."""
        seen = Seen()
        watch = self._client.watch(Span(self._key), self._from, seen)
        last = self._client.get(self._key, timeout=DEADLINE).kvs[0].mod_revision
        decided: list[tuple[int, bytes | None]] = []
        last_record, at = rendezvous_records.Round.of(rendezvous_records.NO_ROUND), 0
        while at < last:
            item = seen.next()
            assert not isinstance(item, Exception), item
            for event in item.events if isinstance(item, Batch) else ():
                at, record = event.kv.mod_revision, self._round_in(event.kv)
                check_succession(last_record, record)
                if record.number > last_record.number:
                    decided.append((at, _of(record)))
                last_record = record
        watch.cancel()
        return decided

    def _round_in(self, decided: KeyValue) -> rendezvous_records.Round:
        """The round of a record, with its seats as they were then: the next one deletes them."""
        head = rendezvous_records.parse_decided(decided.key, decided.value)
        found = self._client.range(Get(layout.seats_span(self._prefix, head.name), revision=decided.mod_revision))
        return rendezvous_records.seated(self._prefix, head, {kv.key: kv.value for kv in found.kvs})

    def _agent(self, number: int, node: Node) -> None:
        dice = random.Random(number)
        try:
            while not self._stopping.is_set():
                if not self._joined(spawn(lambda: self._join(f"node-{number}", node))):
                    return
                self.answered[number] += 1
                fails = time.monotonic() + dice.uniform(0.1, 0.5)
                while not node.signalled() and time.monotonic() < fails:
                    self._stopping.wait(LOOK)
        except Exception as error:  # shown by whoever waits for progress
            if not self._stopping.is_set():
                self.errors.append(error)

    def _joined(self, join: Future[None]) -> bool:
        """Wait for it, or until nobody waits any more."""
        while not wait([join], LOOK).done:
            if self._stopping.is_set():
                return False
        join.result()
        return True

    def _join(self, name: str, node: Node) -> None:
        operation = Operation("get", self._key, (), time.monotonic(), client=name)
        self.operations.append(operation)
        seat = node.join().result()
        operation.told = _told(seat.round, seat.world, seat.address, seat.port)
        operation.ended = time.monotonic()
        self.seats.append(seat)


def _of(record: rendezvous_records.Round) -> bytes:
    return _told(record.number, record.size, record.address, record.port)


def _told(number: int, world: int, address: str, port: int) -> bytes:
    return f"round {number} of {world} at {address}:{port}".encode()
