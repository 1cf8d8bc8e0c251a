"""Sessions: a lease that is kept alive, and an owner who is told the truth about it."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

import pytest
from helpers import DEADLINE, eventually, freeze, in_fork, python

from ftcoord.config import EtcdConfig
from ftcoord.core.lease import SessionState
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdUnavailable, ForkedProcessError, LeaseLost, ThreadNotStarted
from ftcoord.etcd.api import Lease
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.session import KeptLease, Renewer, Session

CONNECTED, SUSPENDED, LOST = SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.LOST
TTL = 2
LONGER = 6
"""Of leases that must live on, also where the machine stalls for some seconds."""


class Told:
    """What a session told its owner; use it as listener."""

    def __init__(self) -> None:
        self._states: queue.SimpleQueue[SessionState] = queue.SimpleQueue()

    def __call__(self, state: SessionState) -> None:
        self._states.put(state)

    def next(self) -> SessionState:
        return self._states.get(timeout=DEADLINE)

    def is_quiet(self) -> bool:
        return self._states.empty()


def keeper_threads() -> int:
    return sum(thread.name == "ftcoord-leases" for thread in threading.enumerate())


def wait_a_while(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_the_ttl_is_what_etcd_granted(client: EtcdClient) -> None:
    with Session(client, 1) as session:
        assert session.ttl == 2


def test_close_revokes_at_once_and_says_no_more(client: EtcdClient, prefix: str) -> None:
    told = Told()
    session = Session(client, 3600, told)
    client.put(prefix, b"", session.lease_id)
    session.close()
    assert client.get(prefix).one is None
    assert session.state is LOST
    session.close()
    assert told.is_quiet()


def test_close_says_when_etcd_is_not_there(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        session = Session(client, 60)
        fragile.kill()
        with pytest.raises(EtcdUnavailable):
            session.close(timeout=0.3)
        session.close()


def test_an_orphan_lives_until_its_ttl_is_over(client: EtcdClient, prefix: str) -> None:
    session = Session(client, TTL)
    client.put(prefix, b"", session.lease_id)
    session.orphan()
    session.orphan()
    assert client.get(prefix).one is not None
    eventually(lambda: client.get(prefix).one is None, what="the expiry")
    assert session.state is not CONNECTED
    session.close()


def test_no_session_without_a_thread(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do, and the lease is given back. It can be tried again."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ftcoord-leases":
            raise RuntimeError("can't start new thread")
        real(thread)

    class Grants(EtcdClient):
        granted: Lease

        def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
            self.granted = super().grant(ttl, timeout=timeout)
            return self.granted

    monkeypatch.setattr(Renewer, "of_process", Renewer)  # one whose thread does not run yet
    with Grants(EtcdConfig.load(etcd.get_endpoint(), env={}, request_timeout=DEADLINE)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            text = r"'ftcoord-leases' cannot be started: can't start new thread; raise the limit on threads \(ulimit -u"
            with pytest.raises(ThreadNotStarted, match=text) as raised:
                Session(client, LONGER)
        assert isinstance(raised.value, RuntimeError), "as it is from Python"
        with pytest.raises(LeaseLost):
            client.renew(client.granted.id)
        with Session(client, LONGER) as session:
            assert session.state is CONNECTED


def test_suspended_and_connected_again(fragile: EtcdServer) -> None:
    told = Told()
    with fragile.get_client() as client, Session(client, 3, told) as session:
        client.put("/key", b"", session.lease_id)
        fragile.kill()
        assert told.next() is SUSPENDED
        assert session.state is SUSPENDED
        fragile.restart()
        assert told.next() is CONNECTED
        assert client.get("/key").one is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_raises_ends_its_own_session_only(client: EtcdClient) -> None:
    def broken(state: SessionState) -> None:
        raise RuntimeError(f"the owner cannot take {state}")

    with Session(client, 6, broken) as first, Session(client, LONGER) as second:
        client.revoke(first.lease_id)
        eventually(lambda: first.state is LOST, what="the loss")
        wait_a_while(LONGER + 2)
        assert client.renew(second.lease_id) == LONGER


def test_a_stopped_lease_is_never_renewed_again(client: EtcdClient) -> None:
    """Also where a renewal is under way when its owner stops it."""
    under_way, go_on = threading.Event(), threading.Event()
    renewals = []

    class Slow:
        def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
            renewals.append(lease_id)
            under_way.set()
            assert go_on.wait(DEADLINE)
            return 1

    kept = KeptLease(Slow(), Lease(1, 1), time.monotonic())  # type: ignore[arg-type]
    assert under_way.wait(DEADLINE)
    kept.stop()
    go_on.set()
    eventually(lambda: keeper_threads() == 0, what="the end of the thread")
    assert renewals == [1]


def test_a_forked_child_has_no_part_in_it(client: EtcdClient, prefix: str) -> None:
    with Session(client, 60) as session:
        client.put(prefix, b"", session.lease_id)
        refused = ForkedProcessError.__name__
        assert in_fork(lambda: session.lease_id) == refused
        assert in_fork(lambda: Session(client, 60)) == refused
        assert in_fork(session.close) == "None"
        assert in_fork(session.orphan) == "None"
        assert in_fork(lambda: Renewer.of_process() is not session._kept._renewer) == "True"
        assert client.get(prefix).one is not None
        assert session.state is CONNECTED
        assert keeper_threads() == 1


STATES = """
import sys
from ftcoord.config import EtcdConfig
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.session import Session
client = EtcdClient(EtcdConfig.load(sys.argv[1]))
session = Session(client, 2, lambda state: None)
client.put("/paused", b"", session.lease_id)
print("ready", flush=True)
while line := sys.stdin.readline():
    print(session.state.value, flush=True)
"""


def test_a_process_that_was_stopped_knows_better_at_once(etcd: EtcdServer, client: EtcdClient) -> None:
    """Asked in the first moment after SIGCONT, it no longer trusts a lease that is gone."""
    with python("-c", STATES, etcd.get_endpoint()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        freeze(process.pid)
        eventually(lambda: client.get("/paused").one is None, what="the expiry")
        process.stdin.write("state?\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() in ("suspended\n", "lost\n")

        def lost() -> bool:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("state?\n")
            process.stdin.flush()
            return process.stdout.readline() == "lost\n"

        eventually(lost, what="the loss")
