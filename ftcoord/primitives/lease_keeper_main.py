"""Renews another process's leases while that one's interpreter is stuck. Run as a module, never imported by others:

    python -m ftcoord.primitives.lease_keeper_main PARENT_PID

Python renews leases on a thread, which waits as long as a C call holds the interpreter's lock. This process renews the
same leases as well, unless its parent is stopped, dead or a zombie: then they must end. It has no terminal, listens on
nothing, and ends with its parent.

Standard input brings one JSON line that says where etcd is, then lines ``keep LEASE TTL`` and ``drop LEASE`` (hex).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.config import Credentials, Endpoint, EtcdConfig, Tls
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Lease
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.session import KeptLease

KEEPER_PARENT_CHECK_INTERVAL: Final = 1.0
"""Seconds between two checks of the parent's pid."""
_NOT_RUNNING_STATES: Final = frozenset("TtZXx")
"""The states in /proc/PID/stat of a process that does not run: stopped, traced, zombie, dead."""


class Guarded:
    """The only thing that this process does with etcd: renew, as long as the parent runs."""

    def __init__(self, etcd: EtcdClient, parent: int) -> None:
        self._etcd, self._parent = etcd, parent

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        if not runs(self._parent):
            raise EtcdUnavailable("the process that the lease belongs to does not run")
        return self._etcd.renew(lease_id, timeout=timeout)


def runs(pid: int) -> bool:
    """Whether a process exists and is not stopped. Where there is no /proc, only whether it exists."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in _NOT_RUNNING_STATES
    except OSError:
        return os.getppid() == pid


def config_from(raw: Mapping[str, Any]) -> EtcdConfig:
    """What `config_text` wrote."""
    return EtcdConfig(
        tuple(Endpoint(host, port) for host, port in raw["endpoints"]),
        Tls(*raw["tls"]) if raw["tls"] else None,
        Credentials(*raw["login"]) if raw["login"] else None,
        raw["request_timeout"],
    )


def config_text(config: EtcdConfig) -> str:
    """A configuration as one line of JSON, password included: for a pipe, never for a command line."""
    tls, login = config.tls, config.credentials
    return json.dumps(
        {
            "endpoints": [(endpoint.host, endpoint.port) for endpoint in config.endpoints],
            "tls": (tls.ca, tls.cert, tls.key, tls.server_name) if tls else None,
            "login": (login.user, login.password) if login else None,
            "request_timeout": config.request_timeout,
        }
    )


def serve(parent: int) -> None:
    """Carry out what comes in until the parent is gone."""
    kept: dict[int, KeptLease] = {}
    etcd: Guarded | None = None
    received = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], KEEPER_PARENT_CHECK_INTERVAL)[0]:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, received = (received + data).split(b"\n")
        for line in lines:
            if etcd is None:
                etcd = Guarded(EtcdClient(config_from(json.loads(line))), parent)
                continue
            verb, lease_id, *ttl = line.decode().split()
            known = kept.pop(int(lease_id, 16), None)
            if known is not None:
                known.stop()
            if verb == "keep":
                lease = Lease(int(lease_id, 16), int(ttl[0]))
                kept[lease.id] = KeptLease(etcd, lease, concurrency.now())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent, which may want its leases until its end
    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
