"""Workers that end are seen by what the kernel says of them, before their agent says anything."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import DEADLINE, eventually, open_files
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ftcoord import concurrency, proc
from ftcoord.core.event_records import WorkerFailure
from ftcoord.primitives.orphans import MARK, MarkedChildren
from ftcoord.proc import own_thread
from ftcoord.rendezvous.handler import HandlerResources
from ftcoord.rendezvous.workers import WorkerWatch, _workers, failure_in

UNTIL_TOLD = "import sys; sys.stdin.read(1); sys.exit(3)"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[MarkedChildren]:
    """With a mark of their own: this process's may be on its etcd, if a handler lived when that was started."""
    with monkeypatch.context() as patch:
        patch.setattr(concurrency, "of_process", lambda make: make())
        marked = MarkedChildren()
    yield marked
    marked.close()
    for pidfd, one in _workers(
        marked.mark, own_thread()
    ):  # of a test that failed: they would be workers of the next one
        os.close(pidfd)
        os.kill(one.pid, signal.SIGKILL)


@pytest.fixture
def failed() -> queue.Queue[WorkerFailure]:
    return queue.Queue()


def worker(**options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", UNTIL_TOLD], stdin=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


def unbroken(error: BaseException) -> None:
    raise AssertionError("a watch is broken") from error


def as_from_a_terminal() -> None:
    """Signals end it, also where the tests were started with nohup; and it dumps no core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_the_first_worker_that_fails_is_told_of(children: MarkedChildren, failed: queue.Queue[WorkerFailure]) -> None:
    first, second = worker(), worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    second.kill()
    assert failed.get(timeout=DEADLINE).line == f"worker {second.pid} was killed by signal 9 (SIGKILL)"
    assert second.wait(DEADLINE) == -signal.SIGKILL, "it was left for its parent to be waited for"
    first.communicate(b".", timeout=DEADLINE)
    watch.end()
    assert failed.empty(), "one is enough"


def test_workers_that_are_done_or_stopped_by_their_agent_have_not_failed(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure]
) -> None:
    stopped, fails = worker(), worker()
    done = subprocess.Popen([sys.executable, "-c", ""])
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    done.wait(DEADLINE)
    stopped.terminate()
    stopped.communicate(timeout=DEADLINE)
    fails.kill()
    assert failed.get(timeout=DEADLINE).line.startswith(f"worker {fails.pid} ")
    fails.communicate(timeout=DEADLINE)
    watch.end()


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_workers_that_get_the_signal_that_ends_their_agent_have_not_failed(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As with Ctrl-C: torch's agent sends its workers the signal that it got."""
    if name == "SIGUSR1":
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM, SIGUSR1")
    stopped = [subprocess.Popen(["sleep", "600"], preexec_fn=as_from_a_terminal) for _ in range(2)]
    fails = worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    for process in stopped:
        process.send_signal(signal.Signals[name])
        assert process.wait(DEADLINE) == -signal.Signals[name]
    fails.kill()
    assert failed.get(timeout=DEADLINE).line.startswith(f"worker {fails.pid} ")
    fails.communicate(timeout=DEADLINE)
    watch.end()


def test_a_child_without_the_mark_is_no_worker(children: MarkedChildren, failed: queue.Queue[WorkerFailure]) -> None:
    other = worker(env={name: value for name, value in os.environ.items() if name != MARK})
    ours = worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    end(other)
    ours.kill()
    assert failed.get(timeout=DEADLINE).line.startswith(f"worker {ours.pid} ")
    end(ours)
    watch.end()


def test_a_worker_that_was_started_just_now_is_seen(children: MarkedChildren) -> None:
    """Its parent goes on before the kernel has laid out its environment."""
    for _ in range(100):
        process = worker()
        found = list(_workers(children.mark, own_thread()))
        end(process)
        assert [one.pid for _, one in found] == [process.pid]
        os.close(found[0][0])


def test_nobody_is_told_after_the_end(children: MarkedChildren, failed: queue.Queue[WorkerFailure]) -> None:
    before = open_files()
    process = worker()
    with_its_pipe = open_files()
    WorkerWatch(children.mark, failed.put, unbroken).end()
    assert not open_files() - with_its_pipe, "it leaves no file open"
    end(process)
    assert failed.empty()
    assert not open_files() - before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_said_to_whom_it_belongs(
    children: MarkedChildren, caplog: pytest.LogCaptureFixture
) -> None:
    """By an error that nobody foresaw. It would else seem to watch."""

    def fail(_round: object, _failure: object) -> None:
        raise MemoryError("in what it tells")

    resources = HandlerResources(SimpleNamespace(worker_failed=fail, workers_ended=lambda failure: None), ExitStack())  # type: ignore[arg-type]
    process = worker()
    resources.watch_workers(None, children)  # type: ignore[arg-type]
    end(process)
    eventually(lambda: "are not watched any longer" in caplog.text, "it is said")
    resources.end_round()


def test_its_end_may_come_from_who_is_told(children: MarkedChildren) -> None:
    told: queue.Queue[WorkerFailure] = queue.Queue()

    def end_it(fate: WorkerFailure) -> None:
        watch.end()
        told.put(fate)

    process = worker()
    watch = WorkerWatch(children.mark, end_it, unbroken)
    end(process)
    assert told.get(timeout=DEADLINE)


def test_workers_that_end_one_after_the_other(children: MarkedChildren, failed: queue.Queue[WorkerFailure]) -> None:
    workers = [worker() for _ in range(3)]
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    for process in workers:
        process.terminate()
        process.communicate(timeout=DEADLINE)
    watch._thread._thread.join(DEADLINE)
    assert not watch._thread._thread.is_alive(), "nobody is left"
    watch.end()
    assert failed.empty()


# -- what became of them -----------------------------------------------------------------------------------------

RAISES = {
    "message": {
        "message": "ValueError: no such\nsample",
        "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"},
    }
}


def ranked(rank: int, error_file: Path) -> dict[str, str]:
    """What torch's agent gives a worker."""
    given = {"RANK": str(8 + rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    return {**os.environ, **given}


def test_a_failure_has_the_ranks_and_what_torchs_error_file_says(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure], tmp_path: Path
) -> None:
    error_file = tmp_path / "error.json"
    process = worker(env=ranked(1, error_file))
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    error_file.write_text(json.dumps(RAISES))
    process.communicate(b".", timeout=DEADLINE)
    found = failed.get(timeout=DEADLINE)
    assert found == watch.failure()
    assert found == WorkerFailure(
        process.pid, 9, 1, 3, 0, "exited with code 3", "ValueError: no such sample", "Traceback ..."
    )
    watch.end()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', '{"message": {"message": null}}', "x" * (1 << 21)])
def test_an_error_file_that_is_none_says_nothing(
    text: str, children: MarkedChildren, failed: queue.Queue[WorkerFailure], tmp_path: Path
) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text(text)
    process = worker(env=ranked(1, error_file))
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    process.communicate(b".", timeout=DEADLINE)
    assert failed.get(timeout=DEADLINE).line == f"worker {process.pid} (rank 9, local rank 1) exited with code 3"
    watch.end()


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_an_error_file_that_is_no_file_holds_nobody_up(
    kind: str, children: MarkedChildren, failed: queue.Queue[WorkerFailure], tmp_path: Path
) -> None:
    """A hostile worker has put it there. A device would never end."""
    error_file, real = tmp_path / "error.json", tmp_path / "real.json"
    real.write_text(json.dumps(RAISES))
    if kind == "pipe":
        os.mkfifo(error_file)
    else:
        error_file.symlink_to("/dev/zero" if kind == "device" else real)
    process = worker(env=ranked(1, error_file))
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    process.communicate(b".", timeout=DEADLINE)
    assert failed.get(timeout=DEADLINE).line == f"worker {process.pid} (rank 9, local rank 1) exited with code 3"
    watch.end()


def test_one_that_raised_something_is_told_though_its_peer_ended_first(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("0.json", "1.json")]
    slow, peer = (worker(env=ranked(rank, file)) for rank, file in enumerate(files))
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    files[1].write_text(json.dumps({"message": {"message": "RuntimeError: Connection reset by peer"}}))
    peer.communicate(b".", timeout=DEADLINE)
    assert failed.get(timeout=DEADLINE).pid == peer.pid, "nothing else is known yet"
    files[0].write_text(json.dumps(RAISES))
    told = watch.failure()
    assert told is not None
    assert (told.pid, told.exception) == (slow.pid, "ValueError: no such sample")
    watch.end()
    end(slow)


def test_what_a_worker_raises_while_it_is_stopped_is_no_failure(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure], tmp_path: Path
) -> None:
    """But what it raised before that is one, though it has not ended yet."""
    error_file = tmp_path / "error.json"
    process = worker(env=ranked(1, error_file))
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    assert watch.failure(stopped_at=2e9) is None
    error_file.write_text(json.dumps(RAISES))
    os.utime(error_file, (1e9, 1e9))
    assert watch.failure() is None
    assert watch.failure(stopped_at=1e9 - 1) is None
    told = watch.failure(stopped_at=1e9 + 1)
    assert told is not None
    assert told.exception == "ValueError: no such sample"
    watch.end()
    end(process)
    assert failed.empty()


def test_a_worker_that_is_killed_since_it_does_not_heed_its_agent_has_not_failed(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure]
) -> None:
    """torch's agent does so 30 s after it was told to stop its workers."""
    process = worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    stopped_at = time.time()
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert failed.get(timeout=DEADLINE).pid == process.pid, "it cannot tell by itself"
    assert watch.failure(stopped_at) is None
    told = watch.failure(stopped_at + 2 * DEADLINE)
    assert told is not None
    assert told.pid == process.pid, "it ended before its agent was told"
    watch.end()


def test_a_worker_is_told_of_though_its_agent_sees_its_end_first(children: MarkedChildren) -> None:
    """Of two threads that the kernel wakes, either may go on first."""
    process = worker()
    held = threading.Event()
    watch = WorkerWatch(children.mark, lambda failure: held.set(), unbroken)
    watch._thread.close()  # as one that has not gone on yet
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    told = watch.failure()
    assert told is not None
    assert (told.pid, told.signal) == (process.pid, signal.SIGKILL)
    assert not held.is_set()
    process.communicate(timeout=DEADLINE)
    watch.end()


def test_of_two_that_failed_by_themselves_the_first_counts(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure], tmp_path: Path
) -> None:
    """The other one may raise something since it is stopped."""
    files = [tmp_path / name for name in ("0.json", "1.json")]
    first, stopped = (worker(env=ranked(rank, file)) for rank, file in enumerate(files))
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    first.communicate(b".", timeout=DEADLINE)
    assert failed.get(timeout=DEADLINE).pid == first.pid
    files[1].write_text(json.dumps(RAISES))
    told = watch.failure(stopped_at=2e9)
    assert told is not None
    assert told.pid == first.pid
    watch.end()
    end(stopped)


def test_a_worker_that_heeds_its_agents_sigterm_has_not_failed(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure]
) -> None:
    heeds = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
    stopped = subprocess.Popen(
        [sys.executable, "-c", f"{heeds}; print(flush=True); signal.pause()"], stdout=subprocess.PIPE
    )
    fails = worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    assert stopped.stdout is not None
    stopped.stdout.readline()
    stopped.terminate()
    stopped.communicate(timeout=DEADLINE)
    assert stopped.returncode == 143
    fails.kill()
    assert failed.get(timeout=DEADLINE).pid == fails.pid
    end(fails)
    watch.end()
    assert failed.empty()


def test_a_worker_that_is_killed_for_its_timer_is_told_with_that(
    children: MarkedChildren, failed: queue.Queue[WorkerFailure]
) -> None:
    process = worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken, {process.pid: "forward"}.get)  # type: ignore[arg-type]
    process.kill()
    assert (
        failed.get(timeout=DEADLINE).line == f"worker {process.pid} was killed, since its timer 'forward' had expired"
    )
    end(process)
    watch.end()


def test_memory_that_ran_out_long_before_has_killed_no_worker(
    children: MarkedChildren,
    failed: queue.Queue[WorkerFailure],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """But another process of the group."""
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 3\n")
    monkeypatch.setattr(proc, "_groups", lambda _pid: [events])
    monkeypatch.setattr(proc, "RECENT", 0.05)
    process = worker()
    watch = WorkerWatch(children.mark, failed.put, unbroken)
    assert watch._memory is not None
    events.write_text("oom_kill 4\n")
    eventually(lambda: not watch._memory.grew(), "it is long ago")  # type: ignore[union-attr]
    end(process)
    assert "SIGKILL" in failed.get(timeout=DEADLINE).line
    watch.end()


def test_an_agent_that_saw_nobody_end_tells_what_torch_says(tmp_path: Path) -> None:
    raised, aborted = tmp_path / "1.json", tmp_path / "0.json"
    raised.write_text(json.dumps(RAISES))
    failures = {0: ProcessFailure(0, 70, -6, str(aborted)), 1: ProcessFailure(1, 71, 1, str(raised))}
    told = failure_in(ChildFailedError("train", failures))
    assert told is not None
    assert told.line == "worker 71 (rank 1, local rank 1) raised ValueError: no such sample"
