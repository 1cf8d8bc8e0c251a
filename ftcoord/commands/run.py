"""`ftcoord run`: the processes of an elastic run on this host, each started again by itself when it dies."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.commands.shared import HEALTHY, NOT_DONE, Flag, add_command
from ftcoord.config import full_text, whole
from ftcoord.embedded.server import USER, EtcdServer, dying_with_parent
from ftcoord.logs import FORMAT_VARIABLE

PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to all processes."""
ENDING: Final = (signal.SIGTERM, signal.SIGINT)
"""Those after which none is started again; a second one kills."""
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a process is started again: doubled for each that lived for less than LIVED seconds."""
LIVED: Final = 60.0


def add_commands(commands: Any) -> None:
    about = "the number of processes"
    number = Flag("--processes NUMBER", "FTCOORD_PROCESSES", about, whole(1, 4096), 1, short="-n")
    job = Flag("--job ID", "FTCOORD_JOB", "the run's id; a new one if omitted", full_text, None)
    again = "how often each process may be started again"
    restarts = Flag("--restarts NUMBER", "FTCOORD_RESTARTS", again, whole(0, 10**9), 100)
    add_command(commands, run, number, job, restarts)
    parser = commands.choices["run"]
    parser.add_argument("script", metavar="SCRIPT", help="a Python script that uses ftcoord.elastic")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")


def run(options: argparse.Namespace) -> int:
    """Train with ftcoord.elastic in several processes on this host.

    A process that dies is started again, and no other is. Signals go to all of them. The etcd is that of
    FTCOORD_ENDPOINTS; without it one runs as long as this command. Exits with status 0 once a process has ended with
    that.
    """
    own = {"FTCOORD_JOB": options.job or f"run-{os.getpid()}-{os.urandom(3).hex()}", "PYTHONUNBUFFERED": "1"}
    own |= {"LOCAL_WORLD_SIZE": str(options.processes), FORMAT_VARIABLE: os.environ.get(FORMAT_VARIABLE, "text")}
    with ExitStack() as ends:
        if not os.environ.get("FTCOORD_ENDPOINTS", "").strip():
            etcd = ends.enter_context(EtcdServer(login=True))
            own["FTCOORD_ENDPOINTS"] = etcd.get_endpoint()
            own |= {"FTCOORD_USER": USER, "FTCOORD_PASSWORD_FILE": etcd.password_file()}
        return _Processes([sys.executable, options.script, *options.arguments], own, options).run()


def pause_after(lived: float, short_lives: int) -> float:
    """Seconds to wait before a process is started again that lived so long, the last of so many short lives."""
    return 0.0 if lived >= LIVED else min(SHORTEST_PAUSE * 2 ** (short_lives - 1), LONGEST_PAUSE)


class _Processes:
    """All processes of the command. Signal handlers run on the main thread; each process has a thread that starts it,
    prints its lines and waits for it."""

    def __init__(self, command: Sequence[str], own: Mapping[str, str], options: argparse.Namespace) -> None:
        self._command, self._own = command, own
        self._count, self._restarts = options.processes, options.restarts
        self._ending = concurrency.event()
        """Set when nothing is started again: on a signal, or when a process has ended with 0."""
        self._signals = 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by local rank; each changed by its thread
        self._codes: dict[int, int] = {}  # the same: how the last process of a rank ended
        self._printing = concurrency.lock("_Processes._printing")

    def run(self) -> int:
        """Run until all have ended for good; the exit code."""
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        threads = [concurrency.thread(self._keep, f"ftcoord-run-{rank}", rank) for rank in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # signal handlers run between two waits
                thread.join(1.0)
        return HEALTHY if HEALTHY in self._codes.values() else NOT_DONE

    def _pass_on(self, number: int, _frame: object) -> None:
        if number in ENDING:
            self._signals += 1
            self._ending.set()
        for process in [*self._running.values()]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if self._signals > 1 else number)

    def _keep(self, rank: int) -> None:
        short_lives = 0
        for left in range(self._restarts, -1, -1):
            began = concurrency.now()
            code = self._codes[rank] = self._run_once(rank)
            if code == HEALTHY:
                self._ending.set()  # all members end together: who dies meanwhile would come too late
            if self._ending.is_set():
                return
            lived = concurrency.now() - began
            short_lives = short_lives + 1 if lived < LIVED else 0
            pause = pause_after(lived, short_lives)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            then = f"it is started again in {pause:g} s" if left else "it has used up its restarts (--restarts)"
            self._print(rank, f"ftcoord: process {rank} {how}; {then}", sys.stderr)
            if self._ending.wait(pause):
                return

    def _run_once(self, rank: int) -> int:
        # Started by the thread that waits for it: the kernel ends it with that thread, and so with this process.
        process = subprocess.Popen(
            dying_with_parent(self._command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._own, "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C in a terminal is for this process, which passes it on once
        )
        self._running[rank] = process
        assert process.stdout is not None
        for line in process.stdout:
            self._print(rank, line.decode(errors="replace").rstrip("\n"), sys.stdout)
        code = process.wait()
        del self._running[rank]
        return code

    def _print(self, rank: int, line: str, out: Any) -> None:
        with self._printing:
            print(f"[{rank}] {line}", file=out, flush=True)
