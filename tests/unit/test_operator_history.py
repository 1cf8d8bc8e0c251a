"""What operators are told of a job's past, from keys in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import builders
import pytest
from reports import made, seen
from test_operator_status import QUORUM, RUN, ask, nodes, run_of, seats, told_of

from ftcoord.commands.ls_status_watch_history_why_doctor import history_lines, why_lines
from ftcoord.commands.shared import Terminal, to_json
from ftcoord.core import death_records
from ftcoord.core.death_records import Death
from ftcoord.core.history import NOT_ASKING, HistoryEvent, encode
from ftcoord.core.layout import death_key, event_key, member_id
from ftcoord.core.rendezvous_records import WorkerFailure
from ftcoord.etcd.api import KeyValue
from ftcoord.operator import history as operator_history
from ftcoord.operator.report import JobStatus, MissingReplica, NextDecision, QuorumStatus, ReplicaStatus, paragraph
from ftcoord.operator.status import GroupKeys, JobKeys

RAISED = WorkerFailure(90, 5, 1, 1, 0, "exited with code 1", "ValueError: loss is nan", "Traceback ...")
RESET = replace(RAISED, pid=91, exception="RuntimeError: Connection reset by peer")
DECIDED = HistoryEvent("round", 7, reason="3 nodes; new: hostA, hostB, hostC")
STARTED = HistoryEvent("started", 7, reason="round 7 is ready on 3 nodes")


def failed(host: str, worker: WorkerFailure, noted: int) -> HistoryEvent:
    return HistoryEvent("expired" if worker.timer else "failed", 7, host, host, worker.line, (worker,), noted)


def ended(kind: str, host: str, reason: str, noted: int, number: int = 7) -> HistoryEvent:
    return HistoryEvent(kind, number, host, host, reason, noted=noted)


def recalled(reason: str, number: int = 7) -> HistoryEvent:
    return HistoryEvent("recalled", number, reason=reason)


def events(*found: HistoryEvent, prefix: str = RUN) -> list[KeyValue]:
    """Each of them written with a transaction of its own, from revision 100 on."""
    keys = [event_key(prefix, at, "w", at) for at in range(100, 100 + len(found))]
    return [
        KeyValue(key, encode(one), at, at, 1, 9) for at, (key, one) in enumerate(zip(keys, found, strict=True), 100)
    ]


def running(number: int = 8, *names: str) -> JobStatus:
    record = builders.round_(number, seats(*names), ready=True, limits=(2, 4))
    there = nodes(*(ask(name, seated=number, after=number - 1) for name in names))
    return told_of(rounds=run_of(record, there))


def keys(
    rounds: Sequence[KeyValue], quorums: Sequence[KeyValue], deaths: Sequence[KeyValue] = (), job: str = "job"
) -> JobKeys:
    """Of a job with these histories, and causes of death in its quorums."""
    quorum = GroupKeys(QUORUM, events=tuple(quorums), deaths=tuple(deaths))
    return JobKeys(job, 9, GroupKeys(RUN, events=tuple(rounds)), quorum, True)


def explain(status: JobStatus, *of: Sequence[KeyValue]) -> Any:
    found = operator_history.explain(status, keys(*of))
    return seen({**found, "text": paragraph(found)})


def why(status: JobStatus, *found: HistoryEvent) -> Any:
    return explain(status, events(*found), ())


def test_the_first_cause_of_the_last_round_is_told_and_what_to_do() -> None:
    worker = failed("hostB", RAISED, 101), failed("hostA", RESET, 99)
    found = why(
        running(8, "hostA", "hostC"),
        DECIDED,
        STARTED,
        *worker,
        recalled("hostA: ..."),
        replace(DECIDED, number=8, reason="2 nodes; without hostB; the round before ended: something"),
    )
    assert found.happened == (
        "Round 7 ended. It began with this: hostB: worker 90 (rank 5, local rank 1) raised ValueError: loss is nan."
    )
    assert found.first is not None
    assert vars(found.first.worker) == asdict(RAISED)
    assert found.followed == 1
    assert found.lost.endswith("is lost. Round 8 followed: 2 nodes; without hostB.")
    assert found.now == "Now round 8 runs on 2 nodes."
    assert "traceback" in found.do
    assert found.healthy


def test_a_round_that_runs_without_one_of_its_nodes_says_without_which() -> None:
    record = builders.round_(8, seats("hostA", "hostB"), ready=True, limits=(2, 4))
    left = nodes(ask("hostA", seated=8, after=7))
    died = "host of hostB was killed by signal 9 (SIGKILL)"
    death = KeyValue(death_key(RUN, member_id(2)), death_records.encode(Death(died, 0)), 1, 1, 1, 9)
    found = why(told_of(rounds=run_of(record, left, (death,))), DECIDED, STARTED)
    assert found.now == f"Now round 8 runs on 1 of 2 nodes; gone: {died}."
    assert not found.healthy
    found = why(told_of(rounds=run_of(record, deaths=(death,))), DECIDED, STARTED)
    assert found.now == f"Now it is empty, and was in round 8; gone: host of hostA; {died}."


def test_ends_of_earlier_rounds_are_not_to_blame() -> None:
    old = ended("died", "hostC", "hostC was killed by signal 9 (SIGKILL)", 90, number=6)
    found = why(running(8, "hostA", "hostB"), old, DECIDED, STARTED, recalled("hostD waits to join"))
    assert (found.first, found.followed) == (None, 0)
    assert found.happened == "Round 7 ended: hostD waits to join."


def test_a_run_that_was_started_again_is_not_over() -> None:
    closed, again = HistoryEvent("closed", 7, reason="failed: hostB failed"), replace(DECIDED, number=8, reason="x")
    found = why(running(8, "hostA"), DECIDED, STARTED, failed("hostB", RAISED, 0), closed, again)
    assert found.healthy
    assert found.happened.startswith(
        "Round 7 ended, and the run with it, which was started again since (hostB failed). It began with this: hostB: "
    )
    assert found.lost.endswith("Round 8 followed: x.")
    finished = HistoryEvent("closed", 7, reason="finished: hostB finished")
    found = why(running(8, "hostA"), DECIDED, STARTED, finished, again)
    assert "The run has finished" not in found.text


def test_a_run_that_finished_needs_nothing() -> None:
    closed = HistoryEvent("closed", 7, reason="finished: hostA finished")
    found = why(told_of(), DECIDED, STARTED, closed)
    assert found.healthy
    assert found.text == "The run has finished: hostA finished."


@pytest.mark.parametrize("told", ["hostB failed", "hostB failed; first cause: hostB: worker 90 (rank 5, local rank 1)"])
def test_a_run_that_failed_is_explained(told: str) -> None:
    closed = HistoryEvent("closed", 7, reason=f"failed: {told}")
    found = why(running(7, "hostA"), DECIDED, STARTED, failed("hostB", RAISED, 0), recalled("hostB: ..."), closed)
    assert found.happened.startswith("The run is over")
    assert "hostB: worker 90 (rank 5, local rank 1) raised ValueError" in found.happened


@pytest.mark.parametrize(
    ("end", "advice"),
    [
        (ended("lost", "hostB", "hostB is gone (its lease ended)", 1), "reaches etcd"),
        (ended("died", "hostB", "hostB was killed by signal 9 (SIGKILL)", 1), "dmesg"),
        (ended("died", "hostB", "hostB was killed by the kernel, ... no memory left (OOM)", 1), "more memory"),
        (ended("died", "hostB", "hostB was evicted by me@here: it smells", 1), "evicted by hand"),
        (ended("left", "hostB", "hostB was stopped by SIGHUP", 1), "asked to stop"),
        (failed("hostB", replace(RAISED, exception="torch.OutOfMemoryError: CUDA out of memory"), 1), "more memory"),
        (failed("hostB", replace(RAISED, exception=""), 1), "`record`"),
        (failed("hostB", WorkerFailure(9, signal=9, fate="was killed by signal 9 (SIGKILL)"), 1), "dmesg"),
        (failed("hostB", WorkerFailure(9, signal=11, fate="was killed by signal 11 (SIGSEGV)"), 1), "crashed"),
        (failed("hostB", WorkerFailure(9, signal=10, fate="was killed by signal 10 (SIGUSR1)"), 1), "sent SIGUSR1"),
        (failed("hostB", WorkerFailure(9, signal=15, fate="was killed by signal 15 (SIGTERM)"), 1), "sent SIGTERM"),
        (ended("died", "hostB", "hostB was killed by signal 12 (SIGUSR2)", 1), "sent SIGUSR2 on hostB: schedulers"),
        (failed("hostB", WorkerFailure(9, signal=9, timer="forward"), 1), "'forward'"),
    ],
)
def test_each_cause_has_its_advice(end: HistoryEvent, advice: str) -> None:
    found = why(running(8, "hostA", "hostC"), DECIDED, STARTED, end, recalled("..."))
    assert found.first is not None
    assert found.first.kind == end.kind
    assert advice in found.do


def test_nodes_that_are_missing_are_to_be_started() -> None:
    """Of a run that waits for them."""
    record = builders.round_(7, seats("hostA", "hostB"), ready=True, recalled="hostB left", limits=(2, 4))
    status = told_of(rounds=run_of(record, nodes(ask("hostA", after=7))))
    found = why(status, DECIDED, STARTED, recalled("it was recalled"))
    assert found.do == "Start 1 more node with the same --rdzv-id and --rdzv-endpoint."
    assert found.now == "Now it is forming: 1 of at least 2 nodes are there."
    empty = told_of(rounds=run_of(record))
    assert why(empty, DECIDED, STARTED, recalled("it was recalled")).now == "Now it is empty: no node asks for a round."


def test_a_run_that_waits_since_a_node_contradicts_it_names_that_one() -> None:
    """Also when another one had died before."""
    refused = "host of hostB is refused, since its --nnodes contradicts this run's. Give all nodes the same"
    for number, who in ((0, ()), (7, seats("hostA"))):
        record = builders.round_(number, who, limits=(2, 2), ready=bool(who), recalled="x" if who else "")
        there = nodes(ask("hostA", after=record.number, max_nodes=2), ask("hostB", after=record.number))
        status = told_of(rounds=run_of(record, there))
        died = ended("died", "hostC", "hostC was killed by signal 9 (SIGKILL)", 0)
        assert why(status).do.startswith(refused)
        assert why(status, DECIDED, STARTED, died, recalled("hostC was killed")).do.startswith(refused)
    assert "dmesg" in why(running(8, "hostA"), DECIDED, STARTED, died, recalled("hostC was killed")).do


def test_of_quorums_the_last_that_lost_members_is_told() -> None:
    past = (
        HistoryEvent("quorum", 3, reason="3 replicas"),
        ended("died", "b", "b: hostB was killed by signal 9 (SIGKILL)", 0, number=3),
        HistoryEvent("quorum", 4, reason="2 replicas; without b"),
    )
    found = explain(told_of(), (), events(*past, prefix=QUORUM))
    assert found.happened == ("Quorum 3 lost members. It began with this: b: hostB was killed by signal 9 (SIGKILL).")
    followed = "Quorum 4 followed: 2 replicas; without b. The others lost the step that they were in, at most."
    assert found.lost == followed
    heals = made(ReplicaStatus, 0, "b", "1", "asking", 4, 3, 0, False, 1, "", 1, heals_from="a")
    status = made(QuorumStatus, "training", True, 4, 4, 2, 7, 0.0, 1, made(NextDecision, "wait", "x", ""), (heals,), ())
    found = explain({**told_of(), "quorum": status}, (), events(*past, prefix=QUORUM))
    assert found.lost == f"{followed} b is 3 steps behind, and heals from a."
    assert found.now == "Now it is training: quorum 4 has 2 replicas."  # not why nobody asks yet
    found = explain({**told_of(), "quorum": {**status, "state": "forming"}}, (), events(*past, prefix=QUORUM))
    assert found.now == "Now it is forming: quorum 4 has 2 replicas; x."
    stopping = {**status, "state": "stopping", "stop": "asked by ann"}
    found = explain({**told_of(), "quorum": stopping}, (), events(*past, prefix=QUORUM))
    assert found.now == "Now it is stopping: quorum 4 has 2 replicas; asked by ann."
    over = HistoryEvent("closed", 4, reason="stopped: all ranks at step 9: asked by ann")
    stopped = {**told_of(), "quorum": {**status, "state": "stopped"}}
    found = explain(stopped, (), events(*past, over, prefix=QUORUM))
    assert found.text == "The run has stopped: all ranks at step 9: asked by ann."
    gone = [made(MissingReplica, 0, "a", "1", "killed"), made(MissingReplica, 1, "b", "2", "")]
    found = explain(
        {**told_of(), "quorum": {**status, "healthy": False, "missing": gone}}, (), events(*past, prefix=QUORUM)
    )
    assert found.now == "Now it is training: quorum 4 has 2 replicas; x; gone: a: killed; b."


def missing(*gone: MissingReplica, live: Sequence[ReplicaStatus] = ()) -> JobStatus:
    status = made(
        QuorumStatus, "idle", False, 3, 3, 2, 7, 0.0, 2, made(NextDecision, "wait", "x", ""), tuple(live), gone
    )
    return {**told_of(), "quorum": status, "revision": 200}


def death(member: str, cause: str, revision: int) -> KeyValue:
    return KeyValue(death_key(QUORUM, member), death_records.encode(Death(cause, 0)), revision, revision, 1, 9)


def test_replicas_that_no_decision_tells_of_are_named() -> None:
    """Too few are left for another quorum."""
    decided = HistoryEvent("quorum", 3, reason="3 replicas")
    gone = missing(made(MissingReplica, 0, "b", "1", "killed"), made(MissingReplica, 1, "c", "2", "killed, too"))
    deaths = death("1", "killed", 150), death("2", "killed, too", 140)
    found = explain(gone, (), events(decided, prefix=QUORUM), deaths)
    assert found.happened == "Quorum 3 lost members. It began with this: c: killed, too."
    assert (found.followed, found.first and found.first.revision) == (1, 140)
    found = explain(missing(made(MissingReplica, 0, "b", "1", "")), (), events(decided, prefix=QUORUM))
    assert found.first is not None
    assert (found.first.kind, found.first.number, found.first.revision) == ("lost", 3, 200)


def test_a_replica_that_the_others_went_on_without_is_told_as_it_is_known_now() -> None:
    """It stood still, or its host was lost, and its lease ended later."""
    word = f"a left ({NOT_ASKING})"
    past = (
        HistoryEvent("quorum", 3, reason="3 replicas"),
        HistoryEvent("left", 3, "a", "a", word, member="1"),
        HistoryEvent("quorum", 4, reason="2 replicas; without a"),
    )

    def told(live: Sequence[ReplicaStatus], *deaths: KeyValue) -> tuple[str, str]:
        found = explain(missing(live=live), (), events(*past, prefix=QUORUM), deaths)
        assert found.first is not None
        assert found.lost.startswith("Quorum 4 followed")
        return found.first.kind, found.first.reason

    there = made(ReplicaStatus, None, "a", "1", "idle", 4, 0, 0, False, 1, "", 1)
    assert told([there]) == ("left", word)
    assert told([]) == ("lost", "a is gone (its lease ended, or it left)")
    assert told([], death("1", "its host went down", 150)) == ("died", "a: its host went down")


def test_a_death_is_not_blamed_on_one_of_which_the_replica_came_back_since() -> None:
    """Its quorum kept its id."""
    decided = HistoryEvent("quorum", 3, reason="3 replicas")
    deaths = [
        HistoryEvent("died", 3, name, name, f"{name}: killed", noted=at, member=name) for at, name in enumerate("bc")
    ]
    found = explain(told_of(), (), events(decided, *deaths, prefix=QUORUM))
    assert found.first is not None
    assert (found.first.who, found.followed) == ("c", 0)
    found = explain(missing(made(MissingReplica, 0, "d", "1", "")), (), events(decided, *deaths, prefix=QUORUM))
    assert found.first is not None
    assert found.first.who == "d"


def test_a_replica_that_was_killed_by_hand_is_told_as_such() -> None:
    """Its process exits with status 1 then, which its log and its kernel do not explain."""
    exited = ended("died", "b", "b: hostB exited with code 1", 0, number=3)
    order = HistoryEvent("ordered", 0, "b", reason="b: killed by me@here")
    decided = HistoryEvent("quorum", 3, reason="3 replicas")
    assert explain(told_of(), (), events(decided, order, exited, prefix=QUORUM)).do == (
        "It was ended by hand: b: killed by me@here."
    )
    again = replace(decided, number=4), replace(exited, number=4)
    assert "dmesg" in explain(told_of(), (), events(decided, order, exited, *again, prefix=QUORUM)).do


def test_a_job_without_history_is_told_as_such() -> None:
    found = why(running(1, "hostA", "hostB"))
    assert (found.happened, found.first, found.do) == ("", None, "")
    assert found.now == "Now round 1 runs on 2 nodes."
    assert explain(told_of(), (), ()).text == "It has no history."


def test_history_is_in_etcds_order_over_both_groups() -> None:
    quorum = HistoryEvent("quorum", 1, reason="2 replicas")
    found = seen(operator_history.history_of(keys(events(DECIDED, STARTED), events(quorum, prefix=QUORUM))))
    assert [(one.revision, one.group, one.kind) for one in found.events] == [
        (100, "rendezvous", "round"),
        (100, "quorums", "quorum"),
        (101, "rendezvous", "started"),
    ]


def lines(found: object, of: object) -> Sequence[str]:
    return list(of(found, Terminal("table", "never")))  # type: ignore[operator]


def test_no_text_of_anybody_moves_the_cursor() -> None:
    hostile = "\x1b]0;owned\x07\u202e"
    worker = WorkerFailure(1, 0, 0, 1, 0, hostile, hostile, hostile, hostile)
    all_of_it = [HistoryEvent("failed", 7, hostile, hostile, hostile, (worker,)), recalled(hostile)]
    history = operator_history.history_of(keys(events(*all_of_it), (), job=hostile))
    explained = operator_history.explain(running(8, "hostA"), keys(events(*all_of_it), ()))
    for line in (*lines(history, history_lines), *lines(explained, why_lines)):
        assert line.isascii()
        assert line.isprintable()
    assert to_json(history).isascii()


def test_reasons_are_shown_whole() -> None:
    told = lines(operator_history.history_of(keys(events(recalled("x" * 300)), ())), history_lines)
    assert re.search("x{300}", told[1])
