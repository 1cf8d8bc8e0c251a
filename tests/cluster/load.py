"""What is done to ftcoord while its etcd is in trouble: clients of a store, a training, nodes of a run, timers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from clusters import pass_time
from helpers import DEADLINE, Seen, eventually
from rdzv_nodes import Node, Nodes, Seat, all_signalled, join_all, join_as_agents
from replicas import Told, agreed, managed, replica_processes
from rounds import LOOK, Rounds
from store_history import Operation, check
from torch.distributed import DistNetworkError

from ftcoord import config, timer
from ftcoord.core.store_values import plain
from ftcoord.etcd import api, client
from ftcoord.store import EtcdStore

CLIENTS = 4
APPENDS = 100
"""How often a client appends to one key."""
LEASE_TTL = 5
HEARTBEAT_MS = 5_000


def rotated(endpoints: str, by: int) -> list[str]:
    """The same endpoints, beginning with another one: clients use the first as long as it works."""
    names = endpoints.split(",")
    return names[by % len(names) :] + names[: by % len(names)]


def await_more(answered: Sequence[int], count: int, errors: Sequence[BaseException], what: str) -> None:
    """Wait until each of these has grown by so much, and nothing failed meanwhile."""
    before = list(answered)

    def enough() -> bool:
        assert not errors, errors
        return all(now >= then + count for now, then in zip(answered, before, strict=True))

    eventually(enough, what)


class StoreLoad:
    """Clients that change and read one store as fast as they can, each for itself; and what they were told.

    Args:
        endpoints: of the cluster.
        prefix: of the store.
        timeout: seconds that each operation may take, through whatever happens to etcd.
        ttl: seconds that the keys outlive the clients.
        keep: False to remember no operations, and never to judge them.
    """

    def __init__(
        self,
        endpoints: str,
        prefix: str,
        clients: int = CLIENTS,
        timeout: float = DEADLINE,
        ttl: int = 3600,
        keep: bool = True,
    ) -> None:
        self._keep = keep
        self.operations: list[Operation] = []
        self._endpoints, self._data = endpoints, f"{prefix}/data/"
        self._watcher = client.EtcdClient(config.EtcdConfig.load(rotated(endpoints, 0)))
        self._from = self._watcher.get(self._data).revision + 1
        self._stopping = threading.Event()
        self._answered = [0] * clients
        self._errors: list[Exception] = []
        self._stores = [
            EtcdStore(rotated(endpoints, number), f"{prefix}/", timedelta(seconds=timeout), ttl=ttl)
            for number in range(clients)
        ]
        self._threads = [
            threading.Thread(target=self._client, args=(number,), name=f"load-{number}") for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def progress(self, count: int) -> None:
        """Wait until each client has had so many more answers: without load before a fault, there is no test."""
        await_more(self._answered, count, self._errors, "every client gets answers")

    def answered(self) -> int:
        """How many operations were."""
        return sum(self._answered)

    def stall(self, since: float) -> float:
        """How long one operation took that ended after then, at the most: what the fault cost whom it hit hardest."""
        ended = [one for one in list(self.operations) if one.answered and one.ended > since]
        return max(one.ended - one.began for one in ended)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for store in self._stores:
            store.close()
        assert not self._errors, self._errors

    def judge(self) -> None:
        """After `stop`: all that was told fits etcd's own record: nothing lost, doubled or out of order."""
        self._watcher.put(f"{self._data}~", b"", timeout=DEADLINE)
        seen = Seen()
        watch = self._watcher.watch(api.Span(self._data, is_prefix=True), self._from, seen)
        states: dict[str, list[tuple[int, bytes | None]]] = {}
        end = False
        while not end:
            item = seen.next()
            for event in item.events if isinstance(item, api.Batch) else ():
                kv = event.kv
                key = kv.key.removeprefix(self._data)
                end = end or key == "~"
                value = plain(kv.value, kv.version) if event.kind == "put" else None
                states.setdefault(key, []).append((kv.mod_revision, value))
            assert not isinstance(item, Exception), item
        watch.cancel()
        del states["~"]
        findings = check(self.operations, states)
        assert not findings, findings

    def close(self) -> None:
        self._stopping.set()
        for store in self._stores:
            store.close()
        for thread in self._threads:
            thread.join()
        self._watcher.close()

    def _client(self, number: int) -> None:
        store, dice = self._stores[number], random.Random(number)
        held = b""
        try:
            for count in itertools.count():
                if self._stopping.is_set():
                    return
                mark = b"%d-%d." % (number, count)
                kind = dice.choice(("add", "append", "compare_set", "get", "set"))
                if kind == "add":
                    self._do(number, "add", "sum", (b"1",), lambda: b"%d" % store.add("sum", 1))
                elif kind == "append":
                    key = f"log/{count // APPENDS}"
                    self._do(number, "append", key, (mark,), lambda key=key, mark=mark: store.append(key, mark))  # type: ignore[misc]
                elif kind == "set":
                    self._do(number, "set", "last", (mark,), lambda mark=mark: store.set("last", mark))  # type: ignore[misc]
                elif kind == "get" and held:
                    key = dice.choice(("register", "sum", "last"))
                    if store.check([key]):
                        self._do(number, "get", key, (), lambda key=key: store.get(key))  # type: ignore[misc]
                else:
                    set_to = lambda held=held, mark=mark: store.compare_set("register", held, mark)  # noqa: E731
                    held = self._do(number, "compare_set", "register", (held, mark), set_to) or held
        except Exception as error:  # shown by whoever waits for progress
            if not self._stopping.is_set():
                self._errors.append(error)

    def _do(
        self, number: int, kind: str, key: str, given: tuple[bytes, ...], call: Callable[[], bytes | None]
    ) -> bytes | None:
        operation = Operation(kind, key, given, time.monotonic())
        if self._keep:
            self.operations.append(operation)
        try:
            operation.told = call()
        except DistNetworkError:
            return None
        operation.ended = time.monotonic()
        self._answered[number] += 1
        return operation.told


class Training:
    """Three replicas in processes of their own, each of which asks for one quorum after the other.

    Args:
        keep: how many answers to remember, of each replica; None for all.
    """

    def __init__(
        self, endpoints: str, job: str, heartbeat_ms: int = HEARTBEAT_MS, join_ms: int = 60_000, keep: int | None = None
    ) -> None:
        self.told = [deque[Told](maxlen=keep) for _ in range(3)]
        self._answered = [0] * len(self.told)
        self.errors: list[BaseException] = []
        self._took = deque[tuple[float, float]](maxlen=keep)
        self._stack = ExitStack()
        rules = f"min_replicas=2&join_timeout_ms={join_ms}&heartbeat_timeout_ms={heartbeat_ms}"
        processes = self._stack.enter_context(replica_processes(f"etcd://{endpoints}/{job}?{rules}", len(self.told)))
        self._replicas = managed(processes)
        self._lock = threading.Lock()  # whoever has it may begin to ask, or end that
        self._ending = False
        self._asked = [self._ask(number) for number in range(len(self.told))]
        self._threads = [threading.Thread(target=self._train, args=(number,)) for number in range(len(self.told))]
        for thread in self._threads:
            thread.start()

    def progress(self, count: int) -> None:
        """Wait until each replica was in so many more quorums."""
        await_more(self._answered, count, self.errors, "quorums are decided")

    def stall(self, since: float) -> float:
        """How long a quorum took that was decided after then, at the most."""
        return max(end - begin for begin, end in list(self._took) if end > since)

    def count(self) -> int:
        """How many answers there were."""
        return sum(self._answered)

    def check(self) -> None:
        """Each quorum has the same replicas for all that are in it, and ids only grow."""
        members: dict[int, list[str]] = {}
        for told in map(list, self.told):  # copies: the replicas are still told of more
            numbers = [number for number, _ in told]
            assert numbers == sorted(numbers)
            for number, names in told:
                assert members.setdefault(number, names) == names

    def ask_once(self, timeout: float = DEADLINE) -> Told:
        """One more quorum, after `stop`."""
        return agreed([process.quorum(address, timeout=timeout) for process, address in self._replicas])

    def stop(self) -> None:
        """Whoever waits for a quorum when the others have had theirs is not left alone: they ask with it."""
        with self._lock:
            self._ending = True
        eventually(self._all_told, what="the last quorum")
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors

    def _all_told(self) -> bool:
        told, waiting = wait(self._asked, timeout=1)
        if waiting:
            self._asked = [self._ask(number) if one in told else one for number, one in enumerate(self._asked)]
        return not waiting

    def close(self) -> None:
        with self._lock:
            self._ending = True
        self._stack.close()
        for thread in self._threads:
            thread.join()

    def _train(self, number: int) -> None:
        began = time.monotonic()
        try:
            for step in itertools.count(1):
                told = self._asked[number].result(DEADLINE)
                self._took.append((began, time.monotonic()))
                self.told[number].append(told)
                self._answered[number] += 1
                pass_time(0.01)
                with self._lock:
                    if self._ending:
                        return
                    began = time.monotonic()
                    self._asked[number] = self._ask(number, step)
        except Exception as error:  # shown by whoever waits for progress
            if not self._ending:
                self.errors.append(error)

    def _ask(self, number: int, step: int = 0) -> Future[Told]:
        process, address = self._replicas[number]
        return process.quorum(address, step=step)


class Run:
    """Nodes of a run in one round.

    Args:
        endpoints: for each node.
    """

    def __init__(self, endpoints: Sequence[str], run_id: str, **conf: float) -> None:
        limits = (2, len(endpoints))
        self._nodes = [Nodes(one, run_id, limits, **{"lease_ttl": LEASE_TTL, **conf}) for one in endpoints]
        self.nodes: list[Node] = [one.one() for one in self._nodes]
        self.seats = join_all(self.nodes)
        self.leases = [node.lease() for node in self.nodes]

    def evictions(self) -> int:
        """How many nodes were asked to come back, or lost their lease."""
        now = [node.signalled() or node.lease() != lease for node, lease in zip(self.nodes, self.leases, strict=True)]
        return sum(now)

    def come_back(self, *others: Node) -> list[Seat]:
        """All of them meet in another round, as agents do that are asked to, and these others with them."""
        nodes = [*self.nodes, *others]
        return join_as_agents(nodes, [node.join() for node in nodes])

    def close(self) -> None:
        for one in self._nodes:
            one.end()


class TwoJobs:
    """Nodes of a run whose workers do not fail, and a training. Nobody of them dies, whatever happens to etcd."""

    def __init__(self, run: Run, training: Training, lease_ttl: float) -> None:
        self.run, self.training, self._ttl = run, training, lease_ttl
        self._before = self._latest()

    def wait(self, seconds: float) -> None:
        """Meanwhile no node is called back; they look as agents do."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert not self._called(), "nobody has died"
            pass_time(LOOK)

    def stay_undisturbed(self) -> None:
        """Nobody is called back until all nodes hold their seats again, and for two lease times longer. The replicas
        are all in one quorum again, and its id is not lower."""

        def all_are_back() -> bool:
            assert not self._called(), "nobody has died"
            return all(node.handler._node.participant.joined for node in self.run.nodes)

        eventually(all_are_back, "all nodes hold their seats again")
        self.wait(2 * self._ttl)
        eventually(lambda: self._quorum() >= self._before[1], "a quorum of all again")

    def start_over(self) -> tuple[int, int]:
        """etcd has lost the round: all nodes are called back, once. What follows is as in `go_on`."""
        all_signalled(self.run.nodes)
        now = self._go_on([node.join() for node in self.run.nodes])
        self.wait(2 * self._ttl)
        return now

    def go_on(self) -> tuple[int, int]:
        """A worker fails. What is decided next has a higher number than all before; the round and the quorum's id."""
        first, *others = self.run.nodes
        join = first.join()
        all_signalled(others)
        return self._go_on([join, *(node.join() for node in others)])

    def _go_on(self, joins: Sequence[Future[Seat]]) -> tuple[int, int]:
        seats = join_as_agents(self.run.nodes, joins)
        quorum = eventually(lambda: max(self._quorum(), 0), "a quorum of all")
        self.training.check()
        assert min(seat.round for seat in seats) > self._before[0]
        self.run.seats += seats
        self._before = self._latest()
        return seats[0].round, quorum

    def _called(self) -> bool:
        return any(node.signalled() for node in self.run.nodes)

    def _latest(self) -> tuple[int, int]:
        """The highest round, and quorum's id, that anybody was told."""
        training = self.training
        return max(seat.round for seat in self.run.seats), max(told[-1][0] for told in training.told if told)

    def _quorum(self) -> int:
        """The id of the last one, if it has all replicas; else -1."""
        assert not self.training.errors, self.training.errors
        last = [told[-1] for told in self.training.told]
        number, names = last[0]
        return number if names == ["a", "b", "c"] and all(one == last[0] for one in last) else -1


@contextmanager
def two_jobs(endpoints: str, prefix: str, lease_ttl: int = LEASE_TTL) -> Iterator[TwoJobs]:
    name = prefix.rpartition("/")[2]
    with ExitStack() as stack:
        run = Run([endpoints] * 3, name, lease_ttl=lease_ttl)
        stack.callback(run.close)
        training = Training(endpoints, name, heartbeat_ms=1000 * lease_ttl, join_ms=100)
        stack.callback(training.close)
        training.progress(3)
        yield TwoJobs(run, training, lease_ttl)


class Guarded:
    """A worker that is in one scope all the time, and enters and leaves another; its timers' server kills nobody, but
    keeps who was to be reaped."""

    def __init__(self, endpoints: str, run_id: str) -> None:
        self.reaped: list[timer.TimerInfo] = []
        self.steps = 0
        self._server = timer.EtcdTimerServer(run_id, rotated(endpoints, 1), reap=self._reap)
        self._server.start()
        self._client = timer.EtcdTimerClient(run_id, rotated(endpoints, 2), ttl=LEASE_TTL)
        self._client.acquire("job", time.time() + 3600)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def check(self) -> None:
        """After all that happened nobody was reaped, and who is stuck still is."""
        assert self.reaped == []
        self._client.acquire("stuck", time.time() + 0.1)
        eventually(lambda: self.reaped, what="a worker that is stuck is reaped")
        assert [info.scope for info in self.reaped] == ["stuck"]

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._server.stop()
        self._client.close()

    def _reap(self, info: timer.TimerInfo) -> bool:
        self.reaped.append(info)
        return True

    def _work(self) -> None:
        while not self._stopping.wait(0.05):
            self._client.acquire("step", time.time() + DEADLINE)
            self._client.release("step")
            self.steps += 1


class Everything:
    """All of the above on one cluster."""

    def __init__(self, endpoints: str, prefix: str) -> None:
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.push(self._stack)
            name = prefix.rpartition("/")[2]
            self.store = StoreLoad(endpoints, prefix)
            self._stack.callback(self.store.close)
            self.training = Training(endpoints, name)
            self._stack.callback(self.training.close)
            turns = [",".join(rotated(endpoints, number)) for number in range(3)]
            self.run = Run(turns, name)
            self._stack.callback(self.run.close)
            self.guarded = Guarded(endpoints, name)
            self._stack.callback(self.guarded.close)
            witness = self._stack.enter_context(client.EtcdClient(config.EtcdConfig.load(rotated(endpoints, 1))))
            self.rounds = Rounds(turns, witness, f"{name}-rounds", LEASE_TTL)
            self._stack.callback(self.rounds.close)
            undo.pop_all()

    def progress(self, operations: int = 20, quorums: int = 3, rounds: int = 1) -> None:
        self.store.progress(operations)
        self.training.progress(quorums)
        await_more(self.rounds.answered, rounds, self.rounds.errors, "rounds are decided")

    def evictions(self) -> int:
        """How many replicas were left out of a quorum, nodes of the run asked to come back, and rounds too small."""
        quorums = {number for told in self.training.told for number, _ in list(told)}
        return len(quorums) - 1 + self.run.evictions() + self.rounds.small()

    def end(self, *, may_evict: bool = False) -> dict[str, int]:
        """End the load, see that nothing was lost, doubled or out of order, and nobody evicted; what there was."""
        self.guarded.check()
        self.training.stop()
        self.training.check()
        self.store.stop()
        self.store.judge()
        self.rounds.stop()
        self.rounds.judge()
        evictions = self.evictions()
        assert may_evict or evictions == 0
        operations = self.store.operations
        return {
            "evictions": evictions,
            "operations": len(operations),
            "unanswered": sum(not one.answered for one in operations),
            "lost_doubled_or_misordered": 0,
            "quorums": self.training.count(),
            "rounds": max(self.rounds.answered),
        }

    def close(self) -> None:
        self._stack.close()


@contextmanager
def everything(endpoints: str, prefix: str) -> Iterator[Everything]:
    load = Everything(endpoints, prefix)
    try:
        yield load
    finally:
        load.close()
