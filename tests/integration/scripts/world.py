"""One process of a job without torchrun: `world.py URL [RANK] [WORLD_SIZE]`.

Says that it is ready, begins when it gets a line, and says what it found, as JSON; again for each further line, which
may name another size of the world.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import ftcoord

url, rank, world_size = (*sys.argv[1:], "-1", "-1")[:3]
ftcoord.register_init_methods()
print("ready", flush=True)
sys.stdin.readline()


def meet(size: int) -> str:
    """Take part in the world, and tell what was found."""
    dist.init_process_group("gloo", init_method=url, rank=int(rank), world_size=size, timeout=timedelta(seconds=60))
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    store = dist.distributed_c10d._get_default_store()
    used = store.check(["left behind"])
    dist.barrier()
    store.set("left behind", "x")
    return json.dumps([dist.get_rank(), dist.get_world_size(), ranks.item(), used])


print(meet(int(world_size)), flush=True)
for line in sys.stdin:  # until the test lets it end, or ends it; each line is for another world of the same run
    dist.destroy_process_group()
    print(meet(int(line.strip() or world_size)), flush=True)
dist.destroy_process_group()
