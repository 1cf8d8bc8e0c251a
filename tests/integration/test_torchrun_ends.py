"""How jobs end, on real torchrun agents: everywhere at once when they failed, undisturbed when they are done."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest
from helpers import eventually
from jobs import Job
from test_torchrun import decided, keys

from ftcoord import cli
from ftcoord.core import rendezvous_records
from ftcoord.embedded.server import EtcdServer


def test_a_job_that_failed_ends_on_all_nodes_though_workers_sleep(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "2", "idle.py", restarts=0, conf={"lease_ttl": 600}) as job:
        job.start("a")
        job.start("b", entry=["--no-python", "/bin/sh", "-c", "sleep 2; exit 3"])
        job.expect_exit(1, "b")
        job.expect_exit(1, "a")
        eventually(lambda: not job.processes("ab"), lambda: f"nothing of them is left\n{job.story()}")
        assert "failed" in decided(etcd, job).closed
        told = job.agents["a"].terminal()
        (stopped,) = [line for line in told.splitlines() if "the workers are stopped: " in line]
        # Whichever it heard first: b's worker is seen to end before b's agent closes the run.
        assert "exited with code 3" in stopped or "the run is over: " in stopped
        assert told.splitlines()[-1].startswith("torch.distributed.elastic.rendezvous.api.RendezvousClosedError: run ")
        assert "failed" in told.splitlines()[-1]


def test_a_job_that_is_done_on_one_node_goes_on_on_the_others(etcd: EtcdServer, tmp_path: Path) -> None:
    """The one that is done waits in torch's exit barrier."""
    with Job(tmp_path, etcd.get_endpoint(), "2", "idle.py", restarts=0) as job:
        job.start("a")
        job.start("b", entry=["--no-python", "/bin/sh", "-c", "exit 0"])
        eventually(lambda: job.events("started"), what=job.story)
        barrier = "torchelastic/agent/terminal_state"
        eventually(lambda: any(barrier in kv.key for kv in keys(etcd, job, "store/")), what=job.story)
        assert job.agents["b"].exit_code is None
        job.finish("ab")
        assert decided(etcd, job).outcome == rendezvous_records.FINISHED
        assert len(job.events("finished")) == 1
        assert "are stopped" not in job.terminals()


def test_a_drained_agent_ends_with_0_and_the_others_train_on(etcd: EtcdServer, tmp_path: Path) -> None:
    """No lease ends by time here, and no restart is to be had."""
    with Job(tmp_path, etcd.get_endpoint(), "2:3", "idle.py", restarts=0, conf={"lease_ttl": 600}) as job:
        job.start("abc")
        job.round_of("abc", kind="started")
        host = f"{socket.gethostname()} (pid {job.agents['b'].pid})"
        assert cli.main(["drain", job.run_id, host, "--endpoints", etcd.get_endpoint(), "--yes"]) == 0
        job.round_of("ac", kind="started")
        job.expect_exit(0, "b")
        eventually(lambda: not job.processes("b"), lambda: f"nothing of it is left\n{job.story()}")
        assert "goes on without this node, which was drained" in job.agents["b"].terminal()
        assert "Traceback" not in job.terminals()
        job.finish("ac")
        assert decided(etcd, job).outcome == rendezvous_records.FINISHED


def test_an_agent_that_is_told_to_stop_is_said_to_have_been(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a scheduler, with SIGTERM: torch then ends the process without a word to the rendezvous. So does SIGINT. Its
    lease ends long before its time, and workers that notice nothing are restarted."""
    with Job(tmp_path, etcd.get_endpoint(), "1:3", "idle.py", conf={"lease_ttl": 600}) as job:
        job.start("abc")
        first = job.round_of("abc", kind="started")
        host = f"{socket.gethostname()} (pid {job.agents['b'].pid})"
        job.agents["b"].signal(signal.SIGTERM)
        job.agents["b"].wait()
        second = job.round_of("ac", kind="started", after=[first])
        told = f"{host} was stopped by SIGTERM"
        assert any(told in line for line in job.agents["a"].terminal().splitlines()), job.story()
        assert cli.main(["why", job.run_id, "--endpoints", etcd.get_endpoint(), "-o", "json"]) == 0
        why = json.loads(capsys.readouterr().out)
        assert (why["first"]["kind"], why["first"]["reason"]) == ("left", told)
        assert "It was asked to stop" in why["do"]
        job.agents["c"].signal(signal.SIGINT)
        job.round_of("a", kind="started", after=[first, second])
        assert f"(pid {job.agents['c'].pid}) was stopped by Ctrl-C (SIGINT)" in job.agents["a"].terminal(), job.story()
        job.expect_exit(1, "bc")
        eventually(lambda: not job.processes("bc"), lambda: f"nothing of them is left\n{job.story()}")
        job.finish("a")


def test_a_failure_lets_those_go_that_are_done_and_wait_for_others(etcd: EtcdServer, tmp_path: Path) -> None:
    """torch's exit barrier would hold them for five minutes."""
    with Job(tmp_path, etcd.get_endpoint(), "2", restarts=0, conf={"lease_ttl": 600}) as job:
        order = tmp_path / "orders" / "fail"
        job.start("a", entry=["--no-python", "/bin/sh", "-c", f"until [ -e {order} ]; do sleep 0.1; done; exit 3"])
        job.start("b", entry=["--no-python", "/bin/sh", "-c", "exit 0"])
        barrier = "torchelastic/agent/terminal_state"
        eventually(lambda: any(barrier in kv.key for kv in keys(etcd, job, "store/")), what=job.story)
        job.order("fail")
        job.expect_exit(1, "a")
        job.expect_exit(0, "b")


def test_workers_that_fail_at_once_are_named_in_every_round(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before torch's agent looks at them for the first time: the commonest error of all."""
    with Job(tmp_path, etcd.get_endpoint(), "1", restarts=3) as job:
        job.start("a", entry=["no_such_script.py"])
        job.expect_exit(1, "a")
        assert cli.main(["history", job.run_id, "--endpoints", etcd.get_endpoint(), "-o", "json"]) == 0
        events = json.loads(capsys.readouterr().out)["events"]
        failures = [event["reason"] for event in events if event["kind"] == "failed"]
        assert len(failures) == 4, events
        # With its ranks, but for a worker that ended before its environment was read.
        assert all(re.fullmatch(r"worker \d+( \(rank 0, local rank 0\))? exited with code 2", one) for one in failures)
        assert "came back for a new round" not in job.terminals()


def test_a_typo_costs_no_run_id(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "2", "idle.py", restarts=0) as job:
        job.start("ab", entry=["no_such_script.py"])
        job.expect_exit(1, "ab")
        job.start("cd")
        job.round_of("cd", kind="started")
        assert decided(etcd, job).number > 1
        job.finish("cd")
        job.start("e")
        job.expect_exit(1, "e")
        assert "start a new run under another --rdzv-id" in job.agents["e"].terminal()


def test_a_node_with_another_nnodes_is_refused(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "2", "idle.py") as job:
        job.start("ab")
        first = job.round_of("ab", kind="started")
        job.start("c", "--nnodes=3")
        job.expect_exit(1, "c")
        told = job.agents["c"].terminal().splitlines()[-1]
        assert "--nnodes=2, as " in told
        assert "this node has --nnodes=3" in told
        assert job.rounds("started").keys() == {first}
        job.finish("ab")


def test_an_exception_of_a_worker_is_told_to_all_nodes_and_to_whoever_asks_later(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "2", "raising.py", restarts=1) as job:
        job.start("ab")
        first = job.round_of("ab", kind="started")
        failing = next(event for event in job.rounds("started")[first] if event.rank == 1)
        told = f"worker {failing.pid} (rank 1, local rank 0) raised ValueError: no such sample: 17"
        job.await_watched(first)
        job.order("raise")
        second = job.round_of("ab", kind="started", after={first})
        job.await_watched(second)
        job.order("raise")
        for name in "ab":  # the next one is one too many
            assert job.agents[name].wait() == 1, job.story()
            assert "raised ValueError: no such sample: 17" in job.agents[name].terminal()
        lines = [line for line in job.terminals().splitlines() if "the round before ended: " in line]
        assert len(lines) == 2
        assert all(told in line for line in lines)
        assert "first cause: " in decided(etcd, job).closed
        assert "raised ValueError: no such sample: 17" in decided(etcd, job).closed
        asked = ["--endpoints", etcd.get_endpoint(), "-o", "json"]
        assert cli.main(["history", job.run_id, *asked]) == 0
        events = json.loads(capsys.readouterr().out)["events"]
        failed = [event["worker"] for event in events if event["kind"] == "failed"]
        assert len(failed) == 2, events
        assert [(one["pid"], one["rank"], one["exit_code"]) for one in failed[:1]] == [(failing.pid, 1, 1)]
        assert "Traceback" in failed[0]["traceback"]
        assert [event["kind"] for event in events][-1] == "closed"
        assert cli.main(["why", job.run_id, *asked]) == 1
        why = json.loads(capsys.readouterr().out)
        assert why["happened"].startswith("The run is over")
        assert why["first"]["worker"]["exception"] == "ValueError: no such sample: 17"
