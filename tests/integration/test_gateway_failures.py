"""What torchft 0.2.0's native client is told when the gateway cannot do its work, or etcd does not do its own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from helpers import DEADLINE, eventually, set_alarm
from natives import TIMED_OUT, Natives
from test_gateway import asked, by_key, job_of, members, pytestmark  # noqa: F401

from ftcoord import EtcdServer
from ftcoord.coordination import Gateway
from ftcoord.coordination.gateway import GatewaySessions


def quorum(natives: Natives, gateway: Gateway, name: str, timeout: float = DEADLINE) -> Future[Any]:
    return natives.do("client_quorum", lighthouse=gateway.address(), name=name, timeout=timeout)


def beat(natives: Natives, gateway: Gateway, name: str, timeout: float = DEADLINE) -> Future[Any]:
    return natives.do("beat", lighthouse=gateway.address(), name=name, timeout=timeout)


def test_calls_time_out_while_etcd_is_gone_and_are_answered_when_it_is_back(
    natives: Natives, fragile: EtcdServer
) -> None:
    """As if no quorum came about in time: etcd may be back at any moment, so nobody is told to give up."""
    job = job_of(fragile, min_replicas=2, heartbeat_timeout_ms=60_000)
    with Gateway(job) as gateway:
        waits = quorum(natives, gateway, "waits", timeout=10.0)
        eventually(lambda: asked(job) == 1 or waits.done(), "it asks")
        beat(natives, gateway, "waits").result(DEADLINE)  # the gateway, too, knows by now that it has joined
        fragile.kill()
        late = [quorum(natives, gateway, "late", timeout=2.0), beat(natives, gateway, "new", timeout=2.0)]
        beat(natives, gateway, "waits").result(DEADLINE)  # a member that beats needs nothing of etcd
        for call in (*late, waits):
            with pytest.raises(TimeoutError, match=TIMED_OUT):
                call.result(DEADLINE)
        fragile.restart()
        before = asked(job)  # what it asked may still stand, and would be answered together with the other one
        calls = [quorum(natives, gateway, "waits")]
        eventually(lambda: asked(job) > before, "it asks again")
        calls.append(quorum(natives, gateway, "late"))
        told = [call.result(DEADLINE) for call in calls]
        assert [one["replica_id"] for one in told[0]["members"]] == ["late", "waits"]
        assert told[0] == told[1]


def test_what_etcd_refuses_is_unavailable_with_what_to_do(natives: Natives, fragile: EtcdServer) -> None:
    with Gateway(job_of(fragile, min_replicas=1)) as gateway:
        set_alarm(fragile.get_endpoint(), True)
        for call in (quorum(natives, gateway, "x"), beat(natives, gateway, "y")):
            with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*NOSPACE.*etcdctl alarm disarm"):
                call.result(DEADLINE)
        set_alarm(fragile.get_endpoint(), False)
        assert len(quorum(natives, gateway, "x").result(DEADLINE)["members"]) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_gateway_that_has_failed_is_unavailable(
    natives: Natives, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to who waits: it would wait in vain. Another gateway serves the same replicas."""
    job = job_of(etcd, heartbeat_timeout_ms=3_000)

    def fail(*_arguments: object) -> None:
        raise MemoryError("made by the test")

    with Gateway(job) as gateway:
        waits = quorum(natives, gateway, "waits")
        eventually(lambda: asked(job) == 1, "it asks")
        with monkeypatch.context() as patch:
            patch.setattr(GatewaySessions, "_take_silent", fail)
            eventually(lambda: gateway.has_failed, "it has failed")
        with pytest.raises(RuntimeError, match='status: Unavailable, message: "replica waits left the job meanwhile'):
            waits.result(DEADLINE)
        for call in (quorum(natives, gateway, "waits"), beat(natives, gateway, "other")):
            with pytest.raises(RuntimeError, match=r'status: Unavailable, message: "this gateway has failed.*restart'):
                call.result(DEADLINE)
        eventually(lambda: not members(job), "nobody counts on its replicas")
    with Gateway(job) as gateway:
        told = [quorum(natives, gateway, name) for name in ("waits", "other")]
        assert len({one.result(DEADLINE)["quorum_id"] for one in told}) == 1


def test_a_gateway_that_ends_is_unavailable(natives: Natives, etcd: EtcdServer) -> None:
    """At once, also to who waits."""
    job = job_of(etcd)
    with Gateway(job) as gateway:
        waits = quorum(natives, gateway, "waits", timeout=10 * DEADLINE)
        eventually(lambda: asked(job) == 1, "it asks")
    with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*Cancelling all calls|transport error"):
        waits.result(DEADLINE)
    with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*tcp connect error"):
        quorum(natives, gateway, "waits").result(DEADLINE)
