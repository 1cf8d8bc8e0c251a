"""What docs/recipes/srun.sbatch says a script does; says who it is, and ends."""

import os

from torch.distributed import barrier, destroy_process_group, get_rank, get_world_size, init_process_group

import ftcoord

ftcoord.register_init_methods()
init_process_group(
    "gloo",
    init_method=os.environ["INIT_METHOD"],
    rank=int(os.environ["SLURM_PROCID"]),
    world_size=int(os.environ["SLURM_NTASKS"]),
)
barrier()
print(f"{get_rank()}/{get_world_size()}", flush=True)
destroy_process_group()
