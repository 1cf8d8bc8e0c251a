"""Restarts a training script as soon as a peer of its job is lost, instead of after the time-out of its collectives.

    python examples/lost_replica.py etcd://127.0.0.1:2379/job1 python -m ftcoord.torchft train.py

Nothing in the script need know of it. NCCL waits for 10 minutes before it gives up on a peer that is dead.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from datetime import timedelta

from ftcoord.coordination import Observer, Quorum

GRACE = 10.0
"""Seconds that the script may take to end in order."""


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for a process that is stuck in a collective."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """Run the script until it ends by itself; its exit code."""
    address, *command = sys.argv[1:]
    news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    current = before = 0  # ids of quorums: the last one, and the one that there was when the script was started

    def on_quorum(quorum: Quorum) -> None:
        nonlocal current
        current = quorum.quorum_id

    def on_lost(replica_id: str, cause: str) -> None:
        """On a thread of the observer's: pass it on, and do the work elsewhere."""
        if current != before:  # else the script was not in that quorum
            news.put(f"{replica_id} is lost: {cause or 'it left, or its heartbeat timed out'}")

    def await_end() -> None:
        process.wait()
        news.put(None)

    observer = Observer(address, timedelta(seconds=30), on_quorum=on_quorum, on_lost=on_lost)
    while True:
        last = observer.quorum()
        before = last.quorum_id if last else 0
        process = subprocess.Popen(command)
        threading.Thread(target=await_end, daemon=True).start()
        loss = news.get()
        if loss is None:
            observer.close()
            return process.wait()
        print(f"{loss}; the script is started again", flush=True)
        end(process)
        while news.get() is not None:  # who else was lost up to now
            pass


if __name__ == "__main__":
    sys.exit(main())
