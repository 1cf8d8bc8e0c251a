"""An agent whose worker is forked (start_method=fork): `forked_worker.py ENDPOINT FOLDER`. It makes these files in the
folder: worker-PID once the worker runs, and `noted` once the agent has told its sentinel of it.

The worker does not heed the signal that torch has the kernel send it when its agent ends: so does one that hangs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ftcoord.rendezvous.orphans import MarkedChildren

note_workers = MarkedChildren.note_workers


def work(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(folder, f"worker-{os.getpid()}").touch()
    signal.pause()


def main(endpoint: str, folder: str) -> None:
    def note(children: MarkedChildren, pids: Iterable[int]) -> None:
        note_workers(children, pids)
        Path(folder, "noted").touch()

    MarkedChildren.note_workers = note  # type: ignore[method-assign]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        start_method="fork",
        rdzv_backend="etcd-v3",
        rdzv_endpoint=endpoint,
        rdzv_configs={"lease_ttl": 600},
        run_id="forked",
    )
    elastic_launch(config, work)(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
