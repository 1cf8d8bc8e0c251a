"""The gateway, and torchft 0.2.0's native classes behind it."""

from __future__ import annotations

import contextlib
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import portless
import pytest
from helpers import DEADLINE, eventually
from natives import Natives

from benchmarks.metrics import Load
from ftcoord import EtcdServer, cli
from ftcoord.config import EtcdConfig
from ftcoord.coordination import Gateway, LighthouseClient, gateway as gateways
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.gateway import CUT_OFF, QUIET_FOR
from ftcoord.core.quorum_records import parse_replica
from ftcoord.errors import ConfigError, ServerError
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.quiet_grpc import grpc

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14) or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="torchft 0.2.0 has wheels for Linux on x86_64 and Python up to 3.13 only; see setup.cfg",
)

LIMIT = timedelta(seconds=DEADLINE)


@pytest.fixture(autouse=True)
def by_key() -> Iterator[None]:
    """Replicas ask through etcd, where a test sees what they ask; tests/contract/test_ask_port.py has the other way."""
    with portless.portless():
        yield


@pytest.fixture
def job(etcd: EtcdServer) -> str:
    """The address of a job of this test's own, for two replicas."""
    return job_of(etcd)


def job_of(etcd: EtcdServer, **options: int) -> str:
    query = "&".join(f"{name}={value}" for name, value in {"min_replicas": 2, **options}.items())
    return f"etcd://{etcd.get_endpoint()}/{uuid.uuid4().hex}?{query}"


@pytest.fixture
def gateway(job: str) -> Iterator[Gateway]:
    with Gateway(job) as gateway:
        yield gateway


def members(job: str) -> int:
    """How many members the job has in etcd."""
    return len(member_keys(job))


def member_keys(job: str) -> set[str]:
    """Of the members that the job has in etcd."""
    with EtcdClient(EtcdConfig.load(parse_address(job).endpoints)) as client:
        span = Span(f"{parse_address(job).prefix}/members/", is_prefix=True)
        return {kv.key for kv in client.range(Get(span, keys_only=True)).kvs}


def asked(job: str) -> int:
    """How many times the members asked for a quorum, those left out that took it back."""
    return sum(askers(job).values())


def askers(job: str) -> dict[str, int]:
    """The keys of the members that ask, or were answered, and how many times each asked."""
    with EtcdClient(EtcdConfig.load(parse_address(job).endpoints)) as client:
        kvs = client.range(Get(Span(f"{parse_address(job).prefix}/members/", is_prefix=True))).kvs
    found = {kv.key: parse_replica(kv.key, kv.value).asked for kv in kvs}
    return {key: times for key, times in found.items() if times}


class Process:
    """`ftcoord gateway` in a process of its own."""

    def __init__(self, job: str, port: int = 0) -> None:
        self.job = job
        command = [sys.executable, portless.__file__, "gateway", "--etcd", job, "--listen", f"127.0.0.1:{port}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.fullmatch(r"gateway serves on (http://127\.0\.0\.1:(\d+)); Ctrl-C ends it\n", line)
        assert found is not None, line
        self.address, self.port = found[1], int(found[2])

    def error_line(self) -> str:
        """The next line on standard error."""
        assert self._process.stderr is not None
        return self._process.stderr.readline()

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; the exit code, and what was written to standard error."""
        self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=DEADLINE)
        return self._process.returncode, errors


@contextlib.contextmanager
def process(job: str, port: int = 0) -> Iterator[Process]:
    gateway = Process(job, port)
    try:
        yield gateway
    finally:
        gateway.end(signal.SIGKILL)


def test_two_native_groups_form_a_quorum(natives: Natives, gateway: Gateway) -> None:
    natives.manage(gateway.address(), "a", "b", world_size=2)
    calls = [natives.do("quorum", name=name, rank=rank) for rank in range(2) for name in "ab"]
    a0, b0, a1, b1 = (one.result(DEADLINE) for one in calls)
    assert {one["quorum_id"] for one in (a0, b0, a1, b1)} == {1}
    assert a0["replica_ids"] == ["a", "b"]
    assert (a0["replica_rank"], b0["replica_rank"], b0["replica_world_size"]) == (0, 1, 2)
    assert (a0["heal"], b0["heal"], a1["heal"], b1["heal"]) == (False, True, True, False)
    assert (a0["store_address"], b0["store_address"]) == ("store-of-a", "store-of-a")
    address = b0["recover_src_manager_address"]
    assert natives.do("metadata", address=address, rank=0).result(DEADLINE) == "weights of a"


def test_a_request_that_is_too_large_is_refused_to_its_sender(natives: Natives, gateway: Gateway, job: str) -> None:
    call = natives.do(
        "client_quorum", lighthouse=gateway.address(), name="x", timeout=DEADLINE, data={"text": "x" * 65536}
    )
    with pytest.raises(RuntimeError, match=r"InvalidArgument.*the limit is 65536"):
        call.result(DEADLINE)
    with (
        contextlib.closing(LighthouseClient(job, LIMIT)) as client,
        pytest.raises(RuntimeError, match=r"InvalidArgument.*the limit is 65536"),
    ):
        client.quorum("x", LIMIT, data={"text": "x" * 65536})
    assert asked(job) == 0


def test_a_caller_that_is_killed_does_not_ask_any_more(natives: Natives, gateway: Gateway, job: str) -> None:
    natives.do("client_quorum", lighthouse=gateway.address(), name="x", timeout=1000)
    eventually(lambda: asked(job) == 1, "it asks")
    natives.kill()
    eventually(lambda: not asked(job), "the request is taken back, long before its time is over")


def test_one_that_beats_is_waited_for_until_it_is_silent(natives: Natives, etcd: EtcdServer) -> None:
    job = job_of(etcd, min_replicas=1, heartbeat_timeout_ms=4000)
    with Gateway(job) as gateway:
        last_beat = time.monotonic()
        natives.do("beat", lighthouse=gateway.address(), name="silent").result(DEADLINE)
        told = natives.do("client_quorum", lighthouse=gateway.address(), name="x", timeout=DEADLINE).result(DEADLINE)
        assert time.monotonic() - last_beat > 3.9
        assert [one["replica_id"] for one in told["members"]] == ["x"]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::]:0", "[::1]:0"])
def test_a_native_replica_that_is_killed_is_out_at_once(
    natives: Natives,
    etcd: EtcdServer,
    listen: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Long before its heartbeat times out; it died, and did not leave; and nobody else is taken for dead."""
    job = job_of(etcd, heartbeat_timeout_ms=int(DEADLINE * 1000))
    with Gateway(job, listen) as gateway:
        address = re.sub("//.*:", "//localhost:" if listen != "[::1]:0" else "//[::1]:", gateway.address())
        natives.manage(address, "a", "b")
        with Natives() as mortal:
            mortal.manage(address, "d")
            eventually(lambda: members(job) == 3, "all have beaten: else the first two have a quorum of their own")
            others = [natives.do("quorum", name=name) for name in "ab"]
            mortal.ask("d")
            assert {one.result(DEADLINE)["replica_world_size"] for one in others} == {3}
            threading.Event().wait(3 * QUIET_FOR)  # who has beaten once may do so through a new connection each time
            mortal.kill()
        died_at = time.monotonic()
        assert natives.ask("a", "b", step=1)[0]["replica_world_size"] == 2
        assert time.monotonic() - died_at < DEADLINE / 2
        threading.Event().wait(10 * QUIET_FOR)
        assert members(job) == 2
    said = list[str]()
    for command in ("history", "why"):
        cli.main([command, parse_address(job).name, "--endpoints", etcd.get_endpoint()])
        said.append(capsys.readouterr().out)
    assert re.search(rf"died .*d(:\S+)?: {CUT_OFF}", " ".join(said[0].split()))
    assert "its manager was closed" not in "".join(said)
    assert any("counts as dead" in one.getMessage() and CUT_OFF in one.getMessage() for one in caplog.records)


def test_one_that_connects_for_each_beat_has_its_heartbeat_time_out(etcd: EtcdServer) -> None:
    """Nobody knows how often it beats."""
    job = job_of(etcd, min_replicas=1, heartbeat_timeout_ms=int(DEADLINE * 1000))
    with Gateway(job) as gateway:
        for _ in range(3):
            with Natives() as brief:
                brief.do("beat", lighthouse=gateway.address(), name="a").result(DEADLINE)
        before = member_keys(job)
        threading.Event().wait(5 * QUIET_FOR)
        assert member_keys(job) == before
        assert len(before) == 1


def test_a_gateway_is_killed_and_another_takes_its_port(natives: Natives, job: str) -> None:
    with process(job) as first:
        natives.manage(first.address, "a", "b", retries=20)
        assert natives.ask("a", "b")[0]["quorum_id"] == 1
        waiting = natives.do("quorum", name="a", step=1)
        eventually(lambda: asked(job) == 3, "a asks")
        before = askers(job).keys()
        first.end(signal.SIGKILL)
        with process(job, first.port):
            # Else b may meet the member that a was, which asks until its lease ends.
            eventually(lambda: askers(job).keys() - before, "a asks again")
            (b,) = natives.ask("b", step=1)
            a = waiting.result(DEADLINE)
            assert (a["replica_world_size"], b["replica_world_size"]) == (2, 2)
            assert a["quorum_id"] == b["quorum_id"] >= 1
            after = natives.ask("a", "b", step=2, failures=1)
            assert after[0]["quorum_id"] == after[1]["quorum_id"] == a["quorum_id"] + 1


@pytest.mark.parametrize("retries", [0, 20])
def test_nobody_hangs_when_one_of_two_gateways_is_killed(natives: Natives, job: str, retries: int) -> None:
    """Not even a native manager without retries, for longer than the time-out of its call."""
    with process(job) as first, process(job) as second:
        natives.manage(first.address, "a", retries=retries)
        natives.manage(second.address, "b", retries=retries)
        assert natives.ask("a", "b")[0]["quorum_id"] == 1
        waiting = natives.do("quorum", name="a", step=1, timeout=3.0 if retries == 0 else 60.0)
        raw = natives.do("client_quorum", lighthouse=first.address, name="a", timeout=60.0)
        eventually(lambda: asked(job) >= 4, "a asks, through two connections")
        first.end(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="transport error"):  # long before its time is over
            raw.result(DEADLINE / 2)
        before = member_keys(job)
        with process(job, first.port):
            eventually(lambda: member_keys(job) - before, "a beats again, so what it asked before does not count")
            other = natives.do("quorum", name="b", step=1)
            if retries == 0:
                with pytest.raises(TimeoutError):
                    waiting.result(DEADLINE)
                waiting = natives.do("quorum", name="a", step=1)
            a, b = waiting.result(DEADLINE), other.result(DEADLINE)
            assert a["replica_ids"] == b["replica_ids"] == ["a", "b"]
            assert a["quorum_id"] == b["quorum_id"]


def test_heartbeats_write_nothing(natives: Natives, fragile: EtcdServer) -> None:
    names = ("a", "b", "c", "d")
    with Gateway(job_of(fragile, min_replicas=4)) as gateway:
        natives.manage(gateway.address(), *names)
        assert natives.ask(*names)[0]["replica_world_size"] == 4
        before = eventually(lambda: quiet(fragile), "all have joined")
        threading.Event().wait(6)
        load = Load.read(fragile.get_endpoint()).since(before)
        assert load.writes == 0
        assert 4 <= load.requests["LeaseKeepAlive"] <= 4 * 6  # and some 240 beats
        assert set(load.requests) <= {"LeaseKeepAlive", "Watch", "Range"}
        assert load.requests.get("Range", 0) < len(names), "once, each but the oldest reads the key of the member ahead"
        assert natives.ask(*names, step=1)[0]["quorum_id"] == 1


def quiet(etcd: EtcdServer) -> Load | None:
    """etcd's counters, if nothing is written for half a second."""
    before = Load.read(etcd.get_endpoint())
    threading.Event().wait(0.5)
    after = Load.read(etcd.get_endpoint())
    return None if after.since(before).writes else after


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(natives: Natives, job: str, number: int) -> None:
    with process(job) as gateway:
        natives.manage(gateway.address, "a", "b")
        natives.ask("a", "b")
        waiting: Future[Any] = natives.do("quorum", name="a", step=1, timeout=10)
        eventually(lambda: asked(job) == 3 or waiting.done(), "a asks")
        began = time.monotonic()
        code, errors = gateway.end(number)
        assert code == 0
        assert re.fullmatch(r"(etcd \S+ has known .*\n)?", errors)
        assert time.monotonic() - began < DEADLINE
    with pytest.raises(TimeoutError):
        waiting.result(DEADLINE)


def test_a_taken_port_and_a_bad_address_are_refused(gateway: Gateway, job: str) -> None:
    taken = gateway.address().removeprefix("http://")
    with pytest.raises(ServerError, match=re.escape(taken)):
        Gateway(job, taken)
    for address, listen in ((job, "29510"), (job, "host:port"), ("http://x", "127.0.0.1:0")):
        with pytest.raises(ConfigError):
            Gateway(address, listen)


@pytest.mark.parametrize("body", [b"", b"\xff", b"\x0a\x05\x3a\x03{x}"])
def test_what_is_no_request_is_refused(gateway: Gateway, body: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    call = raw_call(gateway, "Quorum")
    with pytest.raises(grpc.RpcError) as raised:
        call(body, timeout=DEADLINE)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert capfd.readouterr() == ("", "")


def test_one_address_takes_only_a_share_of_a_gateway(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "MOST_IDS", 4)
    monkeypatch.setattr(gateways, "MOST_WAITING", 2)
    with Gateway(job) as gateway:
        beat, call = raw_call(gateway, "Heartbeat"), raw_call(gateway, "Quorum")
        for name in "xyx":
            beat(text(1, name), timeout=DEADLINE)
        with pytest.raises(grpc.RpcError, match="at most 2 replicas of one address"):
            beat(text(1, "z"), timeout=DEADLINE)
        first = call.future(text(1, text(1, "x")), timeout=DEADLINE)
        eventually(lambda: asked(job) == 1, "it waits")
        with pytest.raises(grpc.RpcError, match="at most 1 quorum calls that wait of one address"):
            call(text(1, text(1, "y")), timeout=DEADLINE)
        first.cancel()
        # The request leaves etcd a moment before the call gives its place back.
        calls = [call.future(text(1, text(1, "y")), timeout=DEADLINE)]

        def waits() -> bool:
            if calls[-1].done():
                calls.append(call.future(text(1, text(1, "y")), timeout=DEADLINE))
            return asked(job) == 1 and not calls[-1].done()

        eventually(waits, "there is room again")
        calls[-1].cancel()


def raw_call(gateway: Gateway, method: str) -> Callable[..., bytes]:
    """A call of bytes, for what torchft's native client does not send."""
    channel = grpc.insecure_channel(gateway.address().removeprefix("http://"))
    return channel.unary_unary(f"/torchft.LighthouseService/{method}")


def text(number: int, content: str | bytes) -> bytes:
    """A field of a protobuf message."""
    raw = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2, len(raw)]) + raw
