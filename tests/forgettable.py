"""Makes one of everything public that has a thread, a lease, a key or a process, and tells what is there of them.

`python forgettable.py NAME ENDPOINT RUN [END]` makes one, says so, and ends without closing it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import kept
from helpers import ask_etcd, eventually

import ftcoord
import ftcoord.coordination
import ftcoord.timer
from ftcoord.etcd import api, messages
from ftcoord.etcd.client import EtcdClient
from ftcoord.heartbeat import HeartbeatEvent
from ftcoord.primitives.session import Renewer

LONG = timedelta(seconds=60)
TTL = 30
STORE_TTL = 5
"""Tests wait for its end; but a crowded machine must not end it before."""
"""Seconds of every lease here: what goes in much less was revoked."""
KEPT = ("/decided", "/events/")
"""What is in the names of keys that outlive whoever wrote them: what a group has decided, and its history."""


def address(endpoint: str, run: str) -> str:
    return f"etcd://{endpoint}/{run}?min_replicas=1&join_timeout_ms=100&heartbeat_timeout_ms={1000 * TTL}"


def client(endpoint: str, run: str) -> object:
    client = ftcoord.EtcdClient(endpoint)
    began = threading.Event()
    client.watch(api.Span(f"/{run}"), 0, lambda item: began.set())
    assert began.wait(60)
    return client


def server(endpoint: str, run: str) -> object:
    server = ftcoord.EtcdServer()
    server.start()
    return server


def session(endpoint: str, run: str) -> object:
    client = ftcoord.EtcdClient(endpoint)
    session = ftcoord.Session(client, TTL)
    client.put(f"/ftcoord/v2/{run}/mine", b"", session.lease_id)
    return session


def store(endpoint: str, run: str) -> object:
    """Its keys outlive it for its `ttl`, as after `close()`."""
    store = ftcoord.EtcdStore(endpoint, f"/ftcoord/v2/{run}/", LONG, ttl=STORE_TTL)
    store.set("a", b"1")
    return store


def heartbeat(endpoint: str, run: str) -> object:
    return ftcoord.Heartbeat(run, "me", TTL, etcd=endpoint).__enter__()


def heartbeat_watch(endpoint: str, run: str) -> object:
    watch = ftcoord.watch_heartbeats(run, endpoint)
    with ftcoord.Heartbeat(run, "somebody", TTL, etcd=endpoint):
        event = next(watch)
    if not Renewer.of_process()._due:  # else the thread of the one that beat has others' leases too
        for thread in threading.enumerate():
            if thread.name == "ftcoord-leases":
                thread.join(LONG.total_seconds())
    assert isinstance(event, HeartbeatEvent)
    return watch


def handler(endpoint: str, run: str) -> object:
    from torch.distributed.elastic.rendezvous import RendezvousParameters  # here: the others need no torch

    from ftcoord.rendezvous.handler import create_handler

    handler = create_handler(RendezvousParameters("etcd-v3", endpoint, run, 1, 1, lease_ttl=str(TTL), timers="1"))
    handler.next_rendezvous()
    return handler


def timer_client(endpoint: str, run: str) -> object:
    client = ftcoord.timer.EtcdTimerClient(run, endpoint, timeout=60, ttl=TTL)
    client.acquire("scope", time.time() + 3600)
    return client


def timer_server(endpoint: str, run: str) -> object:
    from helpers import eventually  # here: the others need no pytest

    server = ftcoord.timer.EtcdTimerServer(run, endpoint, max_interval=0.1)
    server.start()
    eventually(lambda: server._queue._feed._mirror.synced, "the watch of the timers")
    return server


def manager(endpoint: str, run: str) -> object:
    where = ("localhost", "[::]:0", "store", 1, timedelta(seconds=1), LONG, 0)
    server = ftcoord.coordination.ManagerServer("a", address(endpoint, run), *where)
    rank = ftcoord.coordination.ManagerClient(server.address(), LONG)
    assert rank._quorum(0, 0, "", False, True, 0, LONG).replica_ids == ["a"]
    return server


def rank(endpoint: str, run: str) -> object:
    """With its manager."""
    server = manager(endpoint, run)
    assert isinstance(server, ftcoord.coordination.ManagerServer)
    return server, ftcoord.coordination.ManagerClient(server.address(), LONG)


def lighthouse_client(endpoint: str, run: str) -> object:
    client = ftcoord.coordination.LighthouseClient(address(endpoint, run), LONG)
    client.quorum("one", LONG)
    client.heartbeat("two")
    return client


def observer(endpoint: str, run: str) -> object:
    told = threading.Event()
    with contextlib.closing(ftcoord.coordination.LighthouseClient(address(endpoint, run), LONG)) as client:
        client.quorum("one", LONG)
        observer = ftcoord.coordination.Observer(address(endpoint, run), LONG, on_quorum=lambda quorum: told.set())
        assert told.wait(60)
    return observer


def gateway(endpoint: str, run: str) -> object:
    return ftcoord.coordination.Gateway(address(endpoint, run))


MAKERS: dict[str, Callable[[str, str], object]] = {
    "EtcdClient": client,
    "EtcdRendezvousHandler": handler,
    "EtcdServer": server,
    "EtcdStore": store,
    "EtcdTimerClient": timer_client,
    "EtcdTimerServer": timer_server,
    "Gateway": gateway,
    "Heartbeat": heartbeat,
    "LighthouseClient": lighthouse_client,
    "ManagerClient": rank,
    "ManagerServer": manager,
    "Observer": observer,
    "Session": session,
    "watch_heartbeats": heartbeat_watch,
}
"""By the names under which they are public."""


LEASES = messages.declare("tests.leases", {"Lease": "id 1 int64", "Leases": "leases 2 Lease*"})["Leases"]
"""The LeaseLeasesResponse."""


@dataclass(frozen=True)
class Left:
    """What is there of such objects: threads and processes of this process, leases and keys in etcd."""

    threads: frozenset[str]
    children: frozenset[int]
    leases: frozenset[str]
    keys: frozenset[str]

    def __sub__(self, before: Left) -> Left:
        return Left(
            self.threads - before.threads,
            self.children - before.children,
            self.leases - before.leases,
            self.keys - before.keys,
        )

    def __bool__(self) -> bool:
        return bool(self.threads or self.children or self.leases or self.keys)


def look(etcd: ftcoord.EtcdServer, client: EtcdClient, run: str) -> Left:
    """What is there now. Leases only where they hold a key of the run, or none that remains."""
    found = client.range(api.Get(api.Span(f"/ftcoord/v2/{run}", is_prefix=True))).kvs
    lasting = {kv.lease for kv in found if any(part in kv.key for part in KEPT)}
    answer = LEASES.FromString(ask_etcd(etcd.get_endpoint(), "Lease/LeaseLeases"))
    leases = frozenset(str(one.id) for one in answer.leases) - {str(lease) for lease in lasting}
    keys = frozenset(kv.key for kv in found if kv.lease not in lasting)
    return Left(threads(), children(), leases, keys)


def threads() -> frozenset[str]:
    """But those that an etcd of a fixture has: they end with it, as its process does, which `look` sees."""
    ours = (one for one in threading.enumerate() if one.name.startswith("ftcoord-") and one.name != "ftcoord-etcd")
    return frozenset(f"{thread.name} {thread.ident}" for thread in ours)


def stacks() -> str:
    """Where each of these threads is: one that stays is stuck somewhere."""
    frames = sys._current_frames()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("ftcoord-")]
    where = {thread.name: frames[thread.ident] for thread in ours if thread.ident in frames}
    return "\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in where.items())


def children() -> frozenset[int]:
    """But for a sentinel that waits for the end of this process."""
    found: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            found += path.read_text().split()
    return frozenset(map(int, found)) - {kept.with_duty()}


def fork_and_forget(holder: list[object]) -> int:
    """A child that drops what the parent made, and ends as a program does; how it ended."""
    pid = os.fork()
    if pid == 0:
        holder.clear()
        gc.collect()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(name: str, endpoint: str, run: str, end: str = "") -> None:
    logging.disable(logging.INFO)  # a handler tells of its rounds
    holder = [MAKERS[name](endpoint, run)]
    if end == "fork":
        # It ends by itself, and is no loss then; it may only be about to start.
        eventually(lambda: all(one.name != "ftcoord-lookup" for one in threading.enumerate()), "no look-up is left")
        before = threads(), children()
        print(fork_and_forget(holder), sorted(before[0] - threads()), before[1] == children(), flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)  # the end of the parent is not what this is about
    print("made", flush=True)
    sys.stdin.readline()
    if end == "raise":
        raise ValueError("the end")
    if end == "thread":
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start()
        thread.join()
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
