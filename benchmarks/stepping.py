"""torchft's Manager on Gloo, step by step: `stepping.py TIMEOUT HANGS NAME...`, a thread for each replica.

Each replica says what it does, a line of JSON each. Unless HANGS is `no` it says `hangs` instead of taking part in the
allreduce of a step with four replicas, and waits for its end; with `guarded` only when its process has a sentinel.
Run by `python`, it is torchft as it is; run by `python -m ftcoord.torchft`, it is on ftcoord.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from typing import Final

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo

from ftcoord.primitives.sentinel import Sentinel

NO, GUARDED = "no", "guarded"
SIZE: Final = 4
LENGTH: Final = 100_000
_speaking = threading.Lock()


def say(name: str, **what: object) -> None:
    """All times are on the monotonic clock."""
    with _speaking:
        print(json.dumps({"name": name, "at": time.monotonic(), **what}), flush=True)


def await_sentinel() -> None:
    """Wait until one stands beside this process, as it does after half a second."""
    sentinel, tick = Sentinel.of_process(), threading.Event()
    while sentinel is not None and sentinel.pid is None:
        tick.wait(0.02)


def train(name: str, timeout: timedelta, hangs: str) -> None:
    """One replica, until the process ends."""
    weights = {"w": torch.zeros(1)}
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=weights.update,
        state_dict=weights.copy,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=timeout,
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    while True:
        manager.start_quorum()
        size = manager.num_participants()
        if hangs != NO and size == SIZE and manager.current_step() > 0:
            if hangs == GUARDED:
                await_sentinel()
            say(name, hangs=manager.current_step())
            threading.Event().wait()
        say(name, enters=manager.current_step(), size=size)
        manager.allreduce(torch.ones(LENGTH)).wait()
        committed = manager.should_commit()
        error = manager.errored()
        say(name, committed=committed, step=manager.current_step(), size=size, error=str(error) if error else "")


def main() -> None:
    """Train until standard input ends."""
    timeout, hangs, *names = sys.argv[1:]
    for name in names:
        limit = timedelta(seconds=float(timeout))
        threading.Thread(target=train, args=(name, limit, hangs), name=name, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
