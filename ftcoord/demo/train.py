"""The demo's training script: DDP on gloo, written as for any elastic job. It does not use ftcoord.

Started by torchrun with the job's folder as its argument. Rank 0 keeps a checkpoint there, from which every restart
goes on, and appends a line to `progress.jsonl` for each step. The job ends at the step named in the file `last_step`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, WIDTH = 3072, 64


def shard(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of one fixed data set, inputs and wanted outputs: the loss means the same in any world."""
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(WIDTH, 1, generator=torch.Generator().manual_seed(2)) / WIDTH**0.5
    return inputs[rank::world], torch.tanh(3 * inputs @ weights)[rank::world]


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint atomically: a rank 0 that is killed leaves the old one or the new one."""
    unfinished = path.with_suffix(".new")
    torch.save(state, unfinished)
    unfinished.replace(path)


def reduced(value: float, op: Any) -> float:
    """All ranks' values, reduced to one."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, op=op)
    return float(total.item())


def least(value: float) -> float:
    """The smallest of all ranks' values."""
    return reduced(value, dist.ReduceOp.MIN)


def last_step(folder: Path) -> float:
    """The step to end at; the same on all ranks."""
    file = folder / "last_step"
    mine = float(file.read_text()) if file.exists() else float("inf")
    return least(mine)


def main(folder: Path) -> None:
    """Train until the last step."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 1))
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        step = state["step"]
    inputs, wanted = shard(rank, world)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    step = int(least(step))
    while step < last_step(folder):
        step += 1
        loss = train_step(ddp, optimizer, inputs, wanted)
        if rank == 0:
            save(checkpoint, {"model": model.state_dict(), "step": step})
            report = {"step": step, "loss": loss, "world": world, "agent": os.environ.get("DEMO_AGENT", "?")}
            with (folder / "progress.jsonl").open("a") as progress:
                progress.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


def train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, wanted: torch.Tensor) -> float:
    """One step of gradient descent; the loss over the whole data set before it."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(inputs), wanted)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return reduced(loss.item(), dist.ReduceOp.SUM) / dist.get_world_size()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
