"""What a process tells its sentinel through: whoever reads it, and if nobody does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from virtual import Scheduler

from ftcoord import concurrency
from ftcoord.primitives.sentinel import HANGS_AFTER, SentinelPipe

TELLS_A_DEAD_ONE = """
import signal
from ftcoord import concurrency
from ftcoord.primitives.sentinel import SentinelPipe
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
pipe = SentinelPipe()
pipe.reader.close()
try:
    pipe.tell(b"x")
except OSError:
    print("lives")
"""
LARGE = b"." * (1 << 23)
SMALL = b"." * 100
BETWEEN = HANGS_AFTER / 8
"""Seconds: some of them are as long as nobody may read nothing."""


@pytest.fixture
def pipe() -> Iterator[SentinelPipe]:
    made = SentinelPipe()
    yield made
    made.reader.close()
    made.close()


def test_what_there_is_no_room_for_goes_with_what_is_told_next(pipe: SentinelPipe) -> None:
    pipe.tell(LARGE)
    read = pipe.reader.recv(len(LARGE))
    assert len(read) < len(LARGE)
    while len(read) <= len(LARGE):
        pipe.tell(b"" if len(read) < len(LARGE) else b"!")
        read += pipe.reader.recv(len(LARGE))
    assert read == LARGE + b"!"


def virtually(scenario: Callable[[], None]) -> None:
    Scheduler(0).run(scenario)


def hears_nothing_for(pipe: SentinelPipe, seconds: float) -> None:
    until = concurrency.now() + seconds
    while concurrency.now() < until:
        pipe.tell(SMALL)
        concurrency.sleep(BETWEEN)


def test_one_that_reads_nothing_hangs_though_there_is_room(pipe: SentinelPipe) -> None:
    def play() -> None:
        hears_nothing_for(pipe, HANGS_AFTER)
        with pytest.raises(TimeoutError, match="does not read"):
            hears_nothing_for(pipe, 3 * BETWEEN)

    virtually(play)


def test_one_that_was_stopped_together_with_the_process_does_not_hang(pipe: SentinelPipe) -> None:
    def play() -> None:
        pipe.tell(SMALL)
        for _ in range(3):
            concurrency.sleep(2 * HANGS_AFTER)
            pipe.tell(SMALL)  # which it was before this one could be read
            pipe.reader.recv(2 * len(SMALL))

    virtually(play)


def test_a_reader_that_was_killed_kills_no_program_that_dies_of_sigpipe() -> None:
    """As one does that wants to end with `head`."""
    done = subprocess.run([sys.executable, "-c", TELLS_A_DEAD_ONE], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n")


def test_a_forked_child_does_not_keep_it_open(pipe: SentinelPipe) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        pipe.close()
        assert pipe.reader.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
