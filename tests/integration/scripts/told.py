"""A task of a Slurm job that says where it is told to meet the others, and ends."""

import os

print(os.environ["INIT_METHOD"])
