"""A job that Python starts: `launch.py ENDPOINT`."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def work(text: str) -> str:
    dist.init_process_group("gloo")
    dist.barrier()
    return f"{text} {os.environ['RANK']}"


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="etcd-v3",
        rdzv_endpoint=sys.argv[1],
        run_id="from python",
    )
    print(elastic_launch(config, work)("rank"))
