"""ftcoord.elastic with real processes: whatever is lost or joins, the others are not stopped, and train as if nothing
had happened. With the torch that is installed: 2.14 and newer reconfigure their groups, older ones make them anew."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from etcd_cluster import FragileEtcd
from helpers import eventually, freeze

from ftcoord.embedded.server import EtcdServer

SCRIPT = Path(__file__).parent / "scripts" / "elastic_worker.py"
_spec = importlib.util.spec_from_file_location("elastic_worker", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

STEPS_AN_EPOCH = -(-worker.SAMPLES // worker.BATCH)


class Member:
    """A process of scripts/elastic_worker.py, and what it has said."""

    def __init__(self, etcd: EtcdServer, log: Path, *arguments: object) -> None:
        self._log = log
        with log.open("wb") as errors:
            self.process = warm.Popen(
                [sys.executable, str(SCRIPT), *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                whole=True,
                env={**os.environ, "FTCOORD_ENDPOINTS": etcd.get_endpoint()},
            )
        self._said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(json.loads(line))

    def said(self, key: str, **what: Any) -> list[dict[str, Any]]:
        """What has this key, and matches, in order."""
        return [one for one in self._said.copy() if key in one and what.items() <= one.items()]

    def last(self, key: str) -> Any:
        """The last value of this key; None if there is none."""
        said = self.said(key)
        return said[-1][key] if said else None

    @property
    def silent_for(self) -> float:
        """Seconds since its last step."""
        return time.monotonic() - self.said("committed")[-1]["at"]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def expect_exit(self, code: int) -> None:
        eventually(lambda: not self.is_alive, lambda: f"it ends: {self._said[-3:]}\n{self.log}")
        assert self.process.wait() == code, self.log
        self._reader.join()


class Job:
    """The members of one run."""

    def __init__(self, etcd: EtcdServer, folder: Path, min_size: int, epochs: int = 10**6, **options: float) -> None:
        self._etcd, self._folder = etcd, folder
        self._arguments = [folder.name, min_size, epochs]
        self._options = options
        self.all: list[Member] = []

    def start(self, count: int = 1, **options: float) -> list[Member]:
        """More members. Those that come later have other weights, until they get those of the others."""
        for _ in range(count):
            given = {"pause": 0.01, **self._options, **options}
            words = [f"{name}={value}" for name, value in given.items()]
            log = self._folder / f"{len(self.all)}.log"
            self.all.append(Member(self._etcd, log, *self._arguments, *words))
        return self.all[-count:]

    @property
    def live(self) -> list[Member]:
        return [one for one in self.all if one.is_alive]

    def at(self, rank: int) -> Member:
        """The live member that committed last at this rank."""
        (found,) = (one for one in self.live if one.last("rank") == rank)
        return found

    def await_steps(self, count: int = 3) -> None:
        """Wait until all that live have committed so many steps as one group from now on."""
        live = self.live
        step = max(one.last("committed") or 0 for one in live) + count

        def done() -> bool:
            said = [one.said("committed")[-1:] for one in live]
            return all(one and one[0]["committed"] >= step and one[0]["world"] == len(live) for one in said)

        eventually(done, lambda: f"{len(live)} train\n" + "\n".join(f"{one._said[-2:]}\n{one.log}" for one in live))


@contextlib.contextmanager
def job(etcd: EtcdServer, folder: Path, *arguments: Any, **options: float) -> Iterator[Job]:
    made = Job(etcd, folder, *arguments, **options)
    try:
        yield made
    finally:
        for one in made.all:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(signal.SIGCONT)
            one.kill()


def undisturbed(epochs: int) -> tuple[list[float], list[Any]]:
    """The losses and the last weights of one process that does all of it."""
    parts, losses = worker.parts(0), []
    inputs, wanted = worker.data()
    while parts["sampler"].epoch < epochs:
        for indices in parts["sampler"].batches():
            loss = torch.nn.functional.mse_loss(parts["model"](inputs[indices]), wanted[indices])
            loss.backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            parts["scheduler"].step()
            parts["sampler"].advance()
            losses.append(loss.item())
    return losses, [value.tolist() for value in parts["model"].state_dict().values()]


def test_losses_and_joins_change_nothing_but_who_trains(etcd: EtcdServer, tmp_path: Path) -> None:
    epochs = 60
    with job(etcd, tmp_path, 2, epochs) as run:
        first = run.start(4)
        run.await_steps()
        run.at(0).kill()
        run.await_steps()
        run.start(seed=1)
        run.await_steps()
        run.at(1).kill()
        run.at(2).kill()
        run.await_steps()
        run.start(2, seed=2)
        run.await_steps()
        survivors = run.live
        assert len(survivors) == 4
        assert len({*first} & {*survivors}) >= 1
        for one in survivors:
            one.expect_exit(0)
        losses, weights = undisturbed(epochs)
        for one in run.all:
            assert len(one.said("starts")) == 1, "it was started once"
            steps = one.said("committed")
            numbers = [step["committed"] for step in steps]
            assert numbers == sorted({*numbers}), "no step is committed twice"
            for step in steps:
                assert step["loss"] == pytest.approx(losses[step["committed"] - 1], rel=1e-9)
                assert step["used"] == part_of(step)
        for one in survivors:
            (end,) = one.said("ends")
            assert (end["ends"], end["total"], end["epoch"]) == (len(losses), len(losses), epochs)
            for found, wanted in zip(end["weights"], weights, strict=True):
                torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-8, atol=1e-10)


def part_of(step: dict[str, Any]) -> list[int]:
    """The samples of a step of this rank, by the sampler of another process."""
    sampler = worker.parts(0)["sampler"]
    sampler.epoch, number = divmod(step["committed"] - 1, STEPS_AN_EPOCH)
    sampler.position = number * worker.BATCH
    sampler.rank, sampler.world = step["rank"], step["world"]
    indices: list[int] = next(sampler.batches())
    return indices if sampler.weight else []


def test_members_that_wait_in_a_collective_of_their_own_are_freed(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2, blocks_at=0) as run:
        run.start(4)
        run.await_steps()
        run.at(2).kill()
        run.await_steps()


def test_a_stopped_member_is_left_out_and_comes_back(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2) as run:
        run.start(3)
        run.await_steps()
        stopped = run.at(0)
        freeze(stopped.process.pid)
        others = [one for one in run.live if one is not stopped]
        eventually(lambda: all(one.last("world") == 2 for one in others), "the others go on")
        stopped.process.send_signal(signal.SIGCONT)
        run.await_steps()
        assert len(stopped.said("starts")) == 1


@pytest.mark.skipif(hasattr(torch.distributed, "_reconfigure"), reason="with torch 2.14 gloo waits inside C++")
def test_a_member_that_dies_while_the_others_connect_is_not_waited_for(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2, forming=60) as run:  # gloo would wait for five times that
        run.start(3)
        run.await_steps()
        (dies,) = run.start(dies_connecting=1)
        dies.expect_exit(-signal.SIGKILL)
        run.await_steps()


def test_below_min_size_they_wait_and_keep_their_state(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2) as run:
        run.start(2)
        run.await_steps()
        run.at(1).kill()
        (left,) = run.live
        step = left.last("committed")
        eventually(lambda: "waits for a quorum" in left.log, "it says for what it waits")
        assert left.last("committed") in (step, step + 1)
        run.start(seed=1)
        run.await_steps()


def test_who_waits_too_long_ends_with_the_names_of_those_that_are_missing(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2, join_timeout=15) as run:
        run.start(2)
        run.await_steps(100)  # it has its sentinel by then
        run.at(1).kill()
        (left,) = run.live
        left.expect_exit(1)
        (error,) = left.said("error")
        assert error["error"].startswith("TooFewMembers: ")
        assert "1 of at least 2 members live; missing: " in error["error"]
        assert "was killed by signal 9 (SIGKILL)" in error["error"]


def test_a_member_that_raises_leaves_and_the_others_go_on(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2) as run:
        run.start(2)
        run.await_steps()
        (odd,) = run.start(fails_at=run.all[0].last("committed") + 300)
        run.await_steps()
        odd.expect_exit(1)
        assert "as it was told to" in odd.last("error")
        run.await_steps()
        assert "raised ValueError: as it was told to" in run.live[0].log


def test_who_fails_again_and_again_leaves(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2) as run:
        run.start(2)
        (broken,) = run.start(breaks=1)
        broken.expect_exit(1)
        assert "Invalid scalar type" in broken.last("error")
        assert len(broken.said("begins")) > 3
        run.await_steps()


def test_who_comes_after_the_end_ends_too(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 1, 1) as run:
        for one in run.start(2):
            one.expect_exit(0)
        (late,) = run.start()
        late.expect_exit(0)
        assert not late.said("begins")
        assert "is over: this process came too late" in late.log


def expect_one_stop(members: list[Member], reason: str) -> None:
    """All members end in order, and have stopped at one step."""
    for one in members:
        one.expect_exit(0)
    assert len({one.last("stopped") for one in members} | {one.last("ends") for one in members}) == 1
    assert all(reason in one.last("reason") for one in members)


def ftcoord(etcd: EtcdServer, *arguments: str) -> str:
    command = [sys.executable, "-m", "ftcoord", *arguments, "--endpoints", etcd.get_endpoint()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_an_operator_stops_all_at_one_step_and_the_run_goes_on_later(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2, stops=1) as run:
        first = run.start(3)
        run.await_steps()
        out = ftcoord(etcd, "stop", tmp_path.name, "--yes", "--reason", "maintenance")
        assert "to stop at one agreed step" in out
        expect_one_stop(first, "maintenance")
        last = first[0].last("stopped")
        assert {one.last("committed") for one in first} == {last}
        assert f"stopped: all ranks at step {last}: stop asked by" in ftcoord(etcd, "history", tmp_path.name)
        run.start(2)
        run.await_steps()


def test_a_member_that_is_lost_before_it_promises_delays_a_stop(etcd: EtcdServer, tmp_path: Path) -> None:
    """The group is over, and the next one stops at its first step. So does a newcomer."""
    with job(etcd, tmp_path, 2, stops=1) as run:
        run.start(3)
        run.await_steps()
        lost, asked = run.at(1), run.at(0)
        freeze(lost.process.pid)
        asked.process.send_signal(signal.SIGTERM)
        (newcomer,) = run.start()
        lost.kill()
        others = [one for one in run.all if one is not lost]
        expect_one_stop(
            others if newcomer.said("begins") else [one for one in others if one is not newcomer], "SIGTERM"
        )
        newcomer.expect_exit(0)


def test_who_comes_during_a_stop_waits_and_ends_with_the_others(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 1, stops=1, saves=1) as run:
        members = run.start(2)
        run.await_steps()
        ftcoord(etcd, "stop", tmp_path.name, "--yes")
        eventually(lambda: all(one.said("stopped") for one in members), "they save")
        (newcomer,) = run.start()
        seen = lambda: json.loads(ftcoord(etcd, "ls", "-o", "json"))["jobs"]  # noqa: E731
        eventually(lambda: [one["members"] for one in seen() if one["job"] == tmp_path.name] == [3], "it waits")
        for one in members:
            one.process.send_signal(signal.SIGUSR1)
        expect_one_stop(members, "stop asked by")
        newcomer.expect_exit(0)
        assert not newcomer.said("begins")


def test_further_groups_are_made_by_their_owner(etcd: EtcdServer, tmp_path: Path) -> None:
    with job(etcd, tmp_path, 2, subgroup=1) as run:
        run.start(3)
        run.await_steps()
        run.at(0).kill()
        run.await_steps()


def test_without_etcd_they_train_on_and_a_loss_meanwhile_is_made_up_for(fragile: FragileEtcd, tmp_path: Path) -> None:
    with job(fragile, tmp_path, 2) as run:
        run.start(3)
        run.await_steps(100)
        fragile.pause()
        run.await_steps()
        run.at(0).kill()
        eventually(lambda: all(one.silent_for > 2 for one in run.live), "they wait for etcd")
        fragile.resume()
        run.await_steps()
        assert all(len(one.said("starts")) == 1 for one in run.live)
