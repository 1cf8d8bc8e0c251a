"""A worker that does what training does: gloo, an all_reduce each step, and a crash when a peer is gone.

Its orders are files in FTCOORD_JOB/orders: `stop` ends the job on all ranks at the same step; `crash-<global rank>`
makes that rank exit 1, once.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from report import report

orders = Path(os.environ["FTCOORD_JOB"]) / "orders"
tick = threading.Event()


def crash_if_told(rank: int) -> None:
    try:
        (orders / f"crash-{rank}").unlink()
    except FileNotFoundError:
        return
    report("crashed")
    sys.exit(1)


def train() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = torch.tensor([float(rank)])
    dist.all_reduce(ranks)
    report("joined", sum=ranks.item(), size=world)
    stopping = torch.zeros(1)
    while not stopping.item():
        crash_if_told(rank)
        stopping[0] = (orders / "stop").exists()
        dist.all_reduce(stopping)
        tick.wait(0.05)
    dist.destroy_process_group()
    report("finished")


report("started")
train()
