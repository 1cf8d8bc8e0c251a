"""A worker that takes no notice of its peers: it waits for the file FTCOORD_JOB/orders/stop. It loads no torch, which
takes two seconds of a processor."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from report import report

stop = Path(os.environ["FTCOORD_JOB"]) / "orders" / "stop"
tick = threading.Event()

report("started")
while not stop.exists():
    tick.wait(0.05)
report("finished")
