"""Deciders that die, freeze or are dropped while their leases live for ten minutes: nobody waits for that. And clients
that are idle: nobody pays for them."""

from __future__ import annotations

import gc
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
from helpers import DEADLINE, eventually
from natives import Natives
from replicas import ReplicaProcess, Told, agreed, replica_processes
from test_gateway import asked, by_key, job_of, members, process  # noqa: F401

from ftcoord.coordination import LighthouseClient, ManagerClient, ManagerServer
from ftcoord.embedded.server import EtcdServer

TIMEOUT = timedelta(seconds=DEADLINE)


@pytest.fixture
def job(etcd: EtcdServer) -> str:
    """Of replicas that ask within a second of each other."""
    return job_of(etcd, join_timeout_ms=2000, heartbeat_timeout_ms=3000)


def first_to_join(job: str, process: ReplicaProcess) -> Future[Told]:
    """Its call, which waits for others: the first to join decides."""
    call = process.ask("a")
    eventually(lambda: members(job) == 1, "it has joined")
    return call


def test_a_decider_is_killed_and_restarted_under_its_id(job: str) -> None:
    with replica_processes(job, 3) as (first, second, again):
        before = agreed([first_to_join(job, first), second.ask("b")])
        first.kill()
        assert agreed([again.ask("a"), second.ask("b")]) == before


def test_a_decider_is_frozen(job: str) -> None:
    with replica_processes(job, 3) as (first, second, third):
        agreed([first_to_join(job, first), second.ask("b")])
        first.stop()
        _, names = agreed([second.ask("b"), third.ask("c")])
        assert names == ["b", "c"]
        first.resume()


def test_a_client_is_dropped_while_its_member_decides(job: str) -> None:
    first, second = LighthouseClient(job, TIMEOUT), LighthouseClient(job, TIMEOUT)
    first.heartbeat("a")  # the first to join decides
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(client.quorum, name, TIMEOUT) for client, name in ((first, "a"), (second, "b"))]
        ids = {call.result(DEADLINE).quorum_id for call in calls}
        del first, calls
        gc.collect()
        again = LighthouseClient(job, TIMEOUT)
        calls = [threads.submit(client.quorum, name, TIMEOUT) for client, name in ((again, "a"), (second, "b"))]
        assert {call.result(DEADLINE).quorum_id for call in calls} == ids
    again.close()
    second.close()


@pytest.mark.parametrize("moves", [False, True], ids=["back on its port", "the other one takes its replicas"])
def test_a_gateway_whose_replica_decides_is_killed(natives: Natives, job: str, moves: bool) -> None:
    with ExitStack() as stack:
        first, second = stack.enter_context(process(job)), stack.enter_context(process(job))
        natives.do("beat", lighthouse=first.address, name="x").result(DEADLINE)

        def ask(at: str) -> set[int]:
            calls = [natives.do("client_quorum", lighthouse=at, name="x", timeout=DEADLINE)]
            calls.append(natives.do("client_quorum", lighthouse=second.address, name="y", timeout=DEADLINE))
            return {call.result(DEADLINE)["quorum_id"] for call in calls}

        before = ask(first.address)
        first.end(signal.SIGKILL)
        after = second.address if moves else stack.enter_context(process(job, first.port)).address
        assert ask(after) == before


# -- managers that are dropped ---------------------------------------------------------------------------------------


def manager(job: str, name: str) -> ManagerServer:
    return ManagerServer(name, job, "localhost", "[::]:0", "store", 1, timedelta(seconds=1), TIMEOUT, 0)


@pytest.fixture
def patient_job(etcd: EtcdServer) -> str:
    """No time-out of it ends during a test: neither for who lives and does not ask, nor for who is silent."""
    return job_of(etcd, join_timeout_ms=3_600_000, heartbeat_timeout_ms=600_000)


@pytest.mark.parametrize("how", ["close", "leave", "shutdown", "drop"])
def test_a_call_under_way_is_told_who_ended_it(patient_job: str, how: str) -> None:
    """Its time is not over, so that is not what it hears."""
    managed = how in ("shutdown", "drop")
    server = manager(patient_job, "a") if managed else None
    client = LighthouseClient(patient_job, TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        if server is not None:
            call = threads.submit(ManagerClient(server.address(), TIMEOUT)._quorum, 0, 0, "", False, True, 0, TIMEOUT)
        else:
            call = threads.submit(client.quorum, "a", TIMEOUT)  # type: ignore[arg-type]
        eventually(lambda: asked(patient_job), "it asks")
        if how == "leave":
            client.leave("a")
        elif how == "shutdown":
            assert server is not None
            server.shutdown()
        server = None
        gc.collect()
        client.close()
        with pytest.raises(RuntimeError, match='status: Unavailable, message: "replica a left the job meanwhile'):
            call.result(DEADLINE)
