"""What operators are told of jobs, from keys in memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import builders
import pytest
from held import TIMER, WORKER, timers_kv
from reports import seen

from ftcoord.commands.ls_status_watch_history_why_doctor import status_lines
from ftcoord.commands.shared import Terminal, to_json
from ftcoord.core import death_records, quorum_records, rendezvous_records
from ftcoord.core.elastic import Place
from ftcoord.core.layout import (
    death_key,
    decided_key,
    elastic_over_key,
    elastic_stop_key,
    member_id,
    member_key,
    quorum_prefix,
    run_prefix,
)
from ftcoord.core.quorum import FAILED_COMMITS, QuorumOptions
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, QuorumSeat
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat, WorkerFailure
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.reading import with_leases
from ftcoord.operator.report import JobStatus
from ftcoord.operator.status import GroupKeys, JobKeys, Rules, foremost, line_of, status_of

RUN = run_prefix("/f", "job")
QUORUM = quorum_prefix("/f", "job")
HOSTILE = "\x1b]0;owned\x07\u202e"


def kv(key: str, value: bytes, revision: int = 1, lease: int = 0) -> KeyValue:
    return KeyValue(key, value, revision, revision, 1, lease)


def ask(node: str, **fields: Any) -> JoinRequest:
    return replace(builders.ask(node, port=5, host=f"host of {node}", limits=(2, 4)), **fields)


def member(prefix: str, lease: int, value: bytes) -> KeyValue:
    return kv(member_key(prefix, member_id(lease)), value, lease, lease)


def nodes(*asks: JoinRequest) -> tuple[KeyValue, ...]:
    """The first one under lease 1, and so on."""
    return tuple(member(RUN, 1 + at, rendezvous_records.encode(one)) for at, one in enumerate(asks))


def seats(*names: str) -> tuple[Seat, ...]:
    return tuple(Seat(member_id(1 + at), name, f"host of {name}") for at, name in enumerate(names))


def run_of(record: Round | None, members: Sequence[KeyValue] = (), deaths: Sequence[KeyValue] = ()) -> GroupKeys:
    written = builders.round_keys(RUN, record).items() if record else ()
    kvs = [*(kv(key, value) for key, value in written), *members, *deaths]
    return GroupKeys.of(RUN, {one.key: one for one in kvs})


def rounds(
    record: Round | None, members: Sequence[KeyValue], deaths: Sequence[KeyValue] = (), rules: Rules | None = None
) -> Any:
    return seen(told_of(rounds=run_of(record, members, deaths), rules=rules)["rounds"])


def told_of(rounds: GroupKeys | None = None, quorum: GroupKeys | None = None, rules: Rules | None = None) -> JobStatus:
    keys = JobKeys("job", 9, rounds or GroupKeys(RUN), quorum or GroupKeys(QUORUM), True)
    return with_leases(Leases().time_left, status_of(keys, rules or Rules()))


class Leases:
    """Only that of the first member is there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        self.asked.append(member_id(lease_id))
        return (7, 10) if lease_id == 1 else (-1, 0)


RUNNING = builders.round_(3, seats("a", "b"), port=5, ready=True, limits=(2, 4))


def in_round(number: int) -> dict[str, int]:
    return {"seated": number, "after": number - 1}


def test_a_round_that_runs() -> None:
    found = rounds(RUNNING, nodes(ask("a", **in_round(3)), ask("b", **in_round(3))))
    assert (found.state, found.healthy, found.number, found.size) == ("running", True, 3, 2)
    assert [(one.rank, one.node, one.standing) for one in found.members] == [(0, "a", "running"), (1, "b", "running")]
    assert [(one.lease_left, one.lease_ttl) for one in found.members] == [(7, 10), (None, None)]
    assert (found.next.decision, found.next.rule) == ("wait", "R3 recall")
    assert found.next.reason == "round 3 is running on 2 nodes"


def test_enough_nodes_wait_for_the_last_call() -> None:
    found = rounds(None, nodes(ask("a"), ask("b")))
    assert found.next.reason == "2 nodes are there, 0 still to come back; the last call runs"


def test_a_node_that_is_gone_is_missing_with_its_cause() -> None:
    death = death_records.encode(death_records.Death("host of b died of signal 9", 1))
    found = rounds(RUNNING, nodes(ask("a", **in_round(3))), [kv(death_key(RUN, member_id(2)), death)])
    assert not found.healthy
    assert [(one.rank, one.node, one.cause) for one in found.missing] == [(1, "b", "host of b died of signal 9")]
    assert (found.next.decision, found.next.rule) == ("publish", "R3 recall")
    assert "died of signal 9" in found.next.reason


def test_a_round_whose_ranks_are_to_stop_is_stopping() -> None:
    here = nodes(ask("a", **in_round(3)), ask("b", **in_round(3)))
    found = rounds(replace(RUNNING, stop="stop asked by ann"), here)
    assert (found.state, found.healthy, found.stop) == ("stopping", True, "stop asked by ann")


def timers(*kvs: KeyValue) -> JobStatus:
    return status_of(JobKeys("job", 9, GroupKeys(RUN), GroupKeys(QUORUM), True, kvs), Rules())


def test_timers_are_told_as_they_expire() -> None:
    late = timers_kv(RUN, replace(TIMER, wall_ms=1_009_000), TIMER)
    nobody = timers_kv(RUN, replace(TIMER, wall_ms=1_000_001), worker=replace(WORKER, pid=8, rank=-1), lease=2)
    report = timers(late, nobody)
    found = seen(report)
    assert [(one.pid, one.rank, one.until) for one in found.timers] == [(8, None, 1000.001), (7, 3, 1004), (7, 3, 1009)]
    timer = {"host": "node7", "pid": 7, "rank": 3, "scope": "step", "standing": "running", "after": 5, "until": 1004}
    assert json.loads(to_json(report))["timers"][1] == timer
    assert found.healthy


def test_a_table_shows_who_holds_which_timer_until_when() -> None:
    hostile = timers_kv(RUN, replace(TIMER, scope=HOSTILE, wall_ms=10**15), lease=2)
    lines = list(status_lines(timers(timers_kv(RUN), hostile), Terminal(out=io.StringIO()), 1))
    at = lines.index("timers (2):")
    assert lines[at + 1].split() == ["RANK", "HOST", "PID", "SCOPE", "STANDING", "EXPIRES", "LEFT", "OF"]
    assert lines[at + 2].split()[:5] == ["3", "node7", "7", "step", "running"]
    assert lines[at + 3].strip() == "... and 1 more: --all shows them"
    shown = "\n".join(status_lines(timers(hostile), Terminal(out=io.StringIO()), 1))
    assert "owned" in shown
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize(
    ("fields", "ready", "recalled", "standing"),
    [
        (in_round(3), True, "", "running"),
        (in_round(3), True, "somebody waits", "called back"),
        ({"after": 3, "seated": 3}, True, "somebody waits", "waiting"),
        (in_round(3), False, "", "seated"),
        ({"after": 2}, False, "", "seating"),
        ({**in_round(3), "failed": (WorkerFailure(7, fate="exited with code 1"),)}, True, "", "running"),
        ({"after": 2, "seated": 2, "min_nodes": 1}, False, "", "refused"),
    ],
)
def test_how_a_node_with_a_seat_stands(fields: dict[str, Any], ready: bool, recalled: str, standing: str) -> None:
    record = replace(RUNNING, ready=ready, recalled=recalled)
    found = rounds(record, nodes(ask("a", **fields), ask("b", **in_round(3))))
    one = next(one for one in found.members if one.node == "a")
    assert (one.rank, one.standing) == (0, standing)
    assert one.said == ("worker 7 exited with code 1" if "failed" in fields else "")


def test_a_spare_and_a_node_of_an_older_lease() -> None:
    found = rounds(replace(RUNNING, max_nodes=2), nodes(*(ask(name, max_nodes=2, **fields) for name, fields in SPARES)))
    assert [(one.rank, one.node, one.standing) for one in found.members] == [
        (0, "a", "running"),
        (1, "b", "running"),
        (None, "c", "replaced"),
        (None, "c", "spare"),
    ]
    assert found.healthy


SPARES: list[tuple[str, dict[str, Any]]] = [("a", in_round(3)), ("b", in_round(3)), ("c", {}), ("c", {})]


@pytest.mark.parametrize(
    ("said", "standing"),
    [({}, "running"), ({"recalled": "gone"}, "called back"), ({"number": 4, "seats": seats("a"), "size": 1}, "away")],
)
def test_a_node_that_came_back_to_its_seat_holds_it(said: dict[str, Any], standing: str) -> None:
    """As it writes it: it knows of the round that it works in."""
    members = (
        member(RUN, 1, rendezvous_records.encode(ask("a", **in_round(said.get("number", 3))))),
        member(RUN, 8, rendezvous_records.encode(ask("b", after=3, seated=3, holds=member_id(2)))),
    )
    found = rounds(replace(RUNNING, **said), members)
    assert found.healthy == (standing != "called back")
    (one,) = (one for one in found.members if one.member == member_id(8))
    assert (one.rank, one.standing) == (1 if "seats" not in said else None, standing)


@pytest.mark.parametrize(("outcome", "healthy"), [("finished", True), ("failed", False), ("closed", False)])
def test_a_run_that_is_over(outcome: str, healthy: bool) -> None:
    found = rounds(replace(RUNNING, closed="so it is", outcome=outcome), [])
    assert (found.state, found.healthy, found.closed, found.missing) == (outcome, healthy, "so it is", [])
    assert found.next.reason == "the run is closed" or outcome == "failed"


def test_a_round_without_all_of_its_seats_is_unreadable() -> None:
    record = builders.round_(3, seats(*(f"n{at}" for at in range(9))), ready=True, limits=(2, 9))
    members = nodes(*(ask(f"n{at}", max_nodes=9, **in_round(3)) for at in range(9)))
    whole = run_of(record, members)
    assert len(whole.seats) == 2
    assert [one.rank for one in rounds(record, members).members] == [*range(9)]
    broken = seen(told_of(replace(whole, seats=dict([*whole.seats.items()][1:]))))
    assert (broken.rounds.state, broken.rounds.next.decision, broken.healthy) == ("unreadable", "withheld", False)
    assert len(broken.rounds.members) == 9


GARBAGE = [b"", b"{", b"[]", b'{"v":1}', b'{"v":99}', b"\xff\x00", b"[" * 100_000]


@pytest.mark.parametrize("value", GARBAGE, ids=lambda value: repr(value[:8]))
@pytest.mark.parametrize("place", ["member", "decided", "quorum", "death", "replica"])
def test_garbage_is_shown_as_such(value: bytes, place: str) -> None:
    good = ask("a", **in_round(3)), ask("b", **in_round(3))
    group = run_of(RUNNING, nodes(*good))
    decided = kv(decided_key(QUORUM), quorum_records.encode_quorum(quorum_of("x")))
    replicas = GroupKeys(QUORUM, decided, {}, (replica(9, "x"),))
    bad: dict[str, Callable[[], tuple[GroupKeys, GroupKeys, str]]] = {
        "member": lambda: (
            replace(group, below_members=(member(RUN, 3, value),)),
            replicas,
            member_key(RUN, member_id(3)),
        ),
        "decided": lambda: (replace(group, decided=kv(decided_key(RUN), value)), replicas, decided_key(RUN)),
        "quorum": lambda: (group, replace(replicas, decided=kv(decided.key, value)), decided.key),
        "death": lambda: (replace(group, deaths=(kv(death_key(RUN, "x"), value),)), replicas, ""),
        "replica": lambda: (
            group,
            replace(replicas, below_members=(member(QUORUM, 3, value),)),
            member_key(QUORUM, member_id(3)),
        ),
    }
    rendezvous, quorum, named = bad[place]()
    found = told_of(rendezvous, quorum)
    assert [one["key"] for one in found["unreadable"]] == ([named] if named else [])
    assert found["healthy"] is not bool(named)
    assert json.loads(to_json(found)) == found


# -- quorums --------------------------------------------------------------------------------------------------------


def request(name: str, step: int = 5) -> QuorumRequest:
    return builders.request(name, address=f"{name}:1", store_address=f"{name}:2", step=step, world_size=2)


def replica(lease: int, name: str, asked: int = 1, step: int = 5, min_replicas: int = 1) -> KeyValue:
    record = builders.replica(request(name, step), asked=asked, min_replicas=min_replicas)
    return member(QUORUM, lease, quorum_records.encode(record))


def quorum_of(*names: str, steps: Sequence[int] = ()) -> QuorumRecord:
    all_steps = [*steps, *[5] * len(names)]
    found = (QuorumSeat(member_id(9 + at), 1, request(name, all_steps[at])) for at, name in enumerate(names))
    return builders.quorum(4, tuple(found), id=2, created=123.5, by="me")


def quorum(record: QuorumRecord | None, *members: KeyValue, min_replicas: int = 1) -> Any:
    decided = kv(decided_key(QUORUM), quorum_records.encode_quorum(record)) if record else None
    group = GroupKeys(QUORUM, decided, {}, members)
    return seen(told_of(quorum=group, rules=Rules(quorum=QuorumOptions(min_replicas, 60)))["quorum"])


def test_replicas_that_train() -> None:
    found = quorum(quorum_of("x", "y", steps=(5, 3)), replica(9, "x"), replica(10, "y", step=3))
    assert (found.state, found.healthy, found.id, found.number, found.size) == ("training", True, 2, 4, 2)
    assert (found.max_step, found.created) == (5, 123.5)
    assert [(one.rank, one.replica_id, one.standing, one.behind) for one in found.replicas] == [
        (0, "x", "training", 0),
        (1, "y", "training", 2),
    ]


def test_members_of_an_elastic_run_have_its_ranks_and_are_behind_nobody() -> None:
    """Who was behind as it asked took the state of rank 0 with its group."""
    places = {"x": Place(0), "y": Place(14, 3, 1), "z": Place(14, 3, 0)}
    asks = {name: place.request(name) for name, place in places.items()}
    seats = tuple(QuorumSeat(member_id(9 + at), 1, one) for at, one in enumerate(asks.values()))
    members = tuple(
        member(QUORUM, 9 + at, quorum_records.encode(replace(builders.replica(one), asked=1)))
        for at, one in enumerate(asks.values())
    )
    decided = kv(decided_key(QUORUM), quorum_records.encode_quorum(builders.quorum(4, seats, id=2)))
    trains = GroupKeys(QUORUM, decided, {}, members)
    found = seen(told_of(quorum=trains)["quorum"])
    assert (found.state, found.healthy, found.max_step, found.stop) == ("training", True, 7, "")
    assert [(one.rank, one.replica_id, one.step, one.behind, one.heals_from) for one in found.replicas] == [
        (0, "z", 7, 0, ""),
        (1, "y", 7, 0, ""),
        (2, "x", 7, 0, ""),
    ]
    stops = told_of(quorum=replace(trains, stop=kv(elastic_stop_key(QUORUM), b"by ann")))
    found = seen(stops["quorum"])
    assert (found.state, found.healthy, found.stop) == ("stopping", True, "by ann")
    assert (line_of(stops)["state"], line_of(stops)["note"]) == ("stopping", "by ann")
    over = replace(trains, below_members=(), over=kv(elastic_over_key(QUORUM), b"stopped: all ranks at step 9: by ann"))
    found = seen(told_of(quorum=over)["quorum"])
    assert (found.state, found.healthy, found.missing) == ("stopped", True, [])
    assert seen(told_of(quorum=replace(over, below_members=members))["quorum"]).state == "training"  # again


def test_a_replica_that_waits_in_the_deciders_words() -> None:
    found = quorum(quorum_of("x", "y"), replica(9, "x", asked=2), replica(10, "y"))
    assert (found.state, found.healthy) == ("forming", True)
    assert found.next.decision == "wait"
    assert found.next.reason.startswith("New quorum not ready, only have 1 participants, need at least half of 2")
    assert [one.standing for one in found.replicas] == ["asking", "training"]


def test_too_few_replicas_are_not_healthy() -> None:
    for found in (quorum(None, replica(9, "x", min_replicas=2)), quorum(None, replica(9, "x"), min_replicas=2)):
        assert (found.state, found.healthy, found.number, found.min_replicas) == ("forming", False, 0, 2)
        assert (found.next.decision, found.next.reason) == ("wait", "1 of at least 2 replicas asks (x); start 1 more")


@pytest.mark.parametrize(("failures", "healthy"), [(FAILED_COMMITS - 1, True), (FAILED_COMMITS, False)])
def test_a_job_whose_commits_fail_again_and_again_is_not_healthy(failures: int, healthy: bool) -> None:
    record = quorum_of("x")
    failed = replace(record.seats[0].request, commit_failures=failures)
    found = quorum(replace(record, seats=(replace(record.seats[0], request=failed),)), replica(9, "x"))
    assert found.healthy is healthy
    assert ("if the Manager's min_replica_size is larger than min_replicas=1" in found.next.reason) is not healthy


def test_a_replica_that_is_gone_is_missing() -> None:
    found = quorum(quorum_of("x", "y"), replica(9, "x"))
    assert [(one.rank, one.replica_id) for one in found.missing] == [(1, "y")]
    assert not found.healthy


def test_of_two_members_with_one_name_the_newer_one_counts() -> None:
    found = quorum(quorum_of("x"), replica(9, "x"), replica(11, "x", asked=0))
    assert [(one.rank, one.member, one.standing) for one in found.replicas] == [
        (0, member_id(11), "training"),
        (None, member_id(9), "replaced"),
    ]


def test_where_not_all_are_shown_those_come_first_that_stand_otherwise_than_most() -> None:
    many = [ask(f"n{at}", after=0, seated=1) for at in range(60)] + [ask("late")]
    record = builders.round_(1, seats(*(one.node for one in many[:60])), port=5, ready=True, limits=(2, 4))
    told = told_of(run_of(record, nodes(*many)))
    assert told["rounds"] is not None
    members = told["rounds"]["members"]
    everybody = [one["node"] for one in members]
    assert everybody[-1] == "late"
    assert [one["node"] for one in foremost(members, 3)] == ["late", "n0", "n1"]
    assert [one["node"] for one in foremost(members, None)] == everybody
    assert [one["node"] for one in foremost(members, 61)] == everybody
    leases = Leases()
    with_leases(leases.time_left, told, 3)
    assert leases.asked == [one["member"] for one in foremost(members, 3)], "a request for each that is shown"
    late = members[-1]["standing"]
    shown = list(status_lines(told, Terminal(colours="never"), 3))
    at = shown.index(f"members (61: 60 running, 1 {late}):")
    assert [line.split()[5] for line in shown[at + 3 : at + 5]] == ["running", "running"]
    assert "host of late" in shown[at + 2]
    assert shown[at + 5] == "  ... and 58 more: --all shows them"
    assert "members (61):" in list(status_lines(told, Terminal(colours="never"), None))


# -- lists ----------------------------------------------------------------------------------------------------------


def line(record: Round | None, *asks: JoinRequest) -> tuple[str, int | None, int]:
    found = seen(line_of(told_of(run_of(record, nodes(*asks)))))
    return found.state, found.nodes, found.members


def test_lines_of_runs() -> None:
    both = ask("a", **in_round(3)), ask("b", **in_round(3))
    assert line(RUNNING, *both) == ("running", 2, 2)
    assert line(RUNNING, both[0]) == ("degraded", 2, 1)
    assert line(replace(RUNNING, ready=False), *both) == ("seating", 2, 2)
    assert line(replace(RUNNING, recalled="x"), *both) == ("forming", 2, 2)
    assert line(replace(RUNNING, closed="x", outcome="failed")) == ("failed", 2, 0)
    assert line(None, ask("a")) == ("forming", 0, 1)
    refused = ask("c", min_nodes=7, max_nodes=9, after=2)
    assert line(RUNNING, *both, refused) == ("running", 2, 2), "it counts for no decider"


def test_lines_of_quorums() -> None:
    both = kv(decided_key(QUORUM), quorum_records.encode_quorum(quorum_of("x", "y")))

    def found(decided: KeyValue | None, members: Sequence[KeyValue] = ()) -> tuple[str, int | None, int | None, int]:
        told = seen(line_of(told_of(quorum=GroupKeys(QUORUM, decided, {}, tuple(members)))))
        return told.state, told.quorum, told.replicas, told.members

    assert found(both, members=[replica(1, "x"), replica(2, "y")]) == ("training", 2, 2, 2)
    assert found(both, members=[replica(1, "x", asked=2), replica(2, "y")]) == ("training", 2, 2, 2)
    assert found(both, members=[replica(1, "x")]) == ("degraded", 2, 2, 1)
    assert found(both) == ("empty", 2, 2, 0)
    assert found(None, members=[replica(1, "x")]) == ("forming", 0, 0, 1)
    assert found(kv(both.key, b"{}"), members=[replica(1, "x")]) == ("unreadable", 0, 0, 1)
