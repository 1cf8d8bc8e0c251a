"""The `ftcoord` command, as a user runs it. `make demo`, which CI runs too, plays the demo to its end."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually

import ftcoord
from ftcoord.commands import demo_server_dashboard_gateway_metrics as serving
from ftcoord.config import EtcdConfig
from ftcoord.etcd import api
from ftcoord.etcd.client import EtcdClient


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "ftcoord.cli", *arguments], stdout=subprocess.PIPE, text=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["--no-login"])]
)
def test_server_serves_until_it_is_told_to_end(number: int, flags: list[str], tmp_path: Path) -> None:
    """What it prints are commands that let the shells that use it in, also after the next start."""
    for _ in range(2):
        with start("server", "--port", "0", f"--data-dir={tmp_path / 'its data'}", *flags) as process:
            assert process.stdout is not None
            endpoint = re.search(r"serves on (\S+);", process.stdout.readline())
            assert endpoint is not None
            login = {}
            if not flags:
                words = shlex.split(process.stdout.readline())
                assert words.pop(0) == "export"
                login = dict(word.split("=", 1) for word in words)
            assert f"--rdzv-endpoint={endpoint[1]} " in process.stdout.readline()
            with EtcdClient(EtcdConfig.load(endpoint[1], env=login)) as client:
                client.put("/key", b"", timeout=DEADLINE)
            process.send_signal(number)
            assert process.wait(DEADLINE) == 0


@pytest.mark.parametrize("floor", [(3, 0), (99,)], ids=["new enough", "old"])
def test_server_says_itself_that_its_etcd_is_old(
    etcd: ftcoord.EtcdServer,
    floor: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Clients do not say it of an etcd that ftcoord started."""
    monkeypatch.setattr(api, "FLOORS", dict.fromkeys(itertools.product((3, 4), range(20)), floor))
    serving.advise(etcd)
    told = capsys.readouterr().out
    assert told.partition("; ")[2] == (
        "it has known lease and watch bugs, so use 99 or newer for real training runs\n" * (floor == (99,))
    )


def test_server_says_that_a_port_is_taken(etcd: ftcoord.EtcdServer) -> None:
    taken = str(etcd.get_port())
    done = subprocess.run(
        [sys.executable, "-m", "ftcoord.cli", "server", "--port", taken], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ftcoord: ")
    assert taken in done.stderr


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with start("demo", "--logs", str(tmp_path)) as process:
        assert process.stdout is not None
        printed = ""
        while "round 1:" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        pids = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", printed)]
        assert len(pids) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130
    assert not any(alive(pid) for pid in pids)
    eventually(lambda: not any(is_worker_in(tmp_path, pid) for pid in all_pids()), what="the workers end")


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def is_worker_in(folder: Path, pid: int) -> bool:
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ftcoord", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert done.stdout.startswith("usage: ftcoord ")
    assert "doctor" in done.stdout
