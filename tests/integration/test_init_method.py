"""Jobs without torchrun: real processes that meet through init_process_group(init_method="etcd://...")."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import warm
from helpers import DEADLINE

from ftcoord.embedded.server import EtcdServer

SCRIPT = Path(__file__).parent / "scripts" / "world.py"
Process = subprocess.Popen[str]


@contextlib.contextmanager
def world(*arguments: Sequence[object]) -> Iterator[list[Process]]:
    """A process for each list of arguments. All begin together, when each of them has loaded torch."""
    commands = [[sys.executable, str(SCRIPT), *map(str, one)] for one in arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [warm.Popen(command, text=True, **pipes) for command in commands]
    try:
        for process in running:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def told(processes: Sequence[Process]) -> list[tuple[int, int, float, bool]]:
    """What the processes of one world found, by rank: rank, world size, sum of ranks, whether their store was used."""
    answers = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        answers.append(tuple(json.loads(line)))
    return sorted(answers)


def expected(size: int) -> list[tuple[int, int, float, bool]]:
    return [(rank, size, size * (size - 1) / 2, False) for rank in range(size)]


def end(processes: Sequence[Process]) -> None:
    """Let them end, and check that they do so in peace."""
    for process in processes:
        _, complaints = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, complaints


def test_ranks_from_the_arguments_the_url_or_by_arrival(etcd: EtcdServer) -> None:
    at = f"etcd://{etcd.get_endpoint()}"
    given = [[f"{at}/given", rank, 3] for rank in (2, 0, 1)]
    in_url = [[f"{at}/in-url?rank={rank}&world_size=2"] for rank in (1, 0)]
    by_arrival = [[f"{at}/by%20arrival?world_size=2"]] * 2
    with world(*given) as one, world(*in_url) as other, world(*by_arrival) as third:
        assert told(one) == expected(3)
        assert told(other) == expected(2)
        assert told(third) == expected(2)
        end([*one, *other, *third])


def test_a_world_of_all_that_come_during_the_last_call(etcd: EtcdServer) -> None:
    url = f"etcd://{etcd.get_endpoint()}/open?last_call_timeout=15"  # in which a crowded machine loads gRPC three times
    with world([url], [url], [url]) as processes:
        assert told(processes) == expected(3)
        end(processes)


def test_processes_that_live_on_meet_again(etcd: EtcdServer) -> None:
    """destroy_process_group(), and init_process_group() with the same URL."""
    url = f"etcd://{etcd.get_endpoint()}/once-more"
    with world([url, 0, 2], [url, 1, 2]) as processes:
        assert told(processes) == expected(2)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert told(processes) == expected(2)
        end(processes)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [("etcd://127.0.0.1:1/run?world_size=1&join_timeout=1", "no etcd at"), ("etcd://h1/run?rank=1", "world_size")],
)
def test_what_is_wrong_is_said(url: str, complaint: str) -> None:
    with world([url]) as (process,):
        _, complaints = process.communicate(timeout=DEADLINE)
        assert process.returncode == 1
        assert complaint in complaints.splitlines()[-1]
