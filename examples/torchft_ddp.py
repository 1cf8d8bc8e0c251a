"""A torchft job with no lighthouse: DDP over replica groups that come and go, on CPUs, with data of its own making.

Start one process for each replica group, in any number and order:

    export TORCHFT_LIGHTHOUSE='etcd://127.0.0.1:2379/ddp?min_replicas=2'
    REPLICA_GROUP_ID=0 python examples/torchft_ddp.py

It ends after STEPS steps (default 1000); or, if STEPS is a path, at the step that this file names once it is there.
"""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import timedelta
from pathlib import Path

import ftcoord.torchft  # noqa: F401  (before torchft: this line is all that changes)

# isort: split
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper
from torchft.process_group import ErrorSwallowingProcessGroupWrapper

WIDTH, BATCH = 32, 64


class SafeGloo(ErrorSwallowingProcessGroupWrapper):  # type: ignore[misc]
    """Gloo, with an allreduce that fails costing its step: alone, it fails an assertion in the DDP of torchft 0.2.0."""

    def __init__(self) -> None:
        super().__init__(ProcessGroupGloo(timeout=timedelta(seconds=10)))

    def errored(self) -> Exception | None:
        """What makes the Manager vote against the step: the wrapper calls it `error`, and it asks for `errored`."""
        return self.error()  # type: ignore[no-any-return]


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what the model shall learn to make of them: the same for all groups."""
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    weights = torch.randn(WIDTH, 1, generator=torch.Generator().manual_seed(2)) / WIDTH**0.5
    return inputs, torch.tanh(3 * inputs @ weights)


def last_step() -> float:
    """Where to end."""
    steps = os.environ.get("STEPS", "1000")
    if steps.isdigit():
        return float(steps)
    file = Path(steps)
    return float(file.read_text()) if file.exists() else float("inf")


def hash_of(model: nn.Module) -> str:
    """Equal for equal weights."""
    parts = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def main() -> None:
    """Train until the last step."""
    logging.basicConfig(level=logging.INFO)
    group = int(os.environ["REPLICA_GROUP_ID"])
    generator = torch.Generator().manual_seed(100 + group)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, dict[str, object]]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=SafeGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2,
        replica_id=f"ddp_{group}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    managed_model = DistributedDataParallel(manager, model)
    managed_optimizer = OptimizerWrapper(manager, optimizer)
    while manager.current_step() < last_step():
        inputs, wanted = batch(generator)
        managed_optimizer.zero_grad()
        loss = nn.functional.mse_loss(managed_model(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        managed_optimizer.step()
        print(f"step={manager.current_step()} loss={loss.item():.4f} replicas={manager.num_participants()}", flush=True)
    print(f"weights={hash_of(model)}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
