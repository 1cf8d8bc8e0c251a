"""What a calm job promises of its rounds, tried when nothing else befalls anybody: one promise a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from simulator.faults import WORKER_FAILURE
from simulator.oracles import require
from simulator.roles import Agent, Trainer
from simulator.world import LEASE_TTL, Process, World

AT_ONCE: Final = 1.0
"""Seconds within which the others hear of something, where messages take no time."""
ANSWERED_WITHIN: Final = 3.0
"""Seconds from when all ask: an office that ends is held again after two, and an ask comes again after five."""
TROUBLES: Final = 6
REFUSED_WITHIN: Final = 4.0 * LEASE_TTL
"""Seconds: who has other limits waits for twice the TTL of a lease, which may have been granted just before."""


def keep_promises(world: World) -> None:
    """Try one of them, if all agents work in one round that etcd knows of; and that all who ask are answered."""
    if not world.plan.network.loses_nothing or world.to_come:
        return
    _all_who_ask_are_answered(world, random.Random(f"{world.plan.seed} asks"))
    if _are_together(world):
        promise = PROMISES[world.plan.seed % len(PROMISES)]
        world.note(promise.__doc__)
        promise(world, random.Random(f"{world.plan.seed} promise"))


def _agents(world: World) -> list[tuple[Process, Agent]]:
    return [(process, role) for process, role in world.of(Agent) if isinstance(role, Agent)]


def _are_together(world: World) -> bool:
    record = world.oracles.rounds.record
    if record is None or not record.ready or record.recalled or record.closed:
        return False
    rounds = {role.now.name if role.now is not None else None for _, role in _agents(world)}
    return rounds == {record.name}


def _failure_is_told(world: World, draw: random.Random) -> None:
    """A worker fails, and the others are called back at once, though its agent is slow."""
    before = world.oracles.rounds.record
    process, role = draw.choice(_agents(world))
    watch = role.handler._resources.watch if role.handler is not None else None
    if watch is None or before is None:
        return
    process.begin(lambda: watch.fail(WORKER_FAILURE), "workers")
    world.scheduler.sleep(AT_ONCE + 6 * world.plan.network.delay)
    now = world.oracles.rounds.record
    is_recalled = now is not None and (now.number > before.number or now.recalled)
    require("a worker's failure is told at once", is_recalled, lambda: f"{now} after a worker of {process.name} failed")


def _lost_leases_recall_nobody(world: World, draw: random.Random) -> None:
    """Most leases end, and no node is lost."""
    agents = _agents(world)
    some = draw.sample(agents, draw.randint(len(agents) // 2 + 1, len(agents)))
    for _, role in some:
        if role.handler is not None:
            world.etcd.expire(role.handler._node.participant.lease)
    _stay(world, 3.0 * LEASE_TTL, "R9 lost leases recall nobody")


def _others_are_refused(world: World, draw: random.Random) -> None:
    """A node with another --nnodes joins, and is refused."""
    (least, most), agents = world.plan.nnodes, _agents(world)
    stranger = Agent(world, draw)
    stranger.wants = least, most + 1
    world.start(stranger, "stranger")
    _stay(world, REFUSED_WITHIN, "R6 other limits disturb nobody", agents)
    is_refused = isinstance(stranger.error, RendezvousStateError)
    require("R6 other limits are refused", is_refused, f"after {REFUSED_WITHIN:g} s: {stranger.error!r}")


def _surplus_disturbs_nobody(world: World, draw: random.Random) -> None:
    """A node comes for which there is no seat."""
    agents = _agents(world)
    if len(agents) == world.plan.nnodes[1]:
        world.start(Agent(world, draw), "surplus")
        _stay(world, 2.0 * LEASE_TTL, "L2 a surplus node disturbs nobody", agents)


def _stay(world: World, seconds: float, oracle: str, agents: list[tuple[Process, Agent]] | None = None) -> None:
    """All agents work on in their round for so long."""
    there = _agents(world) if agents is None else agents
    before = [role.now for _, role in there]
    world.scheduler.sleep(seconds)
    record = world.oracles.rounds.record
    stay = record is not None and not record.recalled and [role.now for _, role in there] == before
    require(oracle, stay, lambda: f"{before} were called back: {record}")


def _all_who_ask_are_answered(world: World, draw: random.Random) -> None:
    """Connections end, leases and the office are lost. Whoever asks is answered as soon as all ask, and nobody else."""
    trainers: list[tuple[Process, Trainer]] = [(one, role) for one, role in world.of(Trainer) if role.replicas]
    names = {(process.name, name) for process, role in trainers for name in role.told_at}
    if len(names) < max(world.job.min_replicas, 1):
        return
    world.oracles.quorums.all_is_well = True
    for _ in range(TROUBLES):
        office, what = world.office(world.job.prefix), draw.choice(("office", "lease", "connection", "connection"))
        replica = draw.choice(draw.choice(trainers)[1].replicas)
        if what == "office" and office is not None:
            world.etcd.expire(office.lease)
        elif what == "lease" and replica.participant.joined:
            world.etcd.expire(replica.participant.lease)
        else:
            world.sockets.break_one(draw)
        until = world.scheduler.time + draw.uniform(0, 2 * ANSWERED_WITHIN)
        while world.scheduler.time < until:
            world.scheduler.sleep(0.1)
            waits, late = world.oracles.quorums.waits, world.scheduler.time - ANSWERED_WITHIN
            all_wait = all(one in waits and waits[one][0] < late and not waits[one][1] for one in names)
            require("all who ask are answered", not all_wait, lambda waits=waits: f"all ask since {waits}")
    world.oracles.quorums.all_is_well = False


PROMISES: Final[tuple[Callable[[World, random.Random], None], ...]] = (
    _failure_is_told,
    _lost_leases_recall_nobody,
    _others_are_refused,
    _surplus_disturbs_nobody,
)
