"""What docs/recipes/srun.sbatch says a script does; says who it is, and ends."""

import os
import sys

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
sys.stdout.write(f"{get_rank()}/{get_world_size()}\n")  # in one piece: others write beside it
destroy_process_group()
