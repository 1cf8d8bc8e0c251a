"""torchft's coordination API: the same tests for its native classes and for ours."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import spawn
from sites import KINDS, LONG, Site, group_ask

from ftcoord import coordination
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ConfigError

SHORT = timedelta(milliseconds=200)
HOUR = 3_600_000
TIMED_OUT = "status: Cancelled, message.*Timeout expired"


@pytest.fixture(params=KINDS)
def site(request: pytest.FixtureRequest, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("FTCOORD_ENDPOINTS", etcd.get_endpoint())
    with ExitStack() as stack:
        yield Site(request.param, stack)


def ask(client: Any, replica_id: str, **request: Any) -> Future[Any]:
    """Ask for a quorum, on a thread."""
    return spawn(lambda: client.quorum(**{"replica_id": replica_id, "timeout": LONG, **request}))


def members(quorum: Any) -> list[str]:
    return [member.replica_id for member in quorum.participants]


def together(client: Any, *replica_ids: str, **request: Any) -> Any:
    """Ask for some replicas at once; the quorum that all were told."""
    quorums = [future.result(DEADLINE) for future in [ask(client, one, **request) for one in replica_ids]]
    assert len({quorum.quorum_id for quorum in quorums}) == 1
    assert all(members(quorum) == members(quorums[0]) for quorum in quorums)
    return quorums[0]


# -- values -----------------------------------------------------------------------------------------------------


def test_a_quorum_result_is_made_with_defaults(site: Site) -> None:
    result = site.names.QuorumResult()
    expected = {
        "quorum_id": 0,
        "replica_rank": 0,
        "replica_world_size": 1,
        "recover_src_manager_address": "",
        "recover_src_replica_rank": None,
        "recover_dst_replica_ranks": [],
        "store_address": "",
        "max_step": 0,
        "max_replica_rank": None,
        "max_world_size": 1,
        "heal": False,
        "replica_ids": [],
    }
    assert {name: getattr(result, name) for name in expected} == expected
    result.heal, result.replica_ids = True, ["a"]
    assert (result.heal, result.replica_ids) == (True, ["a"])
    with pytest.raises(AttributeError):
        _ = result.commit_failures
    with pytest.raises(AttributeError):
        result.anything = 1


@pytest.mark.parametrize(
    "name", ["LighthouseServer", "LighthouseClient", "ManagerServer", "ManagerClient", "Quorum", "QuorumMember"]
)
def test_the_docs_name_the_arguments(site: Site, name: str) -> None:
    assert "Args:" in inspect.getdoc(getattr(site.names, name))


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"timeout": 5}, TypeError, "argument 'timeout': 'int' object cannot be converted to 'PyDelta'"),
        ({"timeout": timedelta(seconds=-1)}, ValueError, "cannot|not possible to convert a negative timedelta"),
        ({"shrink_only": 1}, TypeError, "argument 'shrink_only': 'int' object cannot be converted to 'PyBool'"),
        ({"step": 2**63}, OverflowError, None),
        ({"step": "1"}, TypeError, "argument 'step': 'str' object cannot be interpreted as an integer"),
        ({"world_size": -1}, OverflowError, None),
        ({"address": None}, TypeError, "argument 'address': 'NoneType' object cannot be converted to 'PyString'"),
        ({"replica_id": 7}, TypeError, "argument 'replica_id'"),
        ({"data": [1]}, TypeError, "argument 'data': 'list' object cannot be converted to 'PyDict'"),
        ({"data": {"a": {1}}}, RuntimeError, "TypeError.*not JSON serializable"),
    ],
)
def test_a_request_that_is_refused(site: Site, wrong: dict[str, Any], error: type[Exception], text: str | None) -> None:
    client = site.client(site.job())
    with pytest.raises(error, match=text):
        client.quorum(**{"replica_id": "a", "timeout": LONG, **wrong})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"min_replicas": -1}, OverflowError),
        ({"min_replicas": "1"}, TypeError),
        ({"join_timeout_ms": -1}, OverflowError),
        ({"bind": 1}, TypeError),
    ],
)
def test_a_job_that_is_refused(site: Site, wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        site.names.LighthouseServer(**{"bind": "[::]:0", "min_replicas": 1, **wrong})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"world_size": -1}, OverflowError),
        ({"heartbeat_interval": 0.1}, TypeError),
        ({"connect_timeout": 1}, TypeError),
        ({"quorum_retries": "0"}, TypeError),
        ({"store_addr": None}, TypeError),
    ],
)
def test_a_manager_that_is_refused(site: Site, wrong: dict[str, Any], error: type[Exception]) -> None:
    job = site.job()
    with pytest.raises(error):
        site.manager(job, "a", **{"world_size": 1, **wrong})


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "etcd://127.0.0.1:1/job", "nonsense"])
@pytest.mark.parametrize("name", ["LighthouseClient", "ManagerClient"])
def test_nobody_at_the_address(site: Site, name: str, address: str) -> None:
    is_no_job = site.names is coordination and name == "LighthouseClient" and not address.startswith("etcd:")
    error, text = (
        (ConfigError, "^address=") if is_no_job else (RuntimeError, "failed to connect to .* within timeout of")
    )
    with pytest.raises(error, match=text):
        getattr(site.names, name)(address, SHORT)


# -- quorums ----------------------------------------------------------------------------------------------------


def test_a_quorum_of_one_tells_what_was_asked(site: Site) -> None:
    client = site.client(site.job())
    quorum = client.quorum("a", LONG, "manager", "store", 7, 2, True, {"x": [1, None], "ü": {}})
    assert quorum.quorum_id == 1
    assert quorum.created.seconds > 1_600_000_000
    assert 0 <= quorum.created.nanos < 10**9
    (member,) = quorum.participants
    names = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data")
    assert [getattr(member, name) for name in names] == [
        *("a", "manager", "store", 7, 2, True),
        {"x": [1, None], "ü": {}},
    ]
    assert isinstance(quorum, site.names.Quorum)
    assert isinstance(member, site.names.QuorumMember)


def test_defaults_of_a_request(site: Site) -> None:
    (member,) = site.client(site.job()).quorum("a", LONG).participants
    names = ("address", "store_address", "step", "world_size", "shrink_only", "data")
    assert [getattr(member, name) for name in names] == ["", "", 0, 0, False, None]


@pytest.mark.parametrize("replica_id", ["", "a/b", "ü%", "x" * 10_000])
def test_any_text_is_a_replica_id(site: Site, replica_id: str) -> None:
    assert members(site.client(site.job()).quorum(replica_id, LONG)) == [replica_id]


@pytest.mark.parametrize("data", [None, {}, {"1": 2}])
def test_data_comes_back(site: Site, data: dict[str, Any] | None) -> None:
    (member,) = site.client(site.job()).quorum("a", LONG, data=data).participants
    assert member.data == data


def test_participants_are_in_the_order_of_their_ids_bytes(site: Site) -> None:
    names = ["b", "a10", "a2", "B", "ü", "é"]
    quorum = together(site.client(site.job(len(names))), *names)
    assert members(quorum) == sorted(names, key=str.encode)


def test_the_id_changes_with_the_members_only(site: Site) -> None:
    client = site.client(site.job(2, join_timeout_ms=100))
    ids = [together(client, "a", "b", step=step).quorum_id for step in range(3)]
    assert ids == [1, 1, 1]
    assert together(client, "a", "c").quorum_id == 2
    assert together(client, "a", "b").quorum_id == 3


def test_shrink_only_lets_nobody_in(site: Site) -> None:
    client = site.client(site.job(2, join_timeout_ms=HOUR))
    first = together(client, "a", "b")
    joining = ask(client, "c")
    for _ in range(3):
        shrunk = together(client, "a", "b", shrink_only=True)
        assert (shrunk.quorum_id, members(shrunk)) == (first.quorum_id, ["a", "b"])
    seen: list[tuple[int, list[str]]] = []
    while not seen or "c" not in seen[-1][1]:
        grown = together(client, "a", "b")
        seen.append((grown.quorum_id, members(grown)))
    joined = joining.result(DEADLINE)
    assert (joined.quorum_id, members(joined)) == (first.quorum_id + 1, ["a", "b", "c"])
    assert (joined.quorum_id, members(joined)) in seen


def test_one_that_lives_and_does_not_ask_is_waited_for(site: Site) -> None:
    client = site.client(site.job(1, join_timeout_ms=HOUR, heartbeat_timeout_ms=60_000))
    for one in "abc":
        client.heartbeat(one)
    waiting = [ask(client, one) for one in "ab"]
    assert members(client.quorum("c", LONG)) == ["a", "b", "c"]
    assert {future.result(DEADLINE).quorum_id for future in waiting} == {1}


def test_but_only_so_long(site: Site) -> None:
    client = site.client(site.job(1, join_timeout_ms=200, heartbeat_timeout_ms=60_000))
    client.heartbeat("c")
    assert members(together(client, "a", "b")) == ["a", "b"]


def test_and_not_when_it_is_dead(site: Site) -> None:
    client = site.client(site.job(2, join_timeout_ms=HOUR, heartbeat_timeout_ms=500))
    client.heartbeat("c")
    waiting = [ask(client, one) for one in "ab"]
    beating = spawn(lambda: keep_alive(client, waiting))
    assert [members(future.result(DEADLINE)) for future in waiting] == [["a", "b"]] * 2
    beating.result(DEADLINE)


def keep_alive(client: Any, waiting: list[Future[Any]]) -> None:
    """torchft's replicas do not live by waiting alone."""
    while not all(future.done() for future in waiting):
        for one in "ab":
            client.heartbeat(one)


def test_a_minority_waits(site: Site) -> None:
    client = site.client(site.job(1, join_timeout_ms=0, heartbeat_timeout_ms=60_000))
    client.heartbeat("b")
    with pytest.raises(TimeoutError, match=TIMED_OUT):
        client.quorum("a", timedelta(seconds=1))


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(milliseconds=10), SHORT])
def test_a_time_out(site: Site, timeout: timedelta) -> None:
    client = site.client(site.job(2))
    with pytest.raises(TimeoutError, match=TIMED_OUT):
        client.quorum("a", timeout)


def test_jobs_are_apart(site: Site) -> None:
    jobs = [site.client(site.job()) for _ in range(3)]
    for client, name in zip(jobs, "abc", strict=True):
        quorum = client.quorum(name, LONG)
        assert (quorum.quorum_id, members(quorum)) == (1, [name])


# -- managers ---------------------------------------------------------------------------------------------------


def test_groups_are_told_who_heals_whom(site: Site) -> None:
    job = site.job(2)
    servers = [site.manager(job, name) for name in ("one", "two")]
    ranks = [site.ranks(server)[0] for server in servers]
    futures = [group_ask(rank, step=step) for rank, step in zip(ranks, (5, 0), strict=True)]
    one, two = (future.result(DEADLINE) for future in futures)
    assert one.quorum_id == two.quorum_id == 1
    assert one.replica_ids == two.replica_ids == ["one", "two"]
    assert one.store_address == two.store_address == "store of one"
    assert (one.replica_rank, one.heal, one.recover_dst_replica_ranks, one.max_step) == (0, False, [1], 5)
    assert (one.max_replica_rank, one.max_world_size, one.recover_src_replica_rank) == (0, 1, None)
    assert (two.replica_rank, two.heal, two.recover_dst_replica_ranks, two.max_step) == (1, True, [], 5)
    source = servers[0].address().partition("#")[0]  # without ftcoord's token
    assert (two.recover_src_manager_address, two.recover_src_replica_rank) == (source, 0)
    assert (two.max_replica_rank, two.max_world_size, two.replica_world_size) == (None, 1, 2)


@pytest.mark.parametrize(("init_sync", "heals"), [(True, True), (False, False)])
def test_before_the_first_step_all_take_over_one_state(site: Site, init_sync: bool, heals: bool) -> None:
    job = site.job(2)
    ranks = [site.ranks(site.manager(job, name))[0] for name in "ab"]
    a, b = (future.result(DEADLINE) for future in [group_ask(rank, init_sync=init_sync) for rank in ranks])
    assert (a.heal, b.heal) == (False, heals)


def test_failed_commits_make_a_new_id(site: Site) -> None:
    (rank,) = site.ranks(site.manager(site.job(), "a"))
    ids = [group_ask(rank, commit_failures=failures).result(DEADLINE).quorum_id for failures in (0, 0, 1, 2, 0)]
    assert ids == [1, 1, 2, 3, 3]


def test_peers_read_a_ranks_metadata(site: Site) -> None:
    server = site.manager(site.job(), "a", world_size=2)
    ranks, (peer,) = site.ranks(server, 2), site.ranks(server)
    with pytest.raises(RuntimeError, match=r"InvalidArgument.*rank not found"):
        peer._checkpoint_metadata(0, timeout=LONG)
    for said in ("first", "second"):
        asking = [
            group_ask(one, group_rank=rank, checkpoint_metadata=f"{said} {rank}") for rank, one in enumerate(ranks)
        ]
        assert {future.result(DEADLINE).quorum_id for future in asking} == {1}
        assert [peer._checkpoint_metadata(rank, timeout=LONG) for rank in (0, 1)] == [f"{said} 0", f"{said} 1"]
    with pytest.raises(RuntimeError, match=r"InvalidArgument.*rank not found"):
        peer._checkpoint_metadata(2, timeout=LONG)


def test_a_step_is_committed_when_all_say_so(site: Site) -> None:
    ranks = site.ranks(site.manager(site.job(), "a", world_size=2), 2)
    for step, votes in enumerate(itertools.product((True, False), repeat=2)):
        told = [
            spawn(lambda rank=rank, yes=yes, step=step: ranks[rank].should_commit(rank, step, yes, timeout=LONG))
            for rank, yes in enumerate(votes)
        ]
        assert [future.result(DEADLINE) for future in told] == [all(votes)] * 2


def test_a_rank_that_votes_twice_is_told_twice(site: Site) -> None:
    ranks = site.ranks(site.manager(site.job(), "a", world_size=2), 2)
    twice = [spawn(lambda: ranks[0].should_commit(0, 1, True, timeout=LONG)) for _ in range(2)]

    def both_are_told() -> bool:
        with contextlib.suppress(TimeoutError):
            assert ranks[1].should_commit(1, 1, True, timeout=timedelta(seconds=1))
        return all(one.done() for one in twice)

    eventually(both_are_told, "both calls are answered", timeout=DEADLINE / 2)
    assert [one.result() for one in twice] == [True, True]


def test_votes_on_different_steps_count_together(site: Site) -> None:
    ranks = site.ranks(site.manager(site.job(), "a", world_size=2), 2)
    for votes in itertools.product((True, False), repeat=2):
        told = [
            spawn(lambda rank=rank, yes=yes: ranks[rank].should_commit(rank, 10 * rank, yes, timeout=LONG))
            for rank, yes in enumerate(votes)
        ]
        assert [future.result(DEADLINE) for future in told] == [all(votes)] * 2


def test_a_second_call_of_a_rank_is_answered_with_the_first(site: Site) -> None:
    job = site.job(2)
    both, (other,) = site.ranks(site.manager(job, "a", world_size=2), 2), site.ranks(site.manager(job, "b"))
    twice = [group_ask(both[0], group_rank=0) for _ in range(2)]
    others = [group_ask(both[1], group_rank=1), group_ask(other)]
    assert not wait(others, DEADLINE).not_done
    if wait(twice, 2.0).not_done:  # one of them came so late that it is a call for the next quorum
        others += [group_ask(both[1], group_rank=1), group_ask(other)]
    calls = [*twice, *others]
    assert not wait(calls, DEADLINE).not_done
    assert {call.result().quorum_id for call in calls} == {1}


def test_time_outs_of_a_rank(site: Site) -> None:
    rank, _ = site.ranks(site.manager(site.job(), "a", world_size=2), 2)
    with pytest.raises(TimeoutError, match=TIMED_OUT):
        group_ask(rank, timeout=SHORT).result(DEADLINE)
    with pytest.raises(TimeoutError, match=TIMED_OUT):
        rank.should_commit(0, 1, True, timeout=SHORT)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"timeout": 1.0}, TypeError),
        ({"group_rank": "0"}, TypeError),
        ({"checkpoint_metadata": None}, TypeError),
        ({"shrink_only": 0}, TypeError),
        ({"init_sync": "yes"}, TypeError),
        ({"commit_failures": 2**63}, OverflowError),
    ],
)
def test_a_groups_request_that_is_refused(site: Site, wrong: dict[str, Any], error: type[Exception]) -> None:
    (rank,) = site.ranks(site.manager(site.job(), "a"))
    with pytest.raises(error):
        group_ask(rank, **wrong).result(DEADLINE)


def test_a_manager_that_is_shut_down_is_gone_for_all(site: Site) -> None:
    job = site.job(1, join_timeout_ms=HOUR, heartbeat_timeout_ms=2_000)
    leaving = site.manager(job, "a")
    (rank,) = site.ranks(site.manager(job, "b"))
    leaving.shutdown()
    leaving.shutdown()
    eventually(lambda: group_ask(rank).result(DEADLINE).replica_ids == ["b"], "b trains alone")
