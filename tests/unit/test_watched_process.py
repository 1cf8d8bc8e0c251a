"""What Linux tells of a process, where its number was given again, and where it ends slowly."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from virtual import Scheduler

from ftcoord import concurrency, proc as reader
from ftcoord.primitives.sentinel_main import WatchedProcess
from ftcoord.proc import RECENT

STATE, FLAGS, STARTED, ENVIRONMENT, EXIT_STATUS = 0, 6, 19, 47, 49
PF_EXITING = 4


def stat(state: str = "S", flags: int = 0, started: int = 0, environment: int = 0, exit_status: int = 0) -> list[str]:
    """What /proc/PID/stat says behind the name."""
    fields = ["0"] * 50
    fields[STATE] = state
    told = {FLAGS: flags, STARTED: started, ENVIRONMENT: environment, EXIT_STATUS: exit_status}
    for place, number in told.items():
        fields[place] = str(number)
    return fields


class Proc:
    """Stands in for /proc."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def tell(self, pid: int, fields: Sequence[str] | None, **status: str) -> None:
        """What it says of a process with one thread; nothing without `fields`."""
        if fields is not None:
            self._tell(self._directory / str(pid), fields, status)
            self.tell_of_thread(pid, pid, fields, **status)

    def tell_of_thread(self, pid: int, thread: int, fields: Sequence[str], **status: str) -> None:
        self._tell(self._directory / str(pid) / "task" / str(thread), fields, status)

    def _tell(self, directory: Path, fields: Sequence[str], status: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stat").write_text(f"1 (a) program)) {' '.join(fields)}\n")
        told = {"SigPnd": "0" * 16, "ShdPnd": "0" * 16, **status}
        (directory / "status").write_text("".join(f"{name}:\t{text}\n" for name, text in told.items()))


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Proc:
    monkeypatch.setattr(reader, "PROC", str(tmp_path))
    return Proc(tmp_path)


def watched(proc: Proc, fields: Sequence[str] | None, born: int = 100, **status: str) -> WatchedProcess:
    """This process's parent, of which /proc says that."""
    proc.tell(os.getpid(), stat(started=born))
    proc.tell(os.getppid(), fields, **status)
    return WatchedProcess(os.getppid(), None)


@pytest.mark.parametrize("state", "RSD")
def test_one_that_runs(proc: Proc, state: str) -> None:
    process = watched(proc, stat(state))
    assert process.runs()
    assert not process.is_ending()
    assert process.status() is None


@pytest.mark.parametrize("state", "Tt")
def test_one_that_is_stopped_or_traced_does_not_run_but_lives(proc: Proc, state: str) -> None:
    process = watched(proc, stat(state, exit_status=19))
    assert not process.runs()
    assert not process.is_ending()
    assert not process.has_ended()
    assert process.status() is None


def test_a_zombie_tells_its_status(proc: Proc) -> None:
    assert watched(proc, stat("Z", exit_status=9)).status() == 9


def test_one_that_a_driver_does_not_let_go_of_is_ending(proc: Proc) -> None:
    """It has no program and no open files any longer, but its pidfd says nothing yet."""
    process = watched(proc, stat("D", PF_EXITING | 0x400000, exit_status=9))
    assert process.is_ending()
    assert process.status() == 9


KILLED = f"{1 << signal.SIGKILL - 1:016x}"


@pytest.mark.parametrize(
    ("fields", "status", "wait_status"),
    [
        (stat("D", exit_status=11), {"CoreDumping": "1"}, 11),
        (stat("S"), {"CoreDumping": "1"}, None),  # an older kernel, and a program that reads the dump
        (stat("D"), {"SigPnd": KILLED, "ShdPnd": KILLED}, 9),
        (stat("D", exit_status=256), {"SigPnd": KILLED}, 256),  # another thread has ended the process
    ],
)
def test_one_that_the_kernel_holds_though_it_is_dead_is_ending(
    proc: Proc, fields: Sequence[str], status: dict[str, str], wait_status: int | None
) -> None:
    """It dumps core, or hangs in a driver: its files are open, and its pidfd says nothing, for minutes."""
    process = watched(proc, fields, **status)
    assert process.is_ending()
    assert process.status() == wait_status
    assert not process.has_ended()


def test_one_whose_first_thread_has_ended_lives(proc: Proc) -> None:
    process = watched(proc, stat("Z", PF_EXITING))
    proc.tell_of_thread(os.getppid(), 1, stat("S"))
    assert not process.is_ending()


def test_one_that_was_sent_another_signal_lives(proc: Proc) -> None:
    blocked = f"{1 << signal.SIGTERM - 1:016x}"
    assert not watched(proc, stat("S"), SigPnd=blocked, ShdPnd=blocked, CoreDumping="0").is_ending()


def test_of_a_younger_process_with_its_number_nothing_is_believed(proc: Proc) -> None:
    """A parent is never younger than its child."""
    process = watched(proc, stat("Z", started=101, exit_status=9))
    assert process.status() is None
    assert not process.is_ending()
    same_tick = watched(proc, stat("Z", started=100, exit_status=9))
    assert same_tick.status() == 9


class Group:
    """A control group whose processes the kernel kills, as its file tells it."""

    def __init__(self, events: Path) -> None:
        self._events, self._count = events, 3
        self.kill(0)

    def kill(self, number: int = 1) -> None:
        self._count += number
        self._events.write_text(f"low 0\noom 9\noom_kill {self._count}\n")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Group:
    """That of every process."""
    made = Group(tmp_path / "memory.events")
    monkeypatch.setattr(reader, "_groups", lambda _pid: [tmp_path / "nowhere", tmp_path / "memory.events"])
    return made


def told_for(process: WatchedProcess, seconds: float) -> None:
    for _ in range(round(seconds)):
        concurrency.sleep(1)
        process.told()


def test_memory_that_ran_out_long_before_has_not_killed_it(group: Group) -> None:
    """But another process of its group, such as a worker that has been replaced."""

    def play() -> None:
        process = WatchedProcess(os.getppid(), None)
        group.kill()
        assert process.was_oom()
        told_for(process, RECENT)
        assert process.was_oom(), "what it said last may have been said before"
        told_for(process, RECENT)
        assert not process.was_oom()
        group.kill()
        assert process.was_oom()

    Scheduler(0).run(play)


def test_what_was_said_just_before_memory_ran_out_may_be_read_after_that(group: Group) -> None:
    def play() -> None:
        process = WatchedProcess(os.getppid(), None)
        told_for(process, 20)
        concurrency.sleep(RECENT)
        group.kill()
        for _ in range(100):  # one for each of its leases
            process.told()
        assert process.was_oom()

    Scheduler(0).run(play)


def test_where_nobody_counts_it_memory_has_not_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_groups", lambda _pid: [])
    process = WatchedProcess(os.getppid(), None)
    process.told()
    assert not process.was_oom()


def test_where_there_is_no_proc_it_is_only_known_whether_it_exists(proc: Proc) -> None:
    process = WatchedProcess(os.getppid(), None)
    assert process.runs()
    assert not process.has_ended(0.05)
    assert not process.is_ending()
    assert process.status() is None
    assert process.cause().endswith("ended, and nobody could tell how")


@pytest.mark.parametrize(
    ("line", "file"), [("4:memory:/docker/1", "memory/memory.oom_control"), ("0::/docker/1", "memory.events")]
)
def test_a_container_that_sees_its_own_group_alone_counts_its_kills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proc: Proc, line: str, file: str
) -> None:
    """The group's path is the host's, and leads nowhere."""
    proc.tell(4711, stat())
    (tmp_path / "4711" / "cgroup").write_text(f"{line}\n")
    monkeypatch.setattr(reader, "_GROUPS", str(tmp_path / "groups"))
    events = tmp_path / "groups" / file
    events.parent.mkdir(parents=True)
    events.write_text("oom_kill 3\n")
    found = reader.oom_kills(4711)
    assert found is not None
    events.write_text("oom_kill 4\n")
    assert found.grew()
