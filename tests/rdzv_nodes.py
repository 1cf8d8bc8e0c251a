"""Nodes of a rendezvous for tests: handlers on threads of this process, and agents that are processes of their own.

Run as a script this is such a process: see `NodeProcess`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pytest
import warm
from grpc import _channel
from helpers import DEADLINE, eventually, freeze
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from ftcoord.core.rendezvous_records import RoundHead
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import RoundOver
from ftcoord.etcd.api import Get, KeyValue, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.group.participant import Membership
from ftcoord.rendezvous.handler import EtcdRendezvousHandler, create_handler

T = TypeVar("T")


def spawn(call: Callable[[], T]) -> Future[T]:
    """Run `call` on a daemon thread; its result or exception, SystemExit too, goes into the future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed over to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass(frozen=True)
class Seat:
    """What a node was told: its rank, the world size and the bootstrap address, and the round's number."""

    rank: int
    world: int
    address: str
    port: int
    round: int


class Node:
    """A handler, driven as an agent drives it but for the thread. Ends with `crash()`, `fail()` or `finish()`."""

    def __init__(
        self, endpoint: str, run_id: str, nodes: tuple[int, int], local_addr: str | None = "127.0.0.1", **conf: Any
    ) -> None:
        conf = {"join_timeout": DEADLINE, "lease_ttl": 6, "settle_timeout": 0.2, "last_call_timeout": 60, **conf}
        handler = create_handler(RendezvousParameters("etcd-v3", endpoint, run_id, *nodes, local_addr, **conf))
        assert isinstance(handler, EtcdRendezvousHandler)
        self.handler = handler
        self.info: RendezvousInfo | None = None

    def join(self) -> Future[Seat]:
        """Call next_rendezvous on a thread."""
        return spawn(self._join)

    def _join(self) -> Seat:
        self.info = self.handler.next_rendezvous()
        bootstrap, round_ = self.info.bootstrap_store_info, self.handler._node.round
        assert bootstrap is not None
        assert round_ is not None
        return Seat(self.info.rank, self.info.world_size, bootstrap.master_addr, bootstrap.master_port, round_.number)

    def signalled(self) -> bool:
        """Whether the agent would come back to the rendezvous."""
        return self.handler.num_nodes_waiting() > 0

    def member(self) -> Membership[RoundHead]:
        """This node in the group, as it is now."""
        member = self.handler._node.participant.member
        assert member is not None
        return member

    def decides(self) -> bool:
        """Whether it has the office, as far as it knows."""
        return self.member().group._office.is_held

    def lease(self) -> int:
        """The lease this node lives under now."""
        return int(self.member().id, 16)

    def cut_off(self) -> None:
        """Take part no more, as if nothing from here reached etcd: the lease is not renewed."""
        member = self.handler._node.participant.member
        if member is not None:
            member.group.close()
            member.session.orphan()

    def crash(self) -> None:
        """Stop like a process that was killed: nothing is said or given up, the lease is just not renewed any more."""
        part = self.handler._node.participant
        part._stopped = True  # whoever waits hears of both at once: a process that was killed joins no more
        part.orphan()
        self.handler._leave()

    def fail(self) -> None:
        """Leave as an agent does that ends for a reason of its own."""
        self.end_with(ValueError("a local error"))

    def end_with(self, error: BaseException) -> None:
        """Call shutdown() while `error` is on its way out of the agent."""
        with suppress(type(error)):
            try:
                raise error
            finally:
                self.handler.shutdown()

    def finish(self) -> bool:
        """Leave as an agent does whose workers are done: this closes the run."""
        return self.handler.shutdown()


def waits(node: Node) -> Future[Seat]:
    """Let the node join, and return when it waits."""
    join = node.join()
    eventually(lambda: is_waiting(node, join), what="the node waits")
    return join


def is_waiting(node: Node, join: Future[Seat]) -> bool:
    """Whether the node's ask is in etcd, and it has looked at what was decided and found no seat yet."""
    participant = node.handler._node.participant
    member, waiters = participant.member, participant._changed._waiters  # type: ignore[attr-defined]
    return member is not None and member.entered and bool(waiters) and not join.done()


def decider_first(nodes: Sequence[Node]) -> list[Node]:
    """The same nodes, the one that decides first: it sees at once that its own key is gone, and is back in its seat
    before anybody misses it. Another one learns of that when it renews its lease."""
    first = eventually(lambda: [node for node in nodes if node.decides()], what="one of the nodes decides")
    return [*first, *(node for node in nodes if node not in first)]


class Nodes:
    """The nodes of one run; all are ended by `end()`."""

    def __init__(self, endpoint: str, run_id: str, nodes: tuple[int, int], **conf: Any) -> None:
        self.endpoint, self.run_id, self._nodes, self._conf = endpoint, run_id, nodes, conf
        self._made: list[Node] = []

    def add(self, count: int = 1, **conf: Any) -> list[Node]:
        """Make some more nodes."""
        new = [Node(self.endpoint, self.run_id, self._nodes, **{**self._conf, **conf}) for _ in range(count)]
        self._made += new
        return new

    def one(self, **conf: Any) -> Node:
        """Make one more node."""
        return self.add(1, **conf)[0]

    def end(self) -> None:
        for node in self._made:
            node.crash()


def seats_of(joins: Sequence[Future[Seat]]) -> list[Seat]:
    """What the nodes were told, by rank; checks that they were told the same (invariant S1)."""
    seats = sorted((join.result(DEADLINE) for join in joins), key=lambda seat: seat.rank)
    check_round(seats)
    return seats


def check_round(seats: Sequence[Seat]) -> None:
    """All seats of one round, by rank: the same world, number and address for all, and each rank once."""
    assert [seat.rank for seat in seats] == list(range(len(seats)))
    assert {(seat.world, seat.address, seat.port, seat.round) for seat in seats} == {
        (len(seats), seats[0].address, seats[0].port, seats[0].round)
    }


def join_all(nodes: Sequence[Node]) -> list[Seat]:
    """One round of exactly these nodes; the seats in the order of `nodes`."""
    joins = [node.join() for node in nodes]
    seats_of(joins)
    return [join.result() for join in joins]


def join_as_agents(nodes: Sequence[Node], first: Sequence[Future[Seat]]) -> list[Seat]:
    """As `join_all`, for nodes that are joining already: who is called back meanwhile comes back, as an agent does."""
    joins = dict(zip(nodes, first, strict=True))

    def agreed() -> bool:
        for node, join in joins.items():
            if join.done() and node.signalled():
                joins[node] = node.join()
        done = [join.result() for join in joins.values() if join.done()]
        return len(done) == len(nodes) and len({seat.round for seat in done}) == 1

    eventually(agreed, what="all nodes are in one round")
    seats_of(list(joins.values()))
    return [join.result() for join in joins.values()]


def all_signalled(nodes: Sequence[Node]) -> None:
    """Wait until each node is asked to come back."""
    eventually(lambda: all(node.signalled() for node in nodes), what="all nodes are signalled")


def keys_under(client: EtcdClient, prefix: str) -> dict[str, KeyValue]:
    """Every key of a run, or of all."""
    return {kv.key: kv for kv in client.range(Get(Span(prefix, is_prefix=True))).kvs}


MakeNodes = Callable[..., Nodes]


@pytest.fixture
def make_nodes(etcd: EtcdServer, request: pytest.FixtureRequest) -> Iterator[MakeNodes]:
    """`make_nodes(min, max, **rdzv_conf)`: the nodes of a run, on the shared etcd unless `on` names another."""
    made: list[Nodes] = []

    def make(least: int, most: int, *, on: EtcdServer = etcd, run_id: str | None = None, **conf: Any) -> Nodes:
        made.append(Nodes(on.get_endpoint(), run_id or f"{request.node.name}", (least, most), **conf))
        return made[-1]

    yield make
    for nodes in made:
        nodes.end()


class NodeProcess:
    """A node in a process of its own. It takes commands and answers each: see `_serve`.

    Args:
        clock_offset: seconds that its wall clock (`time.time`) is ahead, until `jump()`.
    """

    def __init__(
        self, endpoint: str, run_id: str, nodes: tuple[int, int], clock_offset: float = 0.0, **conf: Any
    ) -> None:
        request = {"endpoint": endpoint, "run_id": run_id, "nodes": nodes, "clock_offset": clock_offset, "conf": conf}
        command = [sys.executable, __file__, json.dumps(request)]
        self._process = warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The answer to the oldest command that is not answered yet; None when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, command: str) -> Any:
        self.send(command)
        return self.answer()

    def seat(self) -> Seat:
        """The answer to `join`."""
        answer = self.answer()
        assert answer is not None, "the node ended instead of joining"
        return Seat(**answer)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def die(self) -> None:
        """SIGKILL, and be there for its sentinel, which reads how it ended: unlike `kill`, this does not reap it."""
        self._process.kill()

    def pause(self) -> None:
        """Stop it with SIGSTOP, until `resume()`."""
        freeze(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def jump(self) -> None:
        """Its wall clock is behind now by as much as it was ahead."""
        self._process.send_signal(signal.SIGUSR1)

    def terminate(self) -> int:
        """End it with SIGTERM, on which torchrun's agent skips shutdown(); the exit code."""
        self._process.terminate()
        return self._process.wait(DEADLINE)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def all_join(*nodes: NodeProcess) -> list[Seat]:
    """One round of exactly these; the seats in the order of `nodes`."""
    for node in nodes:
        node.send("join")
    seats = [node.seat() for node in nodes]
    check_round(sorted(seats, key=lambda seat: seat.rank))
    return seats


@contextmanager
def processes(*nodes: NodeProcess) -> Iterator[tuple[NodeProcess, ...]]:
    """End all of them in the end."""
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()


def _serve(endpoint: str, run_id: str, nodes: tuple[int, int], clock_offset: float, conf: dict[str, Any]) -> None:
    true_time, offsets = time.time, [clock_offset]
    _channel.time = ModuleType("time")  # it reckons deadlines by a clock that its C half must agree with
    _channel.time.__dict__.update(vars(time))
    time.time = lambda: true_time() + offsets[-1]
    signal.signal(signal.SIGUSR1, lambda *_: offsets.append(-clock_offset))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as torchrun: an exception, then the exit handlers
    node = Node(endpoint, run_id, nodes, **conf)
    commands: dict[str, Callable[[], Any]] = {
        "join": lambda: vars(node._join()),
        "waiting": node.handler.num_nodes_waiting,
        "closed": node.handler.is_closed,
        "shutdown": node.finish,
        "time": lambda: time.time(),
        "write": lambda: _outcome_of_write(node),
        "exit": sys.exit,
    }
    for line in _lines():
        print(json.dumps(commands[line]()), flush=True)


def _outcome_of_write(node: Node) -> str:
    """Of a write to the store of the node's round: the name of the exception, or nothing."""
    assert node.info is not None
    try:
        node.info.store.set("stale", "")
    except (RoundOver, DistStoreError, DistNetworkError) as error:
        return type(error).__name__
    return ""


def _lines() -> Iterator[str]:
    """What comes on stdin. A signal that comes just before a read would wait for its end; it ends this select."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        while True:
            ready, _, _ = select.select([stdin, woken], [], [])
            if stdin not in ready:
                os.read(woken, 64)
                continue
            line = stdin.readline()
            if not line:
                return
            yield line.decode().strip()


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
