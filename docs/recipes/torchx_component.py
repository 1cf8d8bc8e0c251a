"""A TorchX component: `dist.ddp` sets an endpoint of its own, so this one says where etcd is.

torchx run -s slurm torchx_component.py:elastic --script train.py --endpoints etcd1:2379,etcd2:2379 --nnodes 2:4
"""

import torchx.specs as specs


def elastic(
    script: str,
    endpoints: str,
    nnodes: str = "2:4",
    nproc_per_node: int = 1,
    max_restarts: int = 100,
    image: str = "",
    name: str = "elastic",
) -> specs.AppDef:
    """An elastic job that meets through etcd.

    Args:
        script: what to train
        endpoints: the members of etcd, host:port,host:port
        nnodes: least and most nodes
        nproc_per_node: workers on each node
        max_restarts: how often workers may fail
        image: the image, or the folder for local schedulers
        name: the role
    """
    replicas = int(nnodes.split(":")[-1])
    arguments = [
        *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={endpoints}", f"--rdzv-id={specs.macros.app_id}"),
        *(f"--nnodes={nnodes}", f"--nproc-per-node={nproc_per_node}", f"--max-restarts={max_restarts}", script),
    ]
    role = specs.Role(name, image=image, entrypoint="torchrun", args=arguments, num_replicas=replicas)
    return specs.AppDef(name, roles=[role])
