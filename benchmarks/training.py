"""A member of the run that `benchmarks.unstopped` disturbs. Each line of its output is a JSON object: what it has just
done. All times are on the monotonic clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.processes import end_with_parent
from ftcoord import elastic
from ftcoord.elastic.group import current
from ftcoord.logs import show_log_lines

SAMPLES: Final = 100
BATCH: Final = 14
"""Of all ranks. Four do not divide it, nor it the samples."""
WIDTH: Final = 8
PAUSE: Final = 0.01
"""Seconds of a step, beside what it computes."""


def parts() -> dict[str, Any]:
    """What is trained, with the same first weights each time."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1).double()  # convex, so that roundings do not grow
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    return {"model": model, "optimizer": optimizer, "sampler": elastic.Sampler(SAMPLES, BATCH, seed=7)}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what the model shall make of them: more than it can learn, so that no loss goes to zero."""
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=chance, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 1, generator=chance, dtype=torch.float64)


def undisturbed() -> Iterator[float]:
    """The loss of each step of one process that is alone."""
    (inputs, wanted), state = data(), parts()
    while True:
        for batch in state["sampler"].batches():
            loss = nn.functional.mse_loss(state["model"](inputs[batch]), wanted[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["sampler"].advance()
            yield loss.item()


def say(**what: object) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


@elastic.run(min_size=2)
def train(state: elastic.State) -> None:
    """Train until the process ends."""
    (inputs, wanted), rank, world = data(), dist.get_rank(), dist.get_world_size()
    where = {"number": current().number, "rank": rank, "world": world}
    say(begins=state.step, **where)
    ddp = elastic.data_parallel(state.model)
    try:
        while True:
            for batch in state.sampler.batches():
                time.sleep(PAUSE)
                loss = nn.functional.mse_loss(ddp(inputs[batch]), wanted[batch]) * state.sampler.weight
                loss.backward()
                whole = loss.detach().clone()
                work = dist.all_reduce(whole, async_op=True)
                assert work is not None
                elastic.wait(work)
                state.optimizer.step()
                state.optimizer.zero_grad()
                try:
                    state.commit()
                finally:
                    say(committed=state.step, loss=whole.item() / world, **where)
    finally:
        say(leaves=state.step, **where)


def main(endpoints: str = "", job: str = "", output: str = "") -> None:
    """A member, until its process ends. A forked one gets what else an agent has put into its environment."""
    if output:
        os.environ |= {"FTCOORD_ENDPOINTS": endpoints, "FTCOORD_JOB": job}
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        end_with_parent()
    torch.set_num_threads(1)
    show_log_lines()
    say(starts=os.getpid())
    train(elastic.State(**parts()))


if __name__ == "__main__":
    main()
