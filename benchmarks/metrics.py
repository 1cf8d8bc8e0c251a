"""What etcd counts, read off its own /metrics."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Final

AS_ETCD_DOES: Final = ("--backend-batch-limit=10000", "--backend-batch-interval=100ms")
"""Flags of servers that are measured: embedded ones of some releases commit each write by itself, which is slower."""

_RECEIVED: Final = re.compile(r'grpc_server_msg_received_total\{.*grpc_method="(\w+)".*\} (\S+)')
_COMMITTED: Final = re.compile(r"etcd_server_proposals_committed_total (\S+)")


@dataclass(frozen=True, slots=True)
class Load:
    """etcd's counters since its start, or between two readings.

    Args:
        writes: raft proposals: puts, transactions that write, leases granted and revoked. What costs a disk sync.
        requests: messages that clients sent, by gRPC method; on a stream each message counts.
    """

    writes: float
    requests: Counter[str]

    @classmethod
    def read(cls, endpoint: str) -> Load:
        """The counters as they are now."""
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        requests: Counter[str] = Counter()
        writes = 0.0
        for line in lines:
            if found := _RECEIVED.match(line):
                requests[found[1]] += int(float(found[2]))
            elif found := _COMMITTED.match(line):
                writes = float(found[1])
        return cls(writes, requests)

    def since(self, before: Load) -> Load:
        """What came since then."""
        return Load(self.writes - before.writes, self.requests - before.requests)
