"""A worker that gets stuck, under torchrun: it is killed when its timer expires, and the job goes on.

    torchrun --nnodes=1 --nproc-per-node=2 --max-restarts=1 --rdzv-backend=etcd-v3 --rdzv-endpoint=embedded \
        --rdzv-id=stuck --rdzv-conf=timers=1 examples/stuck_worker.py

`embedded` starts an etcd for the time of the job. If the job has several hosts, name the members of your etcd cluster.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist
import torch.distributed.elastic.timer as timer

import ftcoord.timer

STEPS = 20
AFTER = float(os.environ.get("AFTER", "5"))
"""Seconds that a step may take; far more than it does."""


def main() -> None:
    """Some steps. At the first start, rank 0 does not return from the tenth one."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    timer.configure(ftcoord.timer.EtcdTimerClient())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(STEPS):
        with timer.expires(after=AFTER, scope=f"step {step}"):
            dist.all_reduce(torch.ones(1))
            if (attempt, rank, step) == (0, 0, 10):
                print(f"attempt {attempt}: rank 0 is stuck in step {step}", flush=True)
                threading.Event().wait()
    print(f"attempt {attempt}: rank {rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
