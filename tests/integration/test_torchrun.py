"""Real torchrun agents with real gloo workers on a real etcd: jobs that run, lose agents, grow, and end."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from urllib.parse import quote

from helpers import eventually
from jobs import Job

from ftcoord.core.rendezvous_records import RoundHead, parse_decided
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Get, KeyValue, Span

WAIT = threading.Event().wait
"""For the passing of time itself, never for a condition."""


def keys(server: EtcdServer, job: Job, below: str = "") -> tuple[KeyValue, ...]:
    """What a run has in etcd."""
    with server.get_client() as client:
        return client.range(Get(Span(f"/ftcoord/v2/{quote(job.run_id, safe='')}/{below}", is_prefix=True))).kvs


def remembered(server: EtcdServer, job: Job) -> tuple[KeyValue, ...]:
    """What a run has in etcd, but for the causes of deaths: these stay for an hour."""
    return tuple(kv for kv in keys(server, job) if "/deaths/" not in kv.key)


def decided(server: EtcdServer, job: Job) -> RoundHead:
    (kv,) = keys(server, job, "decided")
    return parse_decided(kv.key, kv.value)


def await_members(server: EtcdServer, job: Job, count: int) -> None:
    eventually(lambda: len(keys(server, job, "members/")) == count, lambda: f"{count} members\n{job.story()}")


def test_a_job_of_three_agents_runs(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "3", run_id="team jöb 1", conf={"lease_ttl": 30}) as job:
        job.start("a", cold=True)
        job.start("bc")
        job.round_of("abc")
        joined = job.events("joined")
        assert {(event.sum, event.size, event.restarts) for event in joined} == {(3.0, 3, 0)}
        assert {(event.run_id, event.agent_store) for event in joined} == {("team jöb 1", "True")}
        job.finish("abc")
        assert len(job.events("finished")) == 3
        assert "Traceback" not in job.terminals()
        job.start("d")
        job.expect_exit(1, "d")
        assert "RendezvousClosedError: run 'team jöb 1' is over" in job.agents["d"].terminal()


def test_agents_that_die_are_replaced(etcd: EtcdServer, tmp_path: Path) -> None:
    """Longer than every time to live, so this also shows that the state of a run is kept as long as it runs."""
    conf = {"run_ttl": 9, "last_call_timeout": 15}
    with Job(tmp_path, etcd.get_endpoint(), "2:3", conf=conf) as job:
        job.start("abc")
        first = job.round_of("abc")
        ranks = job.ranks(first)
        zero, one, two = sorted(ranks, key=lambda name: ranks[name])

        job.kill(one)
        second = job.round_of(zero + two)
        assert job.ranks(second) == {zero: 0, two: 1}

        job.start("d")
        third = job.round_of(zero + two + "d")
        assert job.ranks(third) == {zero: 0, two: 1, "d": 2}

        job.kill(zero)
        fourth = job.round_of(two + "d")
        assert len({first, second, third, fourth}) == 4
        job.finish(two + "d")
        left = keys(etcd, job)
        assert left
        assert all(kv.lease for kv in left)
    eventually(lambda: not remembered(etcd, job), lambda: f"all keys expire, and not only {remembered(etcd, job)}")
    assert len(keys(etcd, job)) <= 2, "the causes of two deaths, for an hour"


def test_agents_that_get_a_signal_while_they_wait_leave_at_once(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "2:3", "idle.py", conf={"lease_ttl": 600}) as job:
        job.start("abc")
        job.round_of("abc", kind="started")
        before = job.rounds("started").keys()
        job.start("de")
        await_members(etcd, job, 5)
        job.agents["d"].signal(signal.SIGTERM)
        job.agents["e"].signal(signal.SIGINT)
        await_members(etcd, job, 3)
        job.expect_exit(1, "d")
        job.expect_exit(-signal.SIGINT, "e")
        job.finish("abc")
        assert job.rounds("started").keys() == before


def test_workers_of_one_agent_are_restarted_until_they_failed_too_often(etcd: EtcdServer, tmp_path: Path) -> None:
    """With torch's own handler, workers restarted on one agent find the keys of their last life."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # what is shared by default is in the other tests
    with Job(tmp_path, etcd.get_endpoint(), "1", workers=2, restarts=2, env=env) as job:
        job.start("a")
        rounds = [job.round_of("a")]
        for rank in (1, 0):
            job.order(f"crash-{rank}")
            rounds.append(job.round_of("a", after=rounds))
        assert {event.agent_store for event in job.events("started")} == {"False"}
        job.order("crash-0")
        job.expect_exit(1, "a")
        assert "failed" in decided(etcd, job).closed
        assert "ChildFailedError" in job.terminals()


def test_an_etcd_that_hung_and_ended_all_leases_stops_no_worker(fragile: EtcdServer, tmp_path: Path) -> None:
    """For as many leases as 37 s are with the default. The agents take others, and a death is noticed as ever."""
    ttl = 4
    with Job(tmp_path, fragile.get_endpoint(), "2:3", "idle.py", conf={"lease_ttl": ttl}) as job:
        job.start("abc")
        first = job.round_of("abc", kind="started")
        leases = {kv.lease for kv in keys(fragile, job, "members/")}
        fragile.pause()
        WAIT(3.7 * ttl)
        fragile.resume()

        def all_have_others() -> bool:
            now = {kv.lease for kv in keys(fragile, job, "members/")}
            return len(now) == 3 and not now & leases

        eventually(all_have_others, lambda: f"all agents have other leases\n{job.story()}")
        WAIT(2 * ttl)
        assert job.rounds("started").keys() == {first}, job.story()
        assert job.terminals().count("is in round 1 again under another one") == 3
        job.kill("b")
        job.round_of("ac", kind="started", after=[first])
        job.finish("ac")


def test_an_embedded_etcd_for_one_host(tmp_path: Path) -> None:
    with Job(tmp_path, "embedded", "1", "idle.py", workers=2) as job:
        job.start("a")
        job.round_of("a", kind="started")
        assert any("etcd" in Path(f"/proc/{pid}/cmdline").read_text() for pid in job.processes("a"))
        job.finish("a")
        eventually(lambda: not job.processes("a"), lambda: f"etcd ends with its agent\n{job.story()}")
        assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_wrong_is_said(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "1") as job:
        job.start("a", conf={"lease_tll": 3})
        job.start("b", "--rdzv-endpoint=127.0.0.1:1,localhost:2", conf={"read_timeout": 1, "join_timeout": 1})
        job.start("c", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=team/job")  # nobody is asked there
        job.start("d", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=none", "--nnodes=2")
        job.expect_exit(1, "abcd")
        a, b, c, d = (job.agents[name].terminal().splitlines()[-1] for name in "abcd")
        assert "run_id='team/job' is not valid: torch names a log folder after it" in c
        assert "run_id='none' is not valid: give all nodes of a job the same --rdzv-id" in d
        assert "lease_tll='3' is not valid" in a
        assert "RendezvousConnectionError: no etcd at http://127.0.0.1:1, http://localhost:2" in b
        assert job.events("started") == []
