"""A worker that says who it is, and ends."""

import os

print(f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}", flush=True)
