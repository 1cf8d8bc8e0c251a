"""The commands of operators against a real etcd, with real nodes and replicas."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import builders
import pytest
from helpers import DEADLINE, eventually, python, set_alarm
from rdzv_nodes import MakeNodes, waits
from replicas import ReplicaProcess

from ftcoord import cli
from ftcoord.core.layout import KEY_PREFIX, decided_key, member_id, member_key, run_prefix
from ftcoord.core.rendezvous_records import NO_ROUND, WorkerFailure, encode, parse_decided
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"


class Commands:
    """Runs commands in this process."""

    def __init__(self, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._endpoint, self._capsys = endpoint, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """The exit code, and what was printed where."""
        self._capsys.readouterr()
        code = cli.main([*arguments, "--endpoints", self._endpoint, "--request-timeout", str(DEADLINE)])
        return (code, *self._capsys.readouterr())

    def json(self, *arguments: str) -> Any:
        """The document that a command prints."""
        return json.loads(self(*arguments, "-o", "json")[1])


@pytest.fixture
def run(etcd: EtcdServer, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(etcd.get_endpoint(), capsys)


def test_a_run_is_shown_from_its_first_node_on(make_nodes: MakeNodes, run: Commands) -> None:
    """What all commands show of one that runs: test_same_story."""
    nodes = make_nodes(2, 2, run_id="shown")
    first, second = nodes.add(2)
    joining = waits(first)
    alone = run.json("status", "shown")
    assert (alone["rounds"]["state"], alone["healthy"]) == ("forming", False)
    assert alone["rounds"]["next"] == {
        "decision": "wait",
        "reason": "1 of at least 2 nodes are there",
        "rule": "R4 forming",
    }
    assert run("status", "shown")[0] == 1
    for join in (joining, second.join()):
        join.result(DEADLINE)
    code, shown, _ = run("status", "shown")
    assert (code, "round 1 is running on 2 nodes [R3 recall]" in shown) == (0, True)
    found = run.json("status", "shown")["rounds"]["members"]
    assert all(0 < one["lease_left"] <= one["lease_ttl"] for one in found)


def test_an_evicted_node_is_called_back_with_the_reason(make_nodes: MakeNodes, run: Commands) -> None:
    nodes = make_nodes(2, 2, run_id="evicting")
    for join in [node.join() for node in nodes.add(2)]:
        join.result(DEADLINE)
    one = run.json("status", "evicting")["rounds"]["members"][1]
    code, shown, _ = run("evict", "evicting", one["member"], "--yes", "--reason", f"it smells {HOSTILE}")
    assert code == 0
    assert shown.startswith("evicted ")
    why = eventually(lambda: run.json("status", "evicting")["rounds"]["recalled"], "the round is recalled")
    assert re.fullmatch(r"\S+ \(pid \d+\) was evicted by \S+@\S+: it smells .*", why, re.DOTALL)
    assert run("evict", "evicting", one["member"], "--yes")[0] == 1


def test_a_drained_node_leaves_without_an_error_and_the_others_go_on(make_nodes: MakeNodes, run: Commands) -> None:
    nodes = make_nodes(2, 3, run_id="draining", lease_ttl=600)
    three = nodes.add(3)
    seats = [join.result(DEADLINE) for join in [node.join() for node in three]]
    leaver, *others = sorted(three, key=lambda node: seats[three.index(node)].rank != 1)
    code, shown, _ = run("drain", "draining", leaver.member().id, "--yes", "--reason", "its disk is worn out")
    assert code == 0
    assert shown.startswith("drained ")
    assert {one["standing"] for one in run.json("status", "draining")["rounds"]["members"]} >= {"draining"}
    for node in three:
        eventually(node.signalled, "all are called back, the leaver too")
    again = [node.join() for node in others]
    with pytest.raises(SystemExit) as left:
        leaver.join().result(DEADLINE)
    assert left.value.code == 0
    assert sorted((seat.rank, seat.world) for seat in (join.result(DEADLINE) for join in again)) == [(0, 2), (1, 2)]
    leaver.end_with(left.value)
    events = run.json("history", "draining")["events"]
    told = [(one["kind"], one["reason"]) for one in events if "its disk is worn out" in one["reason"]]
    assert [kind for kind, _ in told] == ["ordered", "recalled", "round"]
    assert all(re.search(r"was drained by \S+@\S+: its disk is worn out", reason) for _, reason in told)
    assert run.json("status", "draining")["rounds"]["state"] == "running"


def test_only_a_node_that_can_be_spared_is_drained(make_nodes: MakeNodes, run: Commands) -> None:
    nodes = make_nodes(2, 2, run_id="short")
    two = nodes.add(2)
    for join in [node.join() for node in two]:
        join.result(DEADLINE)
    id_ = two[0].member().id
    code, _, said = run("drain", "short", id_, "--yes")
    assert code == 1
    assert "1 of at least 2 nodes would be left of 'short'" in said
    code, _, said = run("drain", "short", id_, "--force")
    assert (code, "--yes is missing" in said) == (2, True)
    assert not two[0].signalled()
    assert run("drain", "short", id_, "--yes", "--force")[0] == 0
    assert run("drain", "short", id_, "--yes", "--force")[1].startswith("left alone: ")
    other = two[1].member().id
    assert "0 of at least 2 nodes" in run("drain", "short", other, "--yes")[2]  # it is there, and is to leave
    assert two[0].finish()
    assert run.json("status", "short")["rounds"]["closed"] == ""  # whoever is drained closes nothing


def test_a_closed_run_ends_for_its_nodes(make_nodes: MakeNodes, run: Commands) -> None:
    nodes = make_nodes(2, 2, run_id="closing")
    joining = waits(nodes.add(1)[0])
    code, shown, _ = run("close", "closing", "--yes", "--reason", "the disk is full")
    assert code == 0
    assert re.fullmatch(r"closed 'closing': closed by \S+@\S+: the disk is full\n", shown)
    assert "the disk is full" in str(joining.exception(DEADLINE))
    code, shown, _ = run("close", "closing", "--yes")
    assert code == 1
    assert shown.startswith("left alone: it was over already: closed by ")


def test_quorums_are_told_and_a_manager_is_killed(etcd: EtcdServer, run: Commands) -> None:
    address = f"etcd://{etcd.get_endpoint()}/replicas?min_replicas=1&join_timeout_ms=100"
    process = ReplicaProcess(address)
    try:
        manager = process.manage("r1:4f1c-77")
        process.quorum(manager, step=3).result(DEADLINE)
        found = run.json("status", "replicas")["quorum"]
        names = [one["replica_id"] for one in found["replicas"]]
        assert (found["state"], found["size"], found["max_step"], names) == ("training", 1, 3, ["r1:4f1c-77"])
        address, _, token = manager.partition("#")
        assert [one["address"] for one in found["replicas"]] == [address]
        told = [run(command, "replicas") for command in ("status", "why", "history")]
        assert len(token) == 32
        assert token not in repr([found, told])
        assert run("kill", "replicas", "nobody", "--yes")[0] == 1
        code, shown, _ = run("kill", "replicas", "r1", "--yes")
        assert code == 0
        assert shown.startswith("killed the manager of 'r1:4f1c-77': killed by ")
        assert process.code() == 1
    finally:
        process.kill()


@pytest.mark.parametrize("arguments", [("evict", "job", "x"), ("close", "job"), ("kill", "job", "x")])
def test_what_acts_asks_first(arguments: tuple[str, ...], run: Commands, client: EtcdClient) -> None:
    """Nobody can answer here, so it is refused."""
    lease = client.grant(60).id
    member = member_key(run_prefix(KEY_PREFIX, "job"), member_id(lease))
    client.put(member, b"x", lease)
    code, _, told = run(*(member_id(lease) if one == "x" else one for one in arguments))
    assert code == 2
    assert "--yes" in told
    assert client.get(member).one is not None
    client.revoke(lease)


class Answers(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_only_a_yes_is_a_yes(
    answer: str, code: int, run: Commands, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"asked{HOSTILE}"
    key = decided_key(run_prefix(KEY_PREFIX, job))
    client.put(key, encode(NO_ROUND))
    monkeypatch.setattr(sys, "stdin", Answers(answer))
    done, _, told = run("close", job)
    kv = client.get(key).one
    assert kv is not None
    assert (done, bool(parse_decided(key, kv.value).closed)) == (code, code == 0)
    assert "close 'asked" in told
    assert "\x1b" not in told
    client.delete(Span(key))


@pytest.mark.parametrize("format", ["table", "json", "yaml"])
def test_hostile_names_move_no_cursor(format: str, run: Commands, client: EtcdClient) -> None:
    prefix = run_prefix(KEY_PREFIX, f"bad{HOSTILE}")
    lease = client.grant(60).id
    ask = builders.ask(
        HOSTILE,
        address=HOSTILE,
        host=HOSTILE,
        nonce="",
        failed=(WorkerFailure(1, 0, 0, 1, 0, HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        limits=(1, 1),
    )
    client.put(member_key(prefix, member_id(lease)), encode(ask), lease)
    client.put(member_key(prefix, HOSTILE), b"\x1b[31mnothing")
    client.put(decided_key(prefix), b'\x1b[31m{"v"')
    for arguments in (("ls",), ("status", f"bad{HOSTILE}"), ("doctor",), ("evict", f"bad{HOSTILE}", HOSTILE, "--yes")):
        _, shown, told = run(*arguments, "-o", format)
        assert not set(shown + told) & {"\x1b", "\x07", "\u202e"}, arguments
    client.delete(Span(f"{prefix}/", is_prefix=True))


def test_nobody_knows_this_job(run: Commands) -> None:
    for arguments in (("status", "nobody"), ("evict", "nobody", "x", "--yes"), ("close", "nobody", "--yes")):
        code, shown, told = run(*arguments)
        assert code == 1
        assert "ftcoord ls" in shown + told
    found = run.json("status", "nobody")
    assert (found["exists"], found["healthy"]) == (False, False)


def test_the_doctor_of_an_etcd_without_space_and_without_logins(fragile: EtcdServer) -> None:
    """Its user is ignored, and it is told what to do about the space, once."""
    set_alarm(fragile.get_endpoint(), True)
    command = [sys.executable, "-m", "ftcoord", "doctor", "--endpoints", fragile.get_endpoint(), "--output", "json"]
    env = {**os.environ, "FTCOORD_USER": "job1", "FTCOORD_PASSWORD": "swordfish"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["findings"]
    (space,) = [one for one in found if one["level"] == "problem"]
    assert space["about"] == "space"
    assert re.fullmatch(r"is used up \(NOSPACE\): localhost:\d+ has [\d.]+ MiB of an unknown quota", space["found"])
    assert "alarm disarm" in space["do"]
    assert [one["found"].split(":")[0] for one in found if one["about"] == "login"] == ["logins are off"]
    assert not {one["about"] for one in found if "NOSPACE" in one["found"]} - {"space"}


def test_the_doctor_does_what_agents_do(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands between a host and etcd may pass calls, and no streams."""

    def refuse(*_: object, **__: object) -> int:
        raise EtcdUnavailable("context canceled")

    monkeypatch.setattr(EtcdClient, "renew", refuse)
    monkeypatch.setattr(EtcdClient, "watch", lambda *_, **__: SimpleNamespace(cancel=lambda: None))
    assert cli.main(["doctor", "--endpoints", etcd.get_endpoint(), "--request-timeout", "1", "-o", "json"]) == 1
    shown = capsys.readouterr().out
    broken = {one["about"]: one["found"] for one in json.loads(shown)["findings"] if one["level"] == "problem"}
    assert broken == {
        "lease": "none was renewed: context canceled",
        "watch": "none was confirmed: etcd has not answered for 1 s",
    }


@pytest.mark.parametrize("arguments", [("ls",), ("status", "job"), ("doctor",), ("watch", "job")])
def test_without_etcd_all_end_with_3_and_say_where_they_looked(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main([*arguments, "--endpoints", "127.0.0.1:1", "--request-timeout", "0.3"])
    shown, told = capsys.readouterr()
    assert code == 3
    assert "127.0.0.1:1" in shown + told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ls", "-o", "xml"), "--output"),
        (("ls", "--request-timeout", "soon"), "--request-timeout"),
        (("ls", "--endpoints", "ftp://x"), "--endpoints"),
        (("status", " "), "JOB"),
        (("status", "job", "--min-replicas", "0"), "--min-replicas"),
        (("status",), "JOB"),
        (("train",), "demo"),
        (("gateway",), "--etcd"),
    ],
)
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as error:  # argparse's
        code = error.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_each_flag_has_a_variable(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOORD_OUTPUT", "json")
    assert json.loads(run("ls")[1])["format"] == 1
    assert run("ls", "-o", "table")[1][:1] != "{"
    monkeypatch.setenv("FTCOORD_OUTPUT", "xml")
    code, _, told = run("ls")
    assert (code, "FTCOORD_OUTPUT" in told) == (2, True)


# -- watch ----------------------------------------------------------------------------------------------------------

Lines: TypeAlias = "Callable[[Callable[[Any], bool]], Any]"


@contextmanager
def watching(endpoint: str, job: str) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """A watch in a process of its own, and what waits for a document of it."""
    with python("-m", "ftcoord.cli", "watch", job, "-o", "json", "--endpoints", endpoint) as process:

        def until(holds: Callable[[Any], bool]) -> Any:
            assert process.stdout is not None
            for line in process.stdout:
                if holds(found := json.loads(line)):
                    return found
            return pytest.fail("the watch has ended")

        yield process, until


def test_a_watch_tells_each_change_and_that_etcd_is_lost(fragile: EtcdServer, make_nodes: MakeNodes) -> None:
    with watching(fragile.get_endpoint(), "seen") as (process, until):
        nodes = make_nodes(1, 1, on=fragile, run_id="seen", last_call_timeout=0.2)
        nodes.add(1)[0].join().result(DEADLINE)
        found = until(lambda one: one["status"]["healthy"])
        assert (found["connected"], found["status"]["rounds"]["state"]) == (True, "running")
        fragile.pause()
        lost = until(lambda one: not one["connected"])
        assert lost["error"]
        fragile.resume()
        until(lambda one: one["connected"])
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0
