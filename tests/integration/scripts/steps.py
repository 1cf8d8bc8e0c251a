"""One replica of torchft's, alone: a step that is committed, one that is not, and an abort. `steps.py NAME`."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta

import torch
import torchft.otel
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo

LIMIT = timedelta(seconds=90)
# As `import torchft` does it with TORCHFT_USE_OTEL. It cannot where OpenTelemetry wants of an exporter what that of
# torchft 0.2.0 has not.
torchft.otel.TeeLogExporter.force_flush = lambda self, timeout_millis=0: True
torchft.otel.TeeLogExporter.__abstractmethods__ = frozenset()
os.environ["TORCHFT_USE_OTEL"] = "true"
logging.getLogger().setLevel(logging.INFO)  # torchft sets none, and all its records are of this one
for name in ("torchft_quorums", "torchft_commits", "torchft_errors"):
    torchft.otel.setup_logger(name)

weights = {"w": torch.zeros(1)}
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
process_group = ProcessGroupGloo(timeout=LIMIT)
manager = Manager(
    pg=process_group,
    load_state_dict=weights.update,
    state_dict=weights.copy,
    min_replica_size=1,
    use_async_quorum=False,
    timeout=LIMIT,
    replica_id=sys.argv[1],
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
)
manager.start_quorum()
manager.should_commit()
manager.start_quorum()
manager.report_error(RuntimeError("of the test"))
manager.should_commit()
process_group.abort()
torchft.otel.shutdown()
manager.shutdown()
