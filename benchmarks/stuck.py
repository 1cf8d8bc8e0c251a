"""A replica of torchft is killed in the middle of a step: how long until the others have committed their next one."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.lighthouses import OURS, TORCHFT, serving
from benchmarks.processes import BenchmarkError
from benchmarks.report import measured_with, publish, table, verdict

PATIENCE: Final = 180.0
"""Seconds for the first steps."""
_SCRIPT: Final = Path(__file__).with_name("stepping.py")
SURVIVORS, VICTIM = "abc", "d"
SIZE: Final = 4
"""All of them."""
TARGET: Final = 3.0
"""Seconds, with proactive recovery."""


class Stepping:
    """A process of stepping.py, and what its replicas have said."""

    def __init__(
        self, kind: str, address: str, names: str, timeout: float, heard: threading.Condition, *, proactive: bool
    ) -> None:
        own = {"TORCHFT_LIGHTHOUSE": address, "TORCHFT_PROACTIVE_RECOVERY": str(int(proactive)), "OMP_NUM_THREADS": "1"}
        runner = [] if kind == TORCHFT else ["-m", "ftcoord.torchft"]
        hangs = "no" if names != VICTIM else "at once" if kind == TORCHFT else "guarded"
        self.process = subprocess.Popen(
            [sys.executable, *runner, str(_SCRIPT), str(timeout), hangs, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **own, "PYTHONPATH": str(_SCRIPT.parent.parent)},
        )
        self.said: list[dict[str, Any]] = []
        self._heard = heard
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """With -9. Idempotent."""
        self.process.kill()
        self.process.communicate()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.said.append(json.loads(line))
                self._heard.notify_all()


def measure(kind: str, timeout: float, *, proactive: bool) -> float:
    """Seconds from the kill of one of four until the other three have committed a step of three. Raises
    BenchmarkError."""
    heard = threading.Condition()
    with ExitStack() as stack:
        address, _ = stack.enter_context(serving(kind, SIZE - 1))
        groups = [Stepping(kind, address, names, timeout, heard, proactive=proactive) for names in (SURVIVORS, VICTIM)]
        for group in groups:
            stack.callback(group.kill)
        others, victim = groups

        def all_said(**what: object) -> bool:
            return all(any({**what, "name": name}.items() <= one.items() for one in others.said) for name in SURVIVORS)

        _until(heard, lambda: any("hangs" in one for one in victim.said), PATIENCE)
        step = next(one["hangs"] for one in victim.said if "hangs" in one)
        _until(heard, lambda: all_said(enters=step, size=SIZE), PATIENCE)
        began = time.monotonic()
        victim.kill()
        next_one = {"committed": True, "step": step + 1, "size": SIZE - 1}
        _until(heard, lambda: all_said(**next_one), 3 * timeout + PATIENCE)
        done = [one for one in others.said if next_one.items() <= one.items()]
        return max(next(float(one["at"]) for one in done if one["name"] == name) for name in SURVIVORS) - began


def _until(heard: threading.Condition, ready: Callable[[], bool], limit: float) -> None:
    with heard:
        if not heard.wait_for(ready, limit):
            raise BenchmarkError("torchft's replicas do not get on")


def run(trials: int, timeout: float) -> str:
    """Measure, and tell it in Markdown."""
    cases = [
        (f"{OURS}, TORCHFT_PROACTIVE_RECOVERY=1", OURS, True, trials),
        (OURS, OURS, False, 1),
        (TORCHFT, TORCHFT, False, 1),
    ]
    rows, reached = [], ""
    for title, kind, proactive, count in cases:
        times = []
        for _ in range(count):
            times.append(measure(kind, timeout, proactive=proactive))
            print(f"{title}: {times[-1]:.2f} s", file=sys.stderr, flush=True)
        rows.append([title, f"{median(times):.2f}", f"{max(times):.2f}", str(count)])
        if proactive:
            reached = verdict(
                f"with proactive recovery at worst {max(times):.2f} s", max(times) <= TARGET, f"{TARGET:g} s"
            )
    return f"""## A replica is killed in the middle of a step

`python -m benchmarks.stuck`, {measured_with()}
One of four replicas on Gloo is killed with -9 while the others wait in an allreduce with a timeout of {timeout:g} s.
Seconds until all survivors have committed their next step.

{table(["", "median", "worst", "trials"], rows)}
{reached}
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stuck", description="Measure steps that lose a peer.")
    parser.add_argument("--trials", type=int, default=10, help="kills with proactive recovery")
    parser.add_argument("--timeout", type=float, default=60, help="of collectives, in seconds")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    publish(run(options.trials, options.timeout), options.write)


if __name__ == "__main__":
    main()
