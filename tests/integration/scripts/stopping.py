"""A worker that trains until all ranks agree to stop. `slow-<global rank>` in FTCOORD_JOB/orders: it saves slowly."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from report import report

from ftcoord import AgreedStop

report("started")
dist.init_process_group("gloo")
stop, ones, step = AgreedStop(), torch.ones(1), 0
report("joined", size=dist.get_world_size())
while not stop.at(step):
    dist.all_reduce(ones.fill_(1))
    threading.Event().wait(0.01)
    step += 1
if (Path(os.environ["FTCOORD_JOB"]) / "orders" / f"slow-{dist.get_rank()}").exists():
    threading.Event().wait(3)
report("finished", sum=float(step))
