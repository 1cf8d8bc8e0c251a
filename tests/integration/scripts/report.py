"""How workers tell the test what they do: a line of JSON for each event, in a file for each worker."""

from __future__ import annotations

import json
import os
from pathlib import Path

_log = Path(os.environ["FTCOORD_JOB"]) / "events" / f"{os.environ['FTCOORD_AGENT']}-{os.getpid()}.jsonl"


def report(event: str, **facts: object) -> None:
    """Append an event, with what torchrun told this worker."""
    told = os.environ
    line = {
        "event": event,
        "agent": told["FTCOORD_AGENT"],
        "pid": os.getpid(),
        "rank": int(told["RANK"]),
        "world": int(told["WORLD_SIZE"]),
        "master": f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}",
        "run_id": told["TORCHELASTIC_RUN_ID"],
        "agent_store": told["TORCHELASTIC_USE_AGENT_STORE"],
        "restarts": int(told["TORCHELASTIC_RESTART_COUNT"]),
        **facts,
    }
    with _log.open("a") as file:
        file.write(json.dumps(line) + "\n")
