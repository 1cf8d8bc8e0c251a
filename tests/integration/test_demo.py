"""The demo's patience and what it says when it fails. `make demo`, which CI runs too, plays it to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually

from ftcoord.core import rendezvous_records
from ftcoord.core.rendezvous_records import Round, Seat
from ftcoord.demo import run
from ftcoord.demo.run import Agent, Demo, DemoError
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import Compacted
from ftcoord.etcd.api import RangeResult
from ftcoord.etcd.client import EtcdClient
from ftcoord.rendezvous.settings import RendezvousSettings


class Clock:
    """Goes on by `tick` seconds whenever somebody looks at it, and does something each time."""

    def __init__(self, tick: float, then: Callable[[], object] = lambda: None) -> None:
        self.now, self._tick, self._then = 0.0, tick, then

    def __call__(self) -> float:
        self.now += self._tick
        self._then()
        return self.now


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def report(folder: Path) -> None:
    """A step of training, as the demo's script tells of it."""
    progress = folder / "progress.jsonl"
    step = len(progress.read_text().splitlines()) + 1
    with progress.open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step, "world": 3, "agent": "a"}) + "\n")


def test_patience_counts_from_the_last_step(
    etcd: EtcdServer,
    client: EtcdClient,
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A machine on which each step takes half of the patience is slow, not stuck; and it says how far it is."""
    monkeypatch.setattr(run, "PHASE_STEPS", 6)
    (tmp_path / "progress.jsonl").touch()
    clock = Clock(run.STALL_TIMEOUT / 2, lambda: report(tmp_path))
    demo = Demo(tmp_path, etcd, client, stack, clock)
    assert len(demo._await_steps()) >= 6
    assert clock.now > 2 * run.STALL_TIMEOUT
    said = capsys.readouterr().out
    assert re.search(r"\.\.\. waiting for 6 steps of training \([1-5] so far\)", said), said


def test_a_training_that_stands_still_fails(
    etcd: EtcdServer, client: EtcdClient, stack: ExitStack, tmp_path: Path
) -> None:
    (tmp_path / "progress.jsonl").touch()
    demo = Demo(tmp_path, etcd, client, stack, Clock(run.STALL_TIMEOUT / 4))
    with pytest.raises(
        DemoError, match=rf"no progress for 180 s while waiting for {run.PHASE_STEPS} steps of training \(0 so far\)"
    ):
        demo._await_steps()


def test_a_failure_shows_what_the_agent_said(
    etcd: EtcdServer, client: EtcdClient, stack: ExitStack, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('this is why')\n")
    demo = Demo(tmp_path, etcd, client, stack)
    agent = Agent("a", tmp_path, ["--standalone", "--max-restarts=0"], [str(script)])
    stack.callback(agent.stop)
    demo._agents["a"] = agent
    with pytest.raises(DemoError) as caught:
        demo._await_steps()
    message = str(caught.value)
    assert message.startswith("these agents failed: a (exit code 1)\n")
    assert f"the end of {agent.log}:" in message
    assert "RuntimeError: this is why" in message


def test_a_watch_that_ends_ends_the_demo(
    fragile: EtcdServer, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not waited for."""
    client = stack.enter_context(fragile.get_client())
    demo = Demo(tmp_path, fragile, client, stack)
    client.compact(client.put("/key", b"").revision)
    monkeypatch.setattr(client, "get", lambda _: RangeResult((), 0, 0))
    demo._watch_rounds()
    with pytest.raises(Compacted):
        demo._await_round(3)


def test_a_round_is_told_once(
    etcd: EtcdServer, client: EtcdClient, stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record may be written again, with news of it that the demo does not tell."""
    demo = Demo(tmp_path, etcd, client, stack)
    settings = RendezvousSettings.parse(
        backend="etcd-v3", endpoint="", run_id=demo._run, min_nodes=2, max_nodes=3, local_addr=None, conf={}, env={}
    )
    seats = tuple(Seat(f"{number:016x}", f"node {number}", f"host {number}") for number in range(3))
    first = Round(1, seats, "127.0.0.1", 4711)
    recalled = replace(first, recalled="host 3 waits to join")
    second = replace(first, number=2)
    demo._watch_rounds()
    for round_ in (first, replace(first, by="again"), recalled, replace(recalled, waiting=1), second):
        client.put(f"{settings.prefix}/decided", rendezvous_records.encode(round_))
    assert demo._await_round(3).number == 1
    assert demo._await_round(3).number == 2
    said = [line.split(maxsplit=2)[2] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(":")[0] for line in said] == ["round 1", "round 1 is recalled", "round 2"]
    eventually(demo._rounds.empty, "all records are told", DEADLINE)
