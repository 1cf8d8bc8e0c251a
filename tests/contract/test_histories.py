"""The same random histories of replicas, played to torchft's lighthouse and managers and to ours."""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Sequence, Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import spawn
from sites import KINDS, Site, group_ask

from ftcoord.coordination.address import parse_address
from ftcoord.coordination.policy import QuorumPolicy
from ftcoord.core.quorum_records import parse_replica
from ftcoord.core.verdict import Verdict, Wait
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.group.use import View

NAMES = "abcde"
RULES = {"min_replicas": 2, "join_timeout_ms": 15_000, "heartbeat_timeout_ms": 60_000}
"""Long enough for a machine that is busy, or whose disk stalls: what comes later than that changes the history."""
TOLD = (
    *("quorum_id", "replica_rank", "replica_world_size", "recover_src_replica_rank", "recover_dst_replica_ranks"),
    *("store_address", "max_step", "max_replica_rank", "max_world_size", "heal", "replica_ids"),
)


@dataclass(frozen=True)
class Round:
    """What happens: some replicas die, some come (also such that died), and then some of the living ask together.

    Args:
        asks: for each that asks, what it asks.
    """

    die: Sequence[str]
    come: Sequence[str]
    asks: dict[str, dict[str, Any]]


def history(seed: int, length: int) -> list[Round]:
    """Rounds that can be decided: enough ask, more than half of the living, and nobody new where all shall shrink."""
    chance = random.Random(seed)
    alive: set[str] = set()
    last: set[str] = set()
    rounds = []
    for _ in range(length):
        die = chance.sample(sorted(alive), chance.choice([0, 0, 0, 1])) if len(alive) > 2 else []
        alive -= set(die)
        absent = sorted(set(NAMES) - alive)
        come = chance.sample(absent, min(len(absent), max(3 - len(alive), chance.choice([0, 0, 1, 2]))))
        alive |= set(come)
        least = max(2, len(alive) // 2 + 1)
        count = len(alive) if chance.random() < 0.85 else chance.randint(least, len(alive))
        asking = set(chance.sample(sorted(alive), count))
        shrinks = asking <= last and chance.random() < 0.5
        rounds.append(Round(die, come, {name: _request(chance, shrinks) for name in sorted(asking)}))
        last = asking
    return rounds


def _request(chance: random.Random, shrinks: bool) -> dict[str, Any]:
    return {
        "step": chance.randint(0, 3),
        "shrink_only": shrinks,
        "init_sync": chance.random() < 0.8,
        "commit_failures": chance.choice([0, 0, 0, 1]),
    }


_waits: dict[str, str] = {}
"""By the prefix of a job: why its decider waited last, if it has decided nothing since."""
_views: dict[str, View] = {}
"""By the prefix of a job: what its decider saw last. It may see who has joined a moment later than others do."""
_decide = QuorumPolicy.decide


def noting(policy: QuorumPolicy, view: View, *more: Any) -> Verdict[bytes]:
    """Decide, and note on what, and why not."""
    verdict = _decide(policy, view, *more)
    _views[policy._prefix] = view
    _waits[policy._prefix] = verdict.reason if isinstance(verdict, Wait) else ""
    return verdict


def heard(kind: str, job: str, etcd: EtcdClient) -> set[str]:
    """The replicas that count as alive."""
    if kind == "torchft":
        with urllib.request.urlopen(f"{job}/status", timeout=DEADLINE) as page:
            return set(re.findall(r"(\w+): seen ", page.read().decode()))
    members = _views[parse_address(job).prefix].members if parse_address(job).prefix in _views else ()
    return {parse_replica(kv.key, kv.value).request.replica_id for kv in members}


def waiting(kind: str, job: str, etcd: EtcdClient) -> int:
    """How many replicas ask for a quorum."""
    if kind == "torchft":
        with urllib.request.urlopen(f"{job}/status", timeout=DEADLINE) as page:
            found = re.search(rb"\[(\d+)/\d+ participants healthy\]", page.read())
        assert found is not None
        return int(found[1])
    found = re.search(r"\[(\d+)/\d+ participants healthy\]", _waits.get(parse_address(job).prefix, ""))
    return int(found[1]) if found else 0


def until_heard(kind: str, job: str, etcd: EtcdClient, count: int) -> None:
    eventually(lambda: waiting(kind, job, etcd) == count, what=f"{count} replicas to be heard")


def play(kind: str, rounds: Sequence[Round], etcd: EtcdClient) -> list[dict[str, dict[str, Any]]]:
    """What each replica was told in each round; managers' addresses as their names."""
    told = []
    with ExitStack() as stack:
        site = Site(kind, stack)
        job = site.job(**RULES)
        managers: dict[str, Any] = {}
        ranks: dict[str, Any] = {}
        last: AbstractSet[str] = set()
        for happens in rounds:
            for name in happens.die:
                managers[name].shutdown()
            for name in happens.come:
                managers[name] = site.manager(job, name)
                (ranks[name],) = site.ranks(managers[name])
            # Or those that are heard of first have a quorum of their own, and nobody asks with the others again.
            come = set(happens.come)
            eventually(lambda come=come: come <= heard(kind, job, etcd), what=f"{sorted(come)} to be heard of")
            newcomers = happens.asks.keys() - last
            futures = {name: group_ask(ranks[name], **happens.asks[name]) for name in newcomers}
            if happens.asks.keys() & last:  # a quorum is made as soon as all of the last one ask, with who asks by then
                until_heard(kind, job, etcd, len(newcomers))
            last = happens.asks.keys()
            futures |= {name: group_ask(ranks[name], **happens.asks[name]) for name in last - newcomers}
            names = {manager.address().partition("#")[0]: name for name, manager in managers.items()}
            told.append({name: _plain(future.result(DEADLINE), names) for name, future in futures.items()})
    return told


def _plain(result: Any, names: dict[str, str]) -> dict[str, Any]:
    source = result.recover_src_manager_address
    return {**{name: getattr(result, name) for name in TOLD}, "source": names.get(source, source)}


def test_replicas_are_told_the_same(etcd: EtcdServer, client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOORD_ENDPOINTS", etcd.get_endpoint())
    monkeypatch.setattr(QuorumPolicy, "decide", noting)
    histories = {seed: history(seed, 8) for seed in range(6)}
    played = {
        (seed, kind): spawn(lambda kind=kind, rounds=rounds: play(kind, rounds, client))
        for seed, rounds in histories.items()
        for kind in KINDS
    }
    for seed, rounds in histories.items():
        ours, theirs = (played[seed, kind].result(4 * DEADLINE) for kind in KINDS)
        for happens, we, they in zip(rounds, ours, theirs, strict=True):
            assert we == they, (seed, happens)
