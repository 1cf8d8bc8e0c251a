"""What an installed ftcoord adds to the import of torch's rendezvous package."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

_TIMED: Final = """
import importlib.metadata, json, time

load, spent = importlib.metadata.EntryPoint.load, []

def timed(entry):
    begin = time.perf_counter()
    creator = load(entry)
    if entry.value.startswith("ftcoord."):
        spent.append(time.perf_counter() - begin)
    return creator

importlib.metadata.EntryPoint.load = timed
begin = time.perf_counter()
import torch.distributed.elastic.rendezvous.registry
print(json.dumps([time.perf_counter() - begin, sum(spent), len(spent)]))
"""


@dataclass(frozen=True, slots=True)
class Import:
    """Milliseconds of one import in a fresh process: of all of it, and of loading our `entries` entry points."""

    total: float
    ours: float
    entries: int


def measure_import() -> Import:
    """Import torch's registry of handlers, which loads everybody's entry points."""
    done = subprocess.run([sys.executable, "-c", _TIMED], capture_output=True, text=True, check=True)
    total, ours, entries = json.loads(done.stdout)
    return Import(1000 * total, 1000 * ours, entries)
