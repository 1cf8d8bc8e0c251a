"""Metrics that a test has this process serve: a process does until its end, and a test until its own."""

from __future__ import annotations

from ftcoord import concurrency
from ftcoord.metrics import exporter, process


def stop_serving() -> None:
    """As if nothing had been served."""
    export = concurrency.of_process(exporter._Export)
    if export._server is not None:
        export._server.close()
    export._begun, export._server = False, None
    process.end_counting()
