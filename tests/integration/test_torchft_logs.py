"""torchft's own log records on ftcoord: with TORCHFT_USE_OTEL, OpenTelemetry receives what it does from torchft."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import warm
from helpers import NEEDS_TORCHFT

import ftcoord
from ftcoord.core.layout import KEY_PREFIX, decided_key, quorum_prefix
from ftcoord.core.quorum_records import parse_quorum
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

logs_service_pb2: Any = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
pytestmark = NEEDS_TORCHFT

SCRIPT = Path(__file__).parent / "scripts" / "steps.py"
PATIENCE = 180.0
"""Seconds to import torch on a machine that is busy with other things."""


@contextmanager
def collector() -> Iterator[tuple[str, queue.SimpleQueue[dict[str, Any]]]]:
    """An OpenTelemetry collector: its address, and the attributes of each log record that it receives."""
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in logs_service_pb2.ExportLogsServiceRequest.FromString(sent).resource_logs:
                for scope in resource.scope_logs:
                    for record in scope.log_records:
                        received.put({"logger": scope.scope.name, **attributes(record)})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()


def attributes(record: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in record.attributes}


def drained(received: queue.SimpleQueue[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while not received.empty():
        yield received.get()


def test_opentelemetry_hears_of_quorums_commits_and_errors_once_each(
    etcd: EtcdServer, client: EtcdClient, prefix: str
) -> None:
    name = prefix.strip("/")
    with collector() as (endpoint, received):
        own = {
            "TORCHFT_LIGHTHOUSE": f"etcd://{etcd.get_endpoint()}/{name}",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "JOB_ID": name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(str(ftcoord.__file__)).parent.parent),
        }
        done = warm.run("-m", "ftcoord.torchft", str(SCRIPT), "r", env={**os.environ, **own}, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        told = list(drained(received))
    head = decided_key(quorum_prefix(KEY_PREFIX, name))
    decided = client.get(head).one
    assert decided is not None
    quorum = parse_quorum(head, decided.value)
    (seat,) = quorum.seats
    assert seat.request.replica_id.startswith("r:")  # torchft's Manager adds a UUID, and logs the name without it
    same = {"job_id": name, "replica_id": "r", "rank": 0, "quorum_id": quorum.id}
    found = [{key: one[key] for key in one if not key.startswith("code.")} for one in told]
    assert [one for one in found if one["logger"] == "torchft_quorums"] == [
        {"logger": "torchft_quorums", **same, "step": 0}
    ]
    assert [one for one in found if one["logger"] == "torchft_commits"] == [
        {"logger": "torchft_commits", **same, "step": 0, "commit_result": True},
        {"logger": "torchft_commits", **same, "step": 1, "commit_result": False},
    ]
    assert [one for one in found if one["logger"] == "torchft_errors"] == [
        {"logger": "torchft_errors", **same, "error": "process_group_abort"}
    ]
