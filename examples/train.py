"""Elastic training for torchrun: on any number of workers, and from the last checkpoint after any restart.

It knows nothing of ftcoord. CHECKPOINT must be in a folder that all hosts share. STEPS says when to end.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

PATH, STEPS = os.environ.get("CHECKPOINT", "checkpoint.pt"), int(os.environ.get("STEPS", "5000"))

torch.set_num_threads(1)  # so that several workers fit on one small machine
dist.init_process_group("gloo")  # "nccl" on GPUs
me, world = f"rank {dist.get_rank()} of {dist.get_world_size()}", dist.get_world_size()
step, model = torch.zeros(1), nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
if dist.get_rank() == 0 and os.path.exists(PATH):
    step, weights = torch.load(PATH)
    model.load_state_dict(weights)
dist.broadcast(step, 0)
ddp = nn.parallel.DistributedDataParallel(model)  # takes the weights of rank 0
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)  # it has no state; save that of others, too
while step < STEPS:
    step += 1
    data = torch.randn(480, 512, generator=torch.Generator().manual_seed(int(step)))[dist.get_rank() :: world]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(data), data[:, :1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if step % 50 == 0:
        print(f"{me}: step {int(step)} of {STEPS}, loss {loss.item():.4f}", flush=True)
    if step % 50 == 0 and dist.get_rank() == 0:
        torch.save((step, model.state_dict()), f"{PATH}.new")
        os.replace(f"{PATH}.new", PATH)  # atomic: a worker that is killed here leaves a whole checkpoint
print(f"{me}: {PATH} has {int(step)} steps; delete it to train again", flush=True)
dist.destroy_process_group()
