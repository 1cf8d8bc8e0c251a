"""A worker of the failover benchmark: an all_reduce now and then, which fails when a peer is gone.

Appends to `events.jsonl` in the folder it is given: `started` first of all, `running` after the first all_reduce.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path


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
    while os.getppid() == agent:
        dist.all_reduce(value)
        tick.wait(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
