"""Orders to end managers behind a gateway, which calls those whose addresses it knows."""

from __future__ import annotations

from unittest import mock

import builders
import pytest
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination import gateway
from ftcoord.coordination.address import Job
from ftcoord.coordination.gateway import GatewayKills
from ftcoord.coordination.gateway_sessions import GatewaySessions, PendingCall
from ftcoord.coordination.kills import order_kill

LONG = 60.0
"""Seconds, virtual."""
JOB = Job("etcd", "", "job", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=30_000)


class Behind:
    """A gateway's replicas, and the managers of theirs that it has called to end."""

    def __init__(self, world: World) -> None:
        client = world.etcd.client()
        self.called: list[str] = []
        self._kills = GatewayKills(client, JOB.prefix, lambda member: self.sessions.manager_of(member))
        self.sessions = GatewaySessions(client, JOB, lambda _peers: ())

    def __enter__(self) -> Behind:
        self._patch = mock.patch.object(gateway, "_kill", self._kill)
        self._patch.start()
        self._kills.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self._kills.close()
        self.sessions.close()
        self._patch.stop()

    def beat(self, name: str) -> None:
        self.sessions.beat(name, "peer", concurrency.now() + LONG)

    def ask(self, name: str) -> None:
        request = builders.request(name, address=f"http://{name}:1", step=1)
        self.sessions.ask(request, "ipv4:10.0.0.1:1", concurrency.now() + LONG, PendingCall())

    def _kill(self, address: str, _message: str, _deadline: float) -> None:
        self.called.append(address)


@simulated
def test_a_replica_that_only_beats_is_found_by_the_last_quorum(world: World) -> None:
    """It hangs in its step, and its gateway was started again since it asked."""
    with Behind(world) as before:
        before.ask("a")
    with Behind(world) as after:
        after.beat("b")
        after.beat("a")
        began = concurrency.now()
        order_kill(world.observer, JOB.prefix, "a", "why", began + LONG)  # its beats have ended
        assert concurrency.now() - began > 1
        assert after.called == ["http://a:1"]
        after.beat("b")
        with pytest.raises(TimeoutError, match="still a member"):
            order_kill(world.observer, JOB.prefix, "b", "why", concurrency.now() + 3)
        assert after.called == ["http://a:1"], "the address of the other one is not known"
