"""What etcd counts, read off its own /metrics."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

AS_ETCD_DOES: Final = ("--backend-batch-limit=10000", "--backend-batch-interval=100ms")
"""Flags of servers that are measured: embedded ones of some releases commit each write by itself, which is slower."""

_RECEIVED: Final = re.compile(r'grpc_server_msg_received_total\{.*grpc_method="(\w+)".*\} (\S+)')
_PLAIN: Final = re.compile(r"(\w+) (\S+)$")
_WRITES, _BYTES_OUT, _EVENTS, _CPU, _MEMORY, _DATABASE, _LEASES, _REVOKED, _WATCHES, _STREAMS = _NAMES = (
    "etcd_server_proposals_committed_total",
    "etcd_network_client_grpc_sent_bytes_total",
    "etcd_debugging_mvcc_events_total",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_debugging_lease_granted_total",
    "etcd_debugging_lease_revoked_total",
    "etcd_debugging_mvcc_watcher_total",
    "etcd_debugging_mvcc_watch_stream_total",
)


@dataclass(frozen=True, slots=True)
class Load:
    """etcd's counters since its start, or between two readings; of a cluster, what all its members did together.

    Args:
        writes: raft proposals: puts, transactions that write, leases granted and revoked. What costs a disk sync.
        requests: messages that clients sent, by gRPC method; on a stream each message counts.
        bytes_out: bytes that etcd sent to clients.
        events: changes that watches were told of.
        cpu: seconds of CPU.
    """

    writes: float
    requests: Counter[str]
    bytes_out: float
    events: float
    cpu: float

    @classmethod
    def read(cls, endpoints: str) -> Load:
        """The counters of these members, `host:port` joined by commas, as they are now."""
        loads = [cls._of(_lines(endpoint)) for endpoint in endpoints.split(",")]
        return cls(
            max(load.writes for load in loads),  # each member counts the same ones
            sum((load.requests for load in loads), Counter()),
            sum(load.bytes_out for load in loads),
            sum(load.events for load in loads),
            sum(load.cpu for load in loads),
        )

    @classmethod
    def _of(cls, lines: Iterable[str]) -> Load:
        lines = list(lines)
        requests: Counter[str] = Counter()
        for line in lines:
            if found := _RECEIVED.match(line):
                requests[found[1]] += int(float(found[2]))
        counts = _counts(lines)
        return cls(counts[_WRITES], requests, counts[_BYTES_OUT], counts[_EVENTS], counts[_CPU])

    def since(self, before: Load) -> Load:
        """What came since then."""
        return Load(
            self.writes - before.writes,
            self.requests - before.requests,
            self.bytes_out - before.bytes_out,
            self.events - before.events,
            self.cpu - before.cpu,
        )


@dataclass(frozen=True, slots=True)
class Holdings:
    """What etcd has now.

    Args:
        memory, database: bytes, of the member that has most.
        leases: those that live, but for what expired before a restart.
        watches, streams: of clients, over all members.
    """

    memory: float
    database: float
    leases: float
    watches: float
    streams: float

    @classmethod
    def read(cls, endpoints: str) -> Holdings:
        """Of these members, `host:port` joined by commas."""
        counts = [_counts(_lines(endpoint)) for endpoint in endpoints.split(",")]
        return cls(
            max(one[_MEMORY] for one in counts),
            max(one[_DATABASE] for one in counts),
            max(one[_LEASES] - one[_REVOKED] for one in counts),
            sum(one[_WATCHES] for one in counts),
            sum(one[_STREAMS] for one in counts),
        )


def _counts(lines: Iterable[str]) -> dict[str, float]:
    """The values of `_NAMES`, 0 for what this etcd does not count."""
    found = (line for line in map(_PLAIN.match, lines) if line is not None)
    return dict.fromkeys(_NAMES, 0.0) | {one[1]: float(one[2]) for one in found if one[1] in _NAMES}


def _lines(endpoint: str) -> list[str]:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        return str(answer.read().decode()).splitlines()
