"""Workers that hold expiration timers, and the servers that kill those that are late: all on one host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftcoord import concurrency
from ftcoord.timer.etcd_timer import EtcdTimerClient, EtcdTimerServer
from simulator.role import Role

if TYPE_CHECKING:
    from simulator.world import Process, World

TTL = 5
"""Seconds, of a worker's lease."""
MARGIN = 0.05
"""Seconds before its end that a worker leaves a scope at the latest, if it does in time."""


class Worker(Role):
    """Enters and leaves scopes, some of them in others. Mostly it is in time, sometimes late, and sometimes it never
    comes back."""

    shares_host = True

    def live(self, process: Process) -> None:
        timers = EtcdTimerClient("run", process.client, timeout=self.draw.choice((0.0, 1.0)), ttl=TTL)
        while not process.leaves.is_set():
            self._enter(process, timers, self.draw.choice((("epoch", "step"), ("step",))))
            process.rest(self.draw.choice((0.0, 0.1, 1.0)))
        timers.close()

    def _enter(self, process: Process, timers: EtcdTimerClient, scopes: tuple[str, ...]) -> None:
        scope, inner, held = scopes[0], scopes[1:], self.world.oracles.timers
        after = self.draw.choice((0.3, 2.0, 6.0)) * (5 if inner else 1)
        until = concurrency.now() + after
        held.acquires(process.name, scope, after, concurrency.now())
        timers.acquire(scope, concurrency.wall() + after)
        while inner and self.draw.random() < 0.9 and concurrency.now() < until - after / 2:
            self._enter(process, timers, inner)
        process.rest(self._stay(until - concurrency.now(), after) * (0.1 if inner else 1.0))
        held.releases(process.name, scope, concurrency.now())
        timers.release(scope)

    def _stay(self, left: float, after: float) -> float:
        """Seconds, in a scope with so many left."""
        chance = self.draw.random()
        if chance < 0.06:
            return math.inf
        if chance < 0.1:
            return after + self.draw.uniform(0, 5)
        return max(left - MARGIN, 0) * self.draw.choice((0.0, self.draw.random(), 1.0))

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        """Nobody is reaped without a server, nor where etcd has lost the timer."""
        if world.oracles.had_accident or not any(world.of(Watchdog)):
            return ""
        held = world.oracles.timers
        late = [process.name for process, _ in world.of(cls) if held.late_since(process.name) < process.clock_at(since)]
        return f"nobody reaps {late}, which are late: {held}" if late else ""


class Watchdog(Role):
    """A timer server, which starts again what it has killed, as torchrun's agent does."""

    shares_host = True

    def live(self, process: Process) -> None:
        while not process.leaves.is_set():
            server = EtcdTimerServer("run", process.client)
            server.start()
            over = concurrency.now() + self.draw.choice((10.0, 100.0))
            while concurrency.now() < over and not process.rest(self.draw.choice((0.5, 2.0))):
                self._restart_killed(process)
            server.stop()

    def _restart_killed(self, process: Process) -> None:
        for victim in [one for one in self.world.processes.values() if one.killed_by is process]:
            victim.killed_by = None
            with self.world.scheduler.process("main"):  # of this one it would stop in the middle, if this one is killed
                concurrency.thread(self.world.restart, "operator", victim, self.draw).start()

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        return ""
