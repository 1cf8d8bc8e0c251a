"""A worker that takes no notice of its peers: it waits for the file FTCOORD_JOB/orders/stop. It loads no torch, which
takes two seconds of a processor.

The file orders/crash-<global rank> makes that rank exit 1, once. Workers of the agents that are named in STUBBORN take
no notice of SIGTERM either.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from report import report

if os.environ["FTCOORD_AGENT"] in os.environ.get("STUBBORN", ""):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
orders = Path(os.environ["FTCOORD_JOB"]) / "orders"
crash = orders / f"crash-{os.environ['RANK']}"
tick = threading.Event()

report("started")
while not (orders / "stop").exists():
    if crash.exists():
        crash.unlink()
        report("crashed")
        sys.exit(1)
    tick.wait(0.05)
report("finished")
