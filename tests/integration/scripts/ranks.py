"""A worker that says who it is, and ends."""

import os
import sys

sys.stdout.write(f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}\n")  # in one piece: others write beside it
