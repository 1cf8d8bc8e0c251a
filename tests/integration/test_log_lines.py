"""What the logs say of a job: nothing alarming of a healthy one, and the whole story of one that lost nodes."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import DEADLINE, eventually
from jobs import Agent, Job
from rdzv_nodes import spawn
from victims import sentinels_of

from ftcoord.coordination import ManagerClient, ManagerServer
from ftcoord.embedded.server import EtcdServer

LONG = timedelta(seconds=DEADLINE)
ALARMING = {"WARNING", "ERROR", "CRITICAL"}
JSON = {"FTCOORD_LOG_FORMAT": "json"}
ROUND_LINE = re.compile(
    r"run '.*', round (?P<round>\d+): this node is rank (?P<rank>\d+) of \d+, on (?P<hosts>.*), decided by"
    r" (?P<decider>.*?)(?:; the round before ended: (?P<before>.*))? \[member \w+, revision \d+\]"
)


def lines_of(agent: Agent) -> Iterator[dict[str, Any]]:
    """ftcoord's own, among what torch and the workers print."""
    for line in agent.terminal().splitlines():
        if line.startswith('{"time"'):
            yield json.loads(line)


def alarms(job: Job) -> list[str]:
    return [one["message"] for agent in job.agents.values() for one in lines_of(agent) if one["level"] in ALARMING]


def test_nothing_alarms_whoever_reads_of_a_healthy_job(etcd: EtcdServer, tmp_path: Path) -> None:
    """It begins, grows, and ends, with a spare that is not needed."""
    with Job(tmp_path, etcd.get_endpoint(), "1:2", "idle.py", env=JSON, conf={"lease_ttl": 60}) as job:
        job.start("a")
        job.round_of("a", kind="started")
        job.start("b")
        job.round_of("ab", kind="started")
        job.start("c")
        await_line(job, "c", "round 2 runs on 2 of at most 2 nodes; this node is a spare")
        job.finish("abc")
        assert alarms(job) == []
        assert [one["reason"] for one in lines_of(job.agents["a"]) if "are stopped" in one["message"]] == [
            f"{one_host(job, 'b')} waits to join"
        ]
        assert all(one["run"] == job.run_id for name in "abc" for one in lines_of(job.agents[name]))


def await_line(job: Job, name: str, text: str) -> None:
    eventually(lambda: any(text in one["message"] for one in lines_of(job.agents[name])), job.story)


def one_host(job: Job, name: str) -> str:
    """How the lines name the node of an agent."""
    return f"{socket.gethostname()} (pid {job.agents[name].pid})"


def test_nothing_alarms_whoever_reads_of_healthy_replicas(
    etcd: EtcdServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each quorum with other members, and none for a step."""
    caplog.set_level(logging.INFO, "ftcoord")
    job = f"etcd://{etcd.get_endpoint()}/{prefix.strip('/')}?min_replicas=1"

    def step(*ranks: ManagerClient) -> None:
        for asked in [spawn(lambda one=one: one._quorum(0, 0, "", False, True, 0, LONG)) for one in ranks]:  # type: ignore[misc]
            asked.result(DEADLINE)

    with ExitStack() as stack:
        first, second = (rank_of(stack, job, name) for name in ("r0", "r1"))
        for _ in range(3):
            step(first, second)
    assert [one.getMessage() for one in caplog.records if one.levelname in ALARMING] == []
    quorums = [vars(one) for one in caplog.records if "quorum" in vars(one)]
    assert all(one["run"] == prefix.strip("/") and one["member"] and one["revision"] for one in quorums)
    assert [one["replica"] for one in quorums].count("r0") <= 2  # alone at first, perhaps
    assert {(one["replica"], one["rank"]) for one in quorums} >= {("r1", 1)}


def rank_of(stack: ExitStack, job: str, replica: str) -> ManagerClient:
    server = ManagerServer(replica, job, "127.0.0.1", "127.0.0.1:0", "s:1", 1, timedelta(seconds=1), LONG, 0)
    stack.callback(server.shutdown)
    return ManagerClient(server.address(), LONG)


def kill_agent(job: Job, name: str) -> None:
    """Alone, as a kernel without memory does it, and not before a sentinel stands beside it to say so. It is left for
    that to read how it ended: before Linux 6.15 nothing tells once it was waited for."""
    eventually(lambda: sentinels_of(job.agents[name].pid), job.story)
    job.agents[name].signal(signal.SIGKILL)


class Chapter(NamedTuple):
    """What the lines say of a round: who decided it, who was in it by rank, and of what it ended."""

    decider: str
    seats: tuple[str, ...]
    end: str


def story(job: Job) -> dict[int, Chapter]:
    """Told from the lines alone, and only if all who tell of a round agree."""
    found: dict[int, set[tuple[str, str]]] = {}
    ends: dict[int, set[str]] = {}
    for agent in job.agents.values():
        for line in lines_of(agent):
            if told := ROUND_LINE.fullmatch(line["message"]):
                assert line["round"] == int(told["round"])
                found.setdefault(line["round"], set()).add((told["decider"], told["hosts"]))
                if told["before"]:
                    ends.setdefault(line["round"] - 1, set()).add(told["before"])
            elif "are stopped" in line["message"]:
                ends.setdefault(line["round"], set()).add(line["reason"])
    chapters = {}
    for number, tellers in found.items():
        ((decider, hosts),) = tellers
        (end,) = ends.get(number, {""})
        chapters[number] = Chapter(decider, tuple(hosts.split(", ")), end)
    return chapters


def test_the_lines_of_a_job_that_lost_two_nodes_tell_the_whole_story(etcd: EtcdServer, tmp_path: Path) -> None:
    """Who died, of what, who decided which round, and who sat there. No lease ends by time."""
    conf = {"last_call_timeout": 30, "lease_ttl": 600}
    with Job(tmp_path, etcd.get_endpoint(), "1:3", "idle.py", env=JSON, conf=conf) as job:
        job.start("abc")
        before = [job.round_of("abc", kind="started")]
        hosts = {name: one_host(job, name) for name in "abc"}
        kill_agent(job, "b")
        before.append(job.round_of("ac", kind="started", after=before))
        kill_agent(job, "c")
        job.round_of("a", kind="started", after=before)
        job.finish("a")
        told = story(job)
        assert told.keys() == {1, 2, 3}, job.story()
        assert [set(told[number].seats) for number in (1, 2, 3)] == [
            set(hosts.values()),
            {hosts["a"], hosts["c"]},
            {hosts["a"]},
        ]
        assert all(chapter.decider in chapter.seats for chapter in told.values())
        assert told[1].end == f"{hosts['b']} was killed by signal 9 (SIGKILL)"
        assert told[2].end == f"{hosts['c']} was killed by signal 9 (SIGKILL)"
        (last,) = [one for one in lines_of(job.agents["a"]) if "this node leaves" in one["message"]]
        assert (last["round"], last["reason"]) == (3, "finished")
