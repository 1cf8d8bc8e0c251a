"""As idle.py, under torch's `record`; the worker with rank 1 raises something once the file orders/raise is there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from report import report
from torch.distributed.elastic.multiprocessing.errors import record

orders = Path(os.environ["FTCOORD_JOB"]) / "orders"


@record
def main() -> None:
    tick = threading.Event()
    report("started")
    while not (orders / "stop").exists():
        if os.environ["RANK"] == "1" and (orders / "raise").exists():
            (orders / "raise").unlink()
            raise ValueError("no such sample: 17")
        tick.wait(0.05)
    report("finished")


main()
