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
from pathlib import Path

import pytest
from helpers import DEADLINE

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import WorkerFailure
from ftcoord.primitives.orphans import MARK, MarkedChildren
from ftcoord.proc import own_thread
from ftcoord.rendezvous.workers import WorkerWatch, _workers

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
