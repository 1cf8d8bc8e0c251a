"""A member of an elastic run. Each line of its output is a JSON object: what it has just done.

python elastic_worker.py JOB MIN_SIZE EPOCHS [option=value ...]
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ftcoord import AgreedStop, elastic
from ftcoord.elastic import group
from ftcoord.logs import show_log_lines

SAMPLES, BATCH, WIDTH, SEED = 100, 14, 8, 7


class Counting(nn.Module):
    """Counts its calls, as batch normalization does, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs


def parts(seed: int) -> dict[str, Any]:
    """What is trained, with weights of this seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), Counting(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        "sampler": elastic.Sampler(SAMPLES, BATCH, seed=SEED),
        "total": 0,
    }


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what the model shall make of them."""
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).tanh()


def say(**what: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def summed(value: float) -> float:
    """Over all ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    elastic.wait(work)
    return total.item()


def end(meeting: group.Meeting, *_: object) -> None:
    """In the middle of the first group: others have its address by now, or will wait for it."""
    if meeting._group is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(job: str, min_size: int, epochs: int, seed: int = 0, pause: float = 0.0, **options: float) -> None:
    inputs, wanted = data()
    state = elastic.State(**parts(seed))
    saved = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: saved.set())
    if "forming" in options:
        group.FORMING = timedelta(seconds=options["forming"])
    if "dies_connecting" in options:
        group.Meeting.wait = end  # type: ignore[method-assign]
    if "subgroup" in options:
        made: list[Any] = []

        @elastic.on_change
        def remake(rank: int, world: int) -> None:
            made[:] = [dist.new_group([*range(world)])]

    @elastic.run(min_size, job=job, join_timeout=options.get("join_timeout", 60))
    def train(state: elastic.State) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        say(begins=state.step, rank=rank, world=world)
        ddp = elastic.data_parallel(state.model)
        stop = AgreedStop() if "stops" in options else None
        while state.sampler.epoch < epochs:
            for indices in state.sampler.batches():
                time.sleep(pause)
                if stop is not None and stop.at(state.step):
                    say(stopped=state.step, rank=rank, reason=stop.reason)
                    if "saves" in options:
                        saved.wait()
                    return
                if "fails_at" in options and state.step == options["fails_at"]:
                    raise ValueError("as it was told to")
                if "blocks_at" in options and state.step >= options["blocks_at"]:
                    dist.barrier()
                weight = state.sampler.weight
                loss = nn.functional.mse_loss(ddp(inputs[indices]), wanted[indices]) * weight
                loss.backward()  # type: ignore[no-untyped-call]
                state.total += 1
                if "breaks" in options:  # as where a device fails: here alone, and at once
                    dist.all_reduce(torch.ones(1, dtype=torch.float8_e4m3fn))
                if "subgroup" in options:
                    work = dist.all_reduce(torch.ones(1), group=made[0], async_op=True)
                    elastic.wait(work)
                whole = summed(loss.item()) / world
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.scheduler.step()
                try:
                    state.commit()
                finally:
                    say(committed=state.step, used=indices if weight else [], rank=rank, world=world, loss=whole)

    say(starts=os.getpid())
    try:
        train(state)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    weights = [value.tolist() for value in state.model.state_dict().values()]
    say(ends=state.step, total=state.total, epoch=state.sampler.epoch, weights=weights)


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    show_log_lines()
    given = dict(one.split("=") for one in sys.argv[4:])
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), **{name: float(value) for name, value in given.items()})
