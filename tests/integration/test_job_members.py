"""What befalls the members of a job: threads that fail, names that come twice, etcd that forgets, forks."""

from __future__ import annotations

import selectors
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from helpers import DEADLINE, eventually, in_fork
from rdzv_nodes import keys_under, spawn

from ftcoord.coordination import LighthouseClient, ManagerClient, ManagerServer, Observer, manager, policy, ranks
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.ranks import Meeting
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import kill_key
from ftcoord.core.verdict import Publish, Wait
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import KeyValue
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.group import participant as memberships

LONG = timedelta(seconds=DEADLINE)
SHORT = timedelta(milliseconds=300)
EVERY = timedelta(milliseconds=100)


class Job:
    """A job on `client`'s etcd, and whoever takes part in it until the test ends."""

    def __init__(self, etcd: EtcdServer, client: EtcdClient, name: str, stack: ExitStack) -> None:
        self.etcd, self.client, self.stack = etcd, client, stack
        self.address = f"etcd://{etcd.get_endpoint()}/{name}"
        self.rules(min_replicas=1)

    def rules(self, **options: int) -> None:
        given = {"join_timeout_ms": 0, "heartbeat_timeout_ms": 600_000, **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        self.address = f"{self.address.partition('?')[0]}?{query}"

    def lighthouse(self) -> LighthouseClient:
        client = LighthouseClient(self.address, LONG)
        self.stack.callback(client.close)
        return client

    def manager(self, name: str, world_size: int = 1) -> ManagerServer:
        server = ManagerServer(name, self.address, "localhost", "[::]:0", "store", world_size, EVERY, LONG, 0)
        self.stack.callback(server.shutdown)
        return server

    def keys(self, below: str) -> dict[str, KeyValue]:
        return keys_under(self.client, f"{parse_address(self.address).prefix}/{below}")


@pytest.fixture
def job(etcd: EtcdServer, client: EtcdClient, prefix: str) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(etcd, client, prefix.strip("/"), stack)


def ask(server: ManagerServer, rank: int = 0, timeout: timedelta = LONG) -> Future[Any]:
    """Ask for a quorum as a rank of a manager."""
    client = ManagerClient(server.address(), LONG)
    return spawn(lambda: client._quorum(rank, 0, "", False, True, 0, timeout))


# -- a thread of ours that fails --------------------------------------------------------------------------------


Crash = Callable[["type[Publish[Any]] | type[Wait]"], threading.Event]


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Crash:
    """`crash(verdict)` makes the thread of the next one that comes to such a verdict end; what it returns is set when
    that has happened."""

    def begin(kind: type[Publish[Any]] | type[Wait]) -> threading.Event:
        crashed, decide = threading.Event(), policy.decide

        def decide_or_crash(*args: Any, **kwargs: Any) -> Any:
            verdict = decide(*args, **kwargs)
            if isinstance(verdict, kind) and not crashed.is_set():
                crashed.set()
                raise MemoryError("made by the test")
            return verdict

        monkeypatch.setattr(policy, "decide", decide_or_crash)
        return crashed

    return begin


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_whose_thread_failed_says_so_and_comes_back(job: Job, crash: Crash) -> None:
    job.rules(min_replicas=2)
    servers = [job.manager(name) for name in "ab"]
    assert {one.result(DEADLINE).quorum_id for one in [ask(server) for server in servers]} == {1}
    crashed = crash(Publish)
    calls = {ask(server): server for server in servers}
    failed = next(one for one in as_completed(calls, DEADLINE) if one.exception() is not None)
    with pytest.raises(RuntimeError, match="takes part in a group failed: MemoryError"):
        failed.result()
    told = [one.result(DEADLINE) for one in [ask(calls.pop(failed)), *calls]]
    assert [one.replica_ids for one in told] == [["a", "b"]] * 2
    for _ in range(2):
        told = [one.result(DEADLINE) for one in [ask(server) for server in servers]]
        assert [one.replica_ids for one in told] == [["a", "b"]] * 2
    assert crashed.is_set()
    assert len(job.keys("members/")) == 2, "nobody waits for what it was before"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_keeps_a_member_alive_that_hears_nothing(
    job: Job, crash: Crash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot come back either as long as etcd gives it no lease."""
    job.rules(min_replicas=2, heartbeat_timeout_ms=3_000)
    server = job.manager("a")
    (key,) = job.keys("members/")

    def away(*args: Any, **kwargs: Any) -> None:
        raise EtcdUnavailable("made by the test")

    membership = memberships.Membership
    monkeypatch.setattr(memberships, "Membership", away)
    crashed = crash(Wait)
    # The manager's own thread may notice first, and then holds the key until etcd gives it a lease again.
    with pytest.raises((RuntimeError, TimeoutError), match=r"failed: MemoryError|not done in time|made by the test"):
        ask(server, timeout=SHORT).result(DEADLINE)
    assert crashed.wait(DEADLINE)
    eventually(lambda: key not in job.keys("members/"), "its lease is over")
    monkeypatch.setattr(memberships, "Membership", membership)
    eventually(lambda: job.keys("members/"), "it is back")


def fail(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("made by the test")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_manager_that_hears_no_orders_any_more_leaves_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.manager("a")
    monkeypatch.setattr(manager, "member_of", fail)
    job.client.put(kill_key(parse_address(job.address).prefix, "nobody"), b"why")
    eventually(lambda: "manager a leaves the job" in caplog.text, "it says so")
    eventually(lambda: not job.keys("members/"), "nobody counts on it")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "broken",
    [(Meeting, "join"), (ranks, "quorum_result"), (Replica, "ask"), (selectors.DefaultSelector, "select")],
    ids=["a call", "an answer", "the request of the group", "the port"],
)
def test_a_manager_whose_port_fails_leaves_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: tuple[object, str]
) -> None:
    server = job.manager("a")
    monkeypatch.setattr(ranks, "_local", {})  # so the call goes through the port
    rank = ManagerClient(server.address(), LONG)
    with monkeypatch.context() as patch:
        patch.setattr(*broken, fail)
        with pytest.raises(RuntimeError, match=r"transport error|tcp connect error|was interrupted"):
            rank._quorum(0, 0, "", False, True, 0, LONG)
        eventually(lambda: "manager a leaves the job" in caplog.text, "it is logged")
    eventually(lambda: not job.keys("members/"), "nobody counts on it")
    eventually(lambda: "ftcoord-ranks" not in {one.name for one in threading.enumerate()}, "its error is reported here")


# -- heartbeat time-outs ------------------------------------------------------------------------------------------


def test_a_heartbeat_time_out_below_what_leases_can_do_is_raised_with_one_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.rules(heartbeat_timeout_ms=1_234)
    client, _ = job.lighthouse(), job.lighthouse()
    client.heartbeat("a")
    assert caplog.text.count("heartbeat_timeout_ms=1234 is raised to 3000") == 1
    (key,) = job.keys("members/").values()
    assert job.client.time_left(key.lease)[1] == 3


# -- time-outs --------------------------------------------------------------------------------------------------


def test_a_rank_may_wait_for_ever(job: Job) -> None:
    rank = ManagerClient(job.manager("a", world_size=2).address(), LONG)
    first = spawn(partial(rank.should_commit, 0, 0, True, timedelta.max))
    assert rank.should_commit(1, 0, True, LONG)
    assert first.result(DEADLINE)


# -- what users read --------------------------------------------------------------------------------------------


def lines(call: Callable[[], object]) -> str:
    """All that Python prints of what a call raises, but for where it was raised."""
    try:
        call()
    except (RuntimeError, TimeoutError) as error:
        said = "".join(traceback.format_exception(error))
        assert "During handling" not in said, said
        assert "direct cause" not in said, said
        return str(error)
    pytest.fail("it raised nothing")


def test_errors_are_one_line_that_says_all(fragile: EtcdServer) -> None:
    address = f"etcd://{fragile.get_endpoint()}/job?min_replicas=2"
    client = LighthouseClient(address, LONG)
    client.heartbeat("a", LONG)  # joins, which may take longer than a call has
    assert "no quorum was decided in time" in lines(lambda: client.quorum("a", SHORT))
    assert "http://host:port" in lines(lambda: ManagerClient(address, SHORT))
    assert "its manager is up" in lines(lambda: ManagerClient("http://127.0.0.1:1", SHORT))
    fragile.kill()
    calls = [
        lambda: client.quorum("a", timedelta(seconds=5)),
        lambda: client.heartbeat("a", SHORT),
        lambda: LighthouseClient(address, SHORT),
        lambda: ManagerServer("a", address, "localhost", "[::]:0", "store", 1, EVERY, SHORT, 0),
        lambda: Observer(address, SHORT),
    ]
    for call in calls:
        said = lines(call)
        assert "etcd" in said
        assert "\n" not in said
    client.close()


def test_a_forked_child_is_refused_at_once(job: Job) -> None:
    client = job.lighthouse()
    assert client.quorum("x", LONG).quorum_id == 1
    server = job.manager("a", world_size=2)
    rank = ManagerClient(server.address(), LONG)
    observer = Observer(job.address, LONG, on_lost=print)
    job.stack.callback(observer.close)
    calls: list[Callable[[], object]] = [
        lambda: client.quorum("x", LONG),
        lambda: client.heartbeat("x", LONG),
        lambda: rank._quorum(0, 0, "", False, True, 0, LONG),
        lambda: rank.should_commit(0, 0, True, LONG),
        lambda: rank._checkpoint_metadata(0, LONG),
        lambda: rank.kill("", LONG),
        lambda: client.kill("a", "", LONG),
        observer.quorum,
    ]
    assert [in_fork(call) for call in calls] == ["ForkedProcessError"] * len(calls)
    assert [in_fork(server.shutdown), in_fork(observer.close)] == ["None"] * 2
    votes = [spawn(partial(rank.should_commit, number, 0, True, LONG)) for number in range(2)]
    assert [vote.result(DEADLINE) for vote in votes] == [True, True]
