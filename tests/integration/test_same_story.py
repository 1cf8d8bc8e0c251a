"""One node of three is killed: whatever an operator looks at tells the same story of it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from typing import Any
from urllib.request import urlopen

import pytest
from helpers import DEADLINE, eventually
from pages import page
from prometheus_client.parser import text_string_to_metric_families
from rdzv_nodes import NodeProcess, all_join, processes
from victims import KILLED, sentinels_of

from ftcoord import cli
from ftcoord.embedded.server import EtcdServer

JOB = "story"


class Operator:
    """Runs commands, each twice: as people read it, and as JSON."""

    def __init__(self, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._where = ("--endpoints", endpoint, "--request-timeout", str(DEADLINE))
        self._capsys = capsys

    def text(self, *arguments: str, code: int = 0) -> str:
        """What a command prints, if it ends with this code: 0 where all is well."""
        self._capsys.readouterr()
        assert cli.main([*arguments, *self._where]) == code
        return " ".join(self._capsys.readouterr().out.split())  # however its lines are wrapped

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.text(*arguments, "-o", "json", code=code))


class Watcher:
    """`ftcoord watch` as a process of its own, and the lines that it has shown."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)

    def end(self) -> int:
        """Press Ctrl-C; the exit code."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code


@contextmanager
def watching(endpoint: str) -> Iterator[Watcher]:
    command = [sys.executable, "-m", "ftcoord.cli", "watch", JOB, "--endpoints", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watcher = Watcher(process)
        try:
            yield watcher
        finally:
            if process.poll() is None:
                watcher.end()


class Browser:
    """One viewer's stream of the page."""

    def __init__(self, stream: HTTPResponse) -> None:
        self._stream, self._kind = stream, ""
        self.report: Any = None
        self.why, self.events = "", list[Any]()

    def read_until_round(self, number: int, why: str) -> None:
        """Until the page shows this round, and why."""
        while not (self.report and self.report["rounds"]["number"] == number and self.report["rounds"]["ready"]) or (
            why not in self.why
        ):
            line = self._stream.readline().decode()
            assert line, "the page ended its stream"
            if line.startswith("event: "):
                self._kind = line.removeprefix("event: ").strip()
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if self._kind == "report":
                    self.report, self.why = data["report"], data["why"]
                elif self._kind == "history":
                    self.events = data["history"]["events"]


def numbers_of(address: str) -> dict[str, float]:
    """What Prometheus is told of the run."""
    with urlopen(f"{address}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.name: one.value for one in samples if one.labels.get("run") == JOB and "rounds" not in one.labels}


def test_all_tell_the_same_story_of_a_node_that_was_killed(
    etcd: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, operator = etcd.get_endpoint(), Operator(etcd.get_endpoint(), capsys)
    with ExitStack() as stack:
        nodes = stack.enter_context(processes(*(NodeProcess(endpoint, JOB, (2, 3), lease_ttl=60) for _ in range(3))))
        assert [seat.round for seat in all_join(*nodes)] == [1, 1, 1]
        watcher = stack.enter_context(watching(endpoint))
        address = stack.enter_context(page(endpoint))
        browser = Browser(stack.enter_context(urlopen(f"{address}/api/job?job={JOB}", timeout=DEADLINE)))
        eventually(lambda: any("round 1 with 3 nodes" in line for line in watcher.lines), "`watch` shows round 1")

        victim, *others = nodes
        eventually(lambda: sentinels_of(victim.pid), "a sentinel stands beside it")
        host = f"{socket.gethostname()} (pid {victim.pid})"
        victim.die()
        for node in others:
            eventually(lambda node=node: node.ask("waiting"), "it is called back")  # type: ignore[misc]

        cause = f"{host} {KILLED}"  # nothing moves, until the others come back
        status = operator.json("status", JOB, code=1)["rounds"]
        assert (status["number"], status["recalled"], status["state"]) == (1, cause, "forming")
        assert status["next"]["reason"] == "0 of at least 2 nodes are there"
        assert operator.json("why", JOB, code=1)["now"] == "Now it is forming: 0 of at least 2 nodes are there."
        eventually(lambda: any(f"; recalled {cause}; " in line for line in watcher.lines), "`watch` shows the recall")
        assert [(seat.round, seat.world) for seat in all_join(*others)] == [(2, 2), (2, 2)]

        status = operator.json("status", JOB)["rounds"]
        assert (status["number"], status["size"], status["ready"], status["state"]) == (2, 2, True, "running")
        assert (len(status["members"]), status["missing"]) == (2, [])
        assert status["before"] == cause
        shown = operator.text("status", JOB)
        assert "round 2 with 2 nodes" in shown
        assert f"before {cause}" in shown

        (line,) = (one for one in operator.json("ls")["jobs"] if one["job"] == JOB)
        assert (line["state"], line["round"], line["nodes"], line["members"]) == ("running", 2, 2, 2)
        assert line["note"] == cause
        assert cause in operator.text("ls")

        why = operator.json("why", JOB)
        assert why["happened"] == f"Round 1 ended. It began with this: {cause}."
        assert (why["first"]["kind"], why["first"]["number"], why["first"]["who"]) == ("died", 1, host)
        assert why["now"] == "Now round 2 runs on 2 nodes."
        assert "Round 2 followed: 2 nodes" in why["lost"]
        assert f"began with this: {cause}" in operator.text("why", JOB)

        events = operator.json("history", JOB)["events"]
        assert [(one["kind"], one["number"]) for one in events] == [
            ("round", 1),
            ("started", 1),
            ("died", 1),
            ("recalled", 1),
            ("round", 2),
            ("started", 2),
        ]
        died, recalled, formed = events[-4:-1]
        assert (died["who"], died["reason"], recalled["reason"]) == (host, cause, cause)
        assert formed["reason"] == f"2 nodes; without {host}; the round before ended: {cause}"
        assert cause in operator.text("history", JOB)

        settled = "healthy; rendezvous running, round 2 with 2 nodes"
        eventually(lambda: any(settled in one for one in watcher.lines), "`watch` shows round 2")
        assert watcher.end() == 0
        last = next(one for one in watcher.lines if settled in one)
        assert f"; before {cause}; next round waits: round 2 is running on 2 nodes [R3 recall]" in last

        browser.read_until_round(2, why["now"])
        rounds = browser.report["rounds"]
        assert (browser.report["healthy"], rounds["size"], len(rounds["members"])) == (True, 2, 2)
        assert (rounds["before"], rounds["missing"]) == (cause, [])
        assert browser.why.startswith(why["happened"])
        shown = [(one["kind"], one["reason"]) for one in browser.events]
        assert shown == [(one["kind"], one["reason"]) for one in events]

        numbers = numbers_of(address)
        assert (numbers["ftcoord_run_round"], numbers["ftcoord_run_round_seats"]) == (2, 2)
        assert (numbers["ftcoord_run_nodes"], numbers["ftcoord_run_nodes_missing"]) == (2, 0)
        assert numbers["ftcoord_run_healthy"] == numbers["ftcoord_run_round_ready"] == 1
