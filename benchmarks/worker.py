"""A worker of the failover benchmark: an all_reduce now and then, which fails when a peer is gone.

Appends to `events.jsonl` in the folder it is given: `started` first of all, `running` after the first all_reduce, and
`failing` when it exits since the file `fail` there names its rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

HELD_OPEN = 300
"""Seconds for which the connections of a worker that fails stay open, at most."""


def report(folder: Path, event: str) -> None:
    """Say what this worker does. Times are of the monotonic clock, which is one for all processes of a host."""
    line = {
        "event": event,
        "at": time.monotonic(),
        "agent": os.environ["DEMO_AGENT"],
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
    }
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps(line) + "\n")


def is_to_fail(folder: Path) -> bool:
    """Whether this one is meant; said once."""
    order = folder / "fail"
    try:
        meant = order.read_text() == os.environ["RANK"]
    except FileNotFoundError:
        return False
    if meant:
        order.unlink()
    return meant


def fail(folder: Path) -> None:
    """Exit with 1, unheard by the peers, as with NCCL: a child keeps gloo's connections open, so that they hang."""
    if os.fork() == 0:
        signal.alarm(HELD_OPEN)  # ends this child, if the benchmark has not
        signal.pause()
    report(folder, "failing")
    os._exit(1)


def main(folder: Path) -> None:
    """Run until a peer or the agent is gone."""
    agent, tick = os.getppid(), threading.Event()
    report(folder, "started")
    import torch  # what comes before is the agent's work, what comes after is the worker's
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    report(folder, "running")
    while os.getppid() == agent:  # no other backend ends a worker whose agent was killed
        dist.all_reduce(value)
        if is_to_fail(folder):
            fail(folder)
        tick.wait(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
