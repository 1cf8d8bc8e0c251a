"""torchft's own groups and drop-in ones in a job, with the real Manager: they train and heal from each other."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import warm
from helpers import NEEDS_TORCHFT, eventually

from ftcoord.coordination import Gateway
from ftcoord.embedded.server import EtcdServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_ddp.py"
NATIVE = f"""
import runpy, sys, types
sys.modules["ftcoord.torchft"] = types.ModuleType("ftcoord.torchft")  # the line that would put ftcoord in its place
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
PATIENCE = 240.0
"""Seconds: a busy machine takes long to import torch several times."""

pytestmark = [NEEDS_TORCHFT, pytest.mark.timeout(900)]


class Trainer:
    """One group: a process of examples/torchft_ddp.py, with the drop-in or with torchft as it is."""

    def __init__(self, number: int, name: str, command: list[str], address: str, folder: Path) -> None:
        self._said, self._log = folder / f"{name}.out", folder / f"{name}.log"
        own = {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": address, "STEPS": str(folder / "last_step")}
        with self._said.open("wb") as out, self._log.open("wb") as log:
            self.process = warm.Popen(
                command, env={**os.environ, **own, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=log
            )

    def steps(self) -> list[tuple[int, int]]:
        """The steps that it ended, and with how many replicas."""
        found = re.findall(r"^step=(\d+) .*replicas=(\d+)$", self._said.read_text(), re.MULTILINE)
        return [(int(step), int(replicas)) for step, replicas in found]

    def weights(self) -> str:
        (found,) = re.findall(r"^weights=(\w+)$", self._said.read_text(), re.MULTILINE)
        return str(found)

    def healed(self) -> bool:
        return "fetching checkpoint metadata from" in self._log.read_text()

    def log(self) -> str:
        return self._log.read_text()[-2000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class MixedJob:
    """Groups by their numbers, which are also the order in which they are healed from."""

    def __init__(self, job: str, gateway: Gateway, folder: Path, stack: ExitStack) -> None:
        self._places = {"drop-in": ([sys.executable, str(EXAMPLE)], job)}
        self._places["native"] = ([sys.executable, "-c", NATIVE], gateway.address())
        self._folder, self._stack = folder, stack
        self.groups: dict[int, Trainer] = {}

    def start(self, number: int, kind: str) -> Trainer:
        name = f"{number}-{kind}-{len(list(self._folder.glob('*.out')))}"
        self.groups[number] = Trainer(number, name, *self._places[kind], self._folder)
        self._stack.callback(self.groups[number].end)
        return self.groups[number]

    def kill(self, number: int) -> None:
        """With -9."""
        self.groups.pop(number).end()

    def await_steps(self, replicas: int) -> None:
        """Until all groups have made 8 further steps, the last of them with so many replicas."""
        goal = max((one.steps() or [(0, 0)])[-1][0] for one in self.groups.values()) + 8
        eventually(lambda: self._have_come_to(goal, replicas), self.logs, PATIENCE)

    def finish(self) -> set[str]:
        """All end at one step; their weights."""
        last = max(one.steps()[-1][0] for one in self.groups.values()) + 50
        (self._folder / "last_step.new").write_text(str(last))
        (self._folder / "last_step.new").replace(self._folder / "last_step")
        eventually(lambda: all(one.process.poll() == 0 for one in self.groups.values()), self.logs, PATIENCE)
        return {one.weights() for one in self.groups.values()}

    def logs(self) -> str:
        return "\n".join(f"{number}: {one.steps()[-1:]} {one.log()}" for number, one in self.groups.items())

    def _have_come_to(self, goal: int, replicas: int) -> bool:
        assert all(one.process.poll() is None for one in self.groups.values()), self.logs()
        last = [one.steps()[-1:] for one in self.groups.values()]
        return all(steps and steps[0][0] >= goal and steps[0][1] == replicas for steps in last)


@pytest.fixture
def mixed(fragile: EtcdServer, tmp_path: Path) -> Iterator[MixedJob]:
    job = f"etcd://{fragile.get_endpoint()}/mixed?min_replicas=2&native=1"
    with ExitStack() as stack:
        gateway = stack.enter_context(Gateway(job))
        yield MixedJob(job, gateway, tmp_path, stack)


def test_one_of_each_kind_is_killed_and_heals_from_the_other_kind(mixed: MixedJob) -> None:
    """Whoever is alone behind heals from the group with the lowest number."""
    for number, kind in enumerate(("drop-in", "native", "native")):
        mixed.start(number, kind)
    mixed.await_steps(3)
    mixed.kill(1)
    mixed.await_steps(2)
    native = mixed.start(1, "native")  # heals from group 0, which is a drop-in
    mixed.await_steps(3)
    mixed.kill(0)
    mixed.await_steps(2)
    drop_in = mixed.start(0, "drop-in")  # heals from group 1, which is native
    mixed.await_steps(3)
    assert [native.healed(), drop_in.healed()] == [True, True]
    assert len(mixed.finish()) == 1
