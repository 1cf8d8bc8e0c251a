"""Transactions that share requests: each done once and told once, whatever becomes of the others."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import DEADLINE, eventually, in_fork

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import (
    ClientClosed,
    EtcdError,
    EtcdUnavailable,
    ForkedProcessError,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
)
from ftcoord.etcd.api import Compare, Put, TxnResult, absent, exists
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.rpc import batching
from ftcoord.etcd.rpc.transport import Transport

LONG = {"timeout": DEADLINE}


class Line:
    """Between a client and etcd: counts the requests that write, holds them up, and loses them or their answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        """Of each request: how many transactions travelled in it."""
        self.free = threading.Event()
        self.free.set()
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        real = Transport.write

        def write(transport: Transport, request: Any, timeout: float) -> Any:
            self.sizes.append(sum(op.HasField("request_txn") for op in request.success) or 1)
            assert self.free.wait(DEADLINE)
            self.before()
            response = real(transport, request, timeout)
            self.after()
            return response

        monkeypatch.setattr(Transport, "write", write)


class Told:
    """How one transaction ended."""

    def __init__(self) -> None:
        self.results: list[TxnResult | EtcdError] = []

    def __call__(self, result: TxnResult | EtcdError) -> None:
        self.results.append(result)

    @property
    def result(self) -> TxnResult | EtcdError:
        """What it was told, once."""
        eventually(lambda: self.results, "it is told")
        assert len(self.results) == 1
        return self.results[0]

    @property
    def written(self) -> TxnResult:
        """The answer to a transaction that was done."""
        assert isinstance(self.result, TxnResult), self.result
        assert self.result.succeeded
        return self.result


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)


@pytest.fixture
def own(etcd: EtcdServer, line: Line) -> Iterator[EtcdClient]:
    """A client on that line, on which nothing came together before."""
    with EtcdClient(EtcdConfig.load(etcd.get_endpoint())) as client:
        yield client


def submit(
    client: EtcdClient, key: str, *guards: Compare, value: bytes = b"", lease: int = 0, timeout: float = DEADLINE
) -> Told:
    told = Told()
    client.submit(guards, [Put(key, value, lease)], told, timeout=timeout)
    return told


def crowd(line: Line, client: EtcdClient, prefix: str, count: int) -> list[Told]:
    """So many at once: the first is on its way while the others are made."""
    line.free.clear()
    first = Told()
    leader = threading.Thread(target=client.submit, args=((), [Put(f"{prefix}/0", b"")], first), kwargs=LONG)
    sent = len(line.sizes)
    leader.start()
    eventually(lambda: len(line.sizes) > sent, "the first is on its way")
    others = [submit(client, f"{prefix}/{number}") for number in range(1, count)]
    line.free.set()
    leader.join()
    return [first, *others]


def test_one_alone_is_told_before_submit_returns(own: EtcdClient, prefix: str, line: Line) -> None:
    told = Told()
    own.submit((), [Put(prefix, b"x")], told, timeout=DEADLINE)
    assert told.written.revision == own.get(prefix).kvs[0].mod_revision
    assert line.sizes == [1]


def test_those_that_come_meanwhile_go_together(own: EtcdClient, prefix: str, line: Line) -> None:
    told = crowd(line, own, prefix, 10)
    revisions = [one.written.revision for one in told]
    assert line.sizes == [1, 9]
    assert revisions == [revisions[0]] + [revisions[0] + 1] * 9
    assert [own.get(f"{prefix}/{i}").kvs[0].mod_revision for i in range(10)] == revisions


def test_each_has_its_own_outcome(own: EtcdClient, prefix: str, line: Line) -> None:
    crowd(line, own, prefix, 1)
    line.free.clear()
    own_thread = threading.Thread(target=submit, args=(own, f"{prefix}/first"))
    own_thread.start()
    eventually(lambda: len(line.sizes) == 2, "the first is on its way")
    done = submit(own, f"{prefix}/a", absent(f"{prefix}/a"))
    refused = submit(own, f"{prefix}/b", exists(f"{prefix}/b"))
    line.free.set()
    own_thread.join()
    assert done.written
    assert isinstance(refused.result, TxnResult)
    assert not refused.result.succeeded
    assert own.get(f"{prefix}/b").one is None


def test_what_etcd_refuses_for_one_is_done_for_the_others(own: EtcdClient, prefix: str, line: Line) -> None:
    """An unknown lease, and a request that is too large: etcd takes nothing of the request they are in."""
    line.free.clear()
    leader = threading.Thread(target=submit, args=(own, f"{prefix}/first"))
    leader.start()
    eventually(lambda: line.sizes, "the first is on its way")
    good = [submit(own, f"{prefix}/{i}") for i in range(3)]
    lost = submit(own, f"{prefix}/lost", lease=12345)
    large = submit(own, f"{prefix}/large", value=bytes(2 << 20))
    more = submit(own, f"{prefix}/more")
    line.free.set()
    leader.join()
    assert isinstance(lost.result, LeaseLost)
    assert isinstance(large.result, RequestRefused)
    revisions = {one.written.revision for one in [*good, more]}
    assert len(revisions) == 4  # each by itself: none was done twice
    assert [own.get(f"{prefix}/{i}").kvs[0].version for i in range(3)] == [1, 1, 1]


def test_a_lost_answer_is_unknown_to_all_and_a_lost_request_to_nobody(own: EtcdClient, prefix: str, line: Line) -> None:
    def lose(error: type[EtcdError]) -> Callable[[], None]:
        def fail() -> None:
            raise error("lost by the test")

        return fail

    line.after = lose(OutcomeUnknown)
    for told in crowd(line, own, f"{prefix}/answer", 4):
        assert isinstance(told.result, OutcomeUnknown)
    assert own.get(f"{prefix}/answer/3").one is not None
    line.before = lose(EtcdUnavailable)
    for told in crowd(line, own, f"{prefix}/request", 4):
        assert isinstance(told.result, EtcdUnavailable)
    assert own.get(f"{prefix}/request/3").one is None


def test_what_has_waited_too_long_is_not_sent(own: EtcdClient, prefix: str, line: Line) -> None:
    line.free.clear()
    leader = threading.Thread(target=submit, args=(own, f"{prefix}/first"))
    leader.start()
    eventually(lambda: line.sizes, "the first is on its way")
    late, patient = submit(own, f"{prefix}/late", timeout=0), submit(own, f"{prefix}/patient", timeout=DEADLINE)
    line.free.set()
    leader.join()
    assert patient.written
    assert type(late.result) is EtcdUnavailable
    assert own.get(f"{prefix}/late").one is None


def test_a_request_holds_no_more_than_etcd_takes(own: EtcdClient, prefix: str, line: Line) -> None:
    count = 3 * batching.BATCH_SIZE
    for one in crowd(line, own, prefix, count):
        assert one.written
    assert line.sizes == [1, batching.BATCH_SIZE, batching.BATCH_SIZE, batching.BATCH_SIZE - 1]
    line.free.clear()
    large = [submit(own, f"{prefix}/large/{i}", value=bytes(batching.BATCH_BYTES // 3)) for i in range(9)]
    line.free.set()
    for one in large:
        assert one.written
    assert max(line.sizes[4:]) < 4


def test_who_came_along_last_time_is_waited_for(
    own: EtcdClient, prefix: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "LINGER", DEADLINE)
    for one in crowd(line, own, f"{prefix}/a", 5):
        assert one.written
    several = [submit(own, f"{prefix}/b/{i}") for i in range(5)]
    assert len({one.written.revision for one in several}) == 1
    assert line.sizes == [1, 4, 5]


def test_who_does_not_come_is_not_waited_for_long(own: EtcdClient, prefix: str, line: Line) -> None:
    for one in crowd(line, own, f"{prefix}/a", 5):
        assert one.written
    assert submit(own, f"{prefix}/b").written  # after the linger, on the client's thread
    told = Told()
    eventually(lambda: _is_quick(own, f"{prefix}/c", told), "one that comes alone is sent at once again")


def _is_quick(client: EtcdClient, key: str, told: Told) -> bool:
    """Whether a transaction is made on this thread. One after the other: the client is told of its end after we are."""
    told.results.clear()
    client.submit((), [Put(key, b"")], told, timeout=DEADLINE)
    quick = bool(told.results)
    return told.written.succeeded and quick


def test_without_threads_writes_are_made_all_the_same(
    own: EtcdClient, prefix: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ftcoord-writes":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for one in crowd(line, own, prefix, 5):
        assert one.written


def test_an_interrupt_of_whoever_sends_is_told_to_all(own: EtcdClient, prefix: str, line: Line) -> None:
    """As Ctrl-C would have it: the exception goes up, the transaction's end is unknown, and others go on."""

    def interrupt() -> None:
        line.after = lambda: None
        raise KeyboardInterrupt

    line.after = interrupt
    told = Told()
    with pytest.raises(KeyboardInterrupt):
        own.submit((), [Put(prefix, b"")], told, timeout=DEADLINE)
    assert isinstance(told.result, OutcomeUnknown)
    for one in crowd(line, own, prefix, 5):
        assert one.written


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_whoever_is_told_costs_nobody_else_theirs(own: EtcdClient, prefix: str, line: Line) -> None:
    def fault(_: TxnResult | EtcdError) -> None:
        raise RuntimeError("a fault of the test's")

    line.free.clear()
    leader = threading.Thread(target=submit, args=(own, f"{prefix}/first"))
    leader.start()
    eventually(lambda: line.sizes, "the first is on its way")
    before = submit(own, f"{prefix}/before")
    own.submit((), [Put(f"{prefix}/fault", b"")], fault, timeout=DEADLINE)
    behind = submit(own, f"{prefix}/behind")
    line.free.set()
    leader.join()
    assert before.written
    assert isinstance(behind.result, OutcomeUnknown)
    for one in crowd(line, own, f"{prefix}/later", 5):
        assert one.written


def test_a_closed_client_tells_so_and_its_thread_ends(own: EtcdClient, prefix: str, line: Line) -> None:
    before = set(threading.enumerate())  # those of other tests may end at any time
    for one in crowd(line, own, prefix, 5):
        assert one.written
    own.close()
    assert isinstance(submit(own, prefix).result, ClientClosed)
    assert not {thread for thread in threading.enumerate() if thread.name == "ftcoord-writes"} - before


def test_a_forked_child_is_refused(own: EtcdClient, prefix: str, line: Line) -> None:
    for one in crowd(line, own, prefix, 5):
        assert one.written
    assert in_fork(lambda: submit(own, prefix)) == ForkedProcessError.__name__


def test_many_at_once_are_each_done_once_and_told_once(own: EtcdClient, prefix: str, line: Line) -> None:
    """Counters, each of a thread: after every outcome, known or not, the version of its key is what it should be."""
    chance = random.Random(7)

    def sometimes() -> None:
        if chance.random() < 0.2:
            raise OutcomeUnknown("lost by the test")

    line.before = line.after = sometimes
    problems: list[str] = []

    def count(key: str) -> None:
        made = 0
        for _ in range(40):
            ended, results = threading.Event(), Told()

            def done(result: TxnResult | EtcdError, results: Told = results, ended: threading.Event = ended) -> None:
                results(result)
                ended.set()

            own.submit([Compare(key, "version", "=", made)], [Put(key, b"")], done, timeout=DEADLINE)
            if not ended.wait(DEADLINE):
                problems.append(f"{key} was not told")
                return
            kv = own.get(key).one
            version = kv.version if kv else 0
            result = results.result
            if version not in ({made + 1} if isinstance(result, TxnResult) else {made, made + 1}):
                problems.append(f"{key} is at {version}, was at {made}, told {result}")
            made = version

    threads = [threading.Thread(target=count, args=(f"{prefix}/{i}",)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert max(line.sizes) > 1
