"""torchft 0.2.0 with TORCHFT_PROACTIVE_RECOVERY: nobody waits for a dead peer until a collective's time is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import warm
from helpers import NEEDS_TORCHFT, eventually

import ftcoord
from ftcoord.embedded.server import EtcdServer
from ftcoord.primitives.session import INTRODUCED_AFTER

pytestmark = NEEDS_TORCHFT

SOURCE = str(Path(str(ftcoord.__file__)).parent.parent)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stepping.py"
TIMEOUT = 60
"""Seconds for collectives: nobody is to wait for them to be over."""
HEARTBEAT_TIMEOUT = 600
"""Seconds: nothing here ends by it."""
PATIENCE = 180.0
"""Seconds to import torch on a machine that is busy with other things."""


class Stepping:
    """A process of benchmarks/stepping.py, and what its replicas have said."""

    def __init__(self, address: str, names: str, hangs: str) -> None:
        own = {"TORCHFT_LIGHTHOUSE": address, "TORCHFT_PROACTIVE_RECOVERY": "1", "OMP_NUM_THREADS": "1"}
        self.process = warm.Popen(
            [sys.executable, "-m", "ftcoord.torchft", str(SCRIPT), str(TIMEOUT), hangs, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, "PYTHONPATH": SOURCE},
        )
        self._said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def said(self, **what: Any) -> list[dict[str, Any]]:
        """What matches, in order."""
        return [one for one in self._said.copy() if what.items() <= one.items()]

    def kill(self) -> None:
        """With -9."""
        self.process.kill()
        self.process.communicate()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(json.loads(line))


@contextmanager
def stepping(address: str, names: str, hangs: str = "no") -> Iterator[Stepping]:
    process = Stepping(address, names, hangs)
    try:
        yield process
    finally:
        process.kill()


def test_the_others_go_on_when_one_is_killed_in_the_middle_of_a_step(etcd: EtcdServer, prefix: str) -> None:
    """Gloo sends around a ring. Only the neighbours of the dead one see at once that its connections are closed."""
    name = prefix.strip("/")
    address = f"etcd://{etcd.get_endpoint()}/{name}?min_replicas=3&heartbeat_timeout_ms={HEARTBEAT_TIMEOUT * 1000}"
    with ExitStack() as stack:
        others = stack.enter_context(stepping(address, "abc"))
        victim = stack.enter_context(stepping(address, "d", hangs="guarded"))

        def all_said(**what: Any) -> bool:
            return all(others.said(name=name, **what) for name in "abc")

        (hung,) = eventually(lambda: [one for one in victim.said() if "hangs" in one], "one hangs", PATIENCE)
        eventually(lambda: all_said(enters=hung["hangs"], size=4), "the others are in that step")
        threading.Event().wait(2 * INTRODUCED_AFTER)  # else its sentinel may not run yet
        killed_at = time.monotonic()
        victim.kill()
        eventually(lambda: all_said(committed=False, size=4), "they give that step up")
        done = {"committed": True, "step": hung["hangs"] + 1, "size": 3}
        eventually(lambda: all_said(**done), "they commit it without that one")
    last = max(one["at"] for one in others.said(**done))
    assert last - killed_at < TIMEOUT / 2, "see benchmarks/stuck.py: on an idle machine it takes 0.3 s"
    assert all(one["error"] for one in others.said(committed=False, size=4))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("1", "ftcoord.proactive"), ("on", "ftcoord.proactive"), ("0", "torchft.manager"), ("", "torchft.manager")],
)
def test_it_is_off_unless_it_is_asked_for(value: str, wanted: str) -> None:
    code = (
        "import ftcoord.torchft, torchft, torchft.manager as m; print(torchft.Manager.__module__, m.Manager.__module__)"
    )
    assert run(code, value).stdout.split() == [wanted, wanted]


def test_another_value_is_refused_before_anything_is_imported() -> None:
    done = run("import ftcoord.torchft", "maybe")
    assert "TORCHFT_PROACTIVE_RECOVERY='maybe' is not valid: choose 1 or true" in done.stderr


def test_a_rank_that_is_not_told_where_the_job_is_is_refused() -> None:
    code = "import ftcoord.torchft, torchft; torchft.Manager(torchft.ProcessGroupGloo(), None, None, 1, rank=1)"
    assert "TORCHFT_LIGHTHOUSE" in run(code, "1").stderr.splitlines()[-1]


def run(code: str, value: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TORCHFT_PROACTIVE_RECOVERY": value, "PYTHONPATH": SOURCE}
    env.pop("TORCHFT_LIGHTHOUSE", None)
    return warm.run("-c", code, env=env)


def test_a_process_group_is_aborted_for_the_quorum_that_it_is_configured_for_and_for_no_other(
    etcd: EtcdServer, prefix: str
) -> None:
    """In a process of its own, since torchft is imported with ftcoord in the place of its native part."""
    address = f"etcd://{etcd.get_endpoint()}/{prefix.strip('/')}"
    program = Path(__file__).parent / "scripts" / "aborting.py"
    done = warm.run(str(program), address)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
