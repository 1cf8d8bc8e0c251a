"""Training that is never stopped: kill any process with -9, and the others go on; start it again, and it joins.

    ftcoord server                       # in one terminal: an etcd on this machine
    ftcoord run -n 4 examples/elastic_train.py

With torchrun on each host: FTCOORD_ENDPOINTS=h1:2379 FTCOORD_JOB=digits torchrun --nproc-per-node=8 elastic_train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from ftcoord import elastic

EPOCHS = int(os.environ.get("EPOCHS", "20"))
torch.set_num_threads(1)  # so that several workers fit on one small machine
chance = torch.Generator().manual_seed(1)
shapes = torch.rand(10, 28 * 28, generator=chance)  # ten "digits", and 20,000 noisy pictures of them
labels = torch.randint(10, (20_000,), generator=chance)
pictures = shapes[labels] + torch.randn(len(labels), 28 * 28, generator=chance)
model = nn.Sequential(nn.Linear(28 * 28, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler = elastic.Sampler(len(labels), batch_size=256)


@elastic.run(min_size=2)
def train(state: elastic.State) -> None:
    """Called again, in the same process, whenever the members change."""
    ddp, rank, world = elastic.data_parallel(state.model), dist.get_rank(), dist.get_world_size()
    while state.sampler.epoch < EPOCHS:
        for batch in state.sampler.batches():
            loss = nn.functional.cross_entropy(ddp(pictures[batch]), labels[batch]) * state.sampler.weight
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            if state.step % 50 == 0:
                print(f"pid {os.getpid()}, rank {rank} of {world}: step {state.step}, loss {loss.item():.4f}")
            state.commit()


train(elastic.State(model=model, optimizer=optimizer, sampler=sampler))
