"""EtcdClient against real etcd: what it asks, what it does when etcd fails, and what it never does twice."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from cutting import Cutter
from helpers import DEADLINE, eventually, in_fork, python

from ftcoord.config import EtcdConfig
from ftcoord.embedded import server as server_module
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdUnavailable, ForkedProcessError, OutcomeUnknown
from ftcoord.etcd import api, client as client_module
from ftcoord.etcd.client import EtcdClient


def connect(endpoints: str, **settings: Any) -> EtcdClient:
    return EtcdClient(EtcdConfig.load(endpoints, env={}, **settings))


# -- what it asks ---------------------------------------------------------------------------------------------------


def test_an_old_etcd_is_warned_of_unless_ftcoord_started_it(
    client: EtcdClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_warned_of", set())
    monkeypatch.setattr(api, "FLOORS", dict.fromkeys(itertools.product(range(3, 5), range(20)), (99,)))
    caplog.set_level(logging.WARNING, "ftcoord")
    status = client.status()
    assert status.leader_id == status.member_id
    assert not caplog.records
    monkeypatch.setattr(server_module, "EMBEDDED_NAMES", "")  # the next one is named as a user's is
    with EtcdServer() as server, server.get_client() as users:
        for _ in range(2):
            users.status(timeout=DEADLINE)
    (warning,) = caplog.records
    assert "use 99 or newer for real training runs" in warning.getMessage()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_names_and_addresses(host: str) -> None:
    with EtcdServer(host=host) as server:
        endpoint = f"[::1]:{server.get_port()}" if host == "::1" else f"{host}:{server.get_port()}"
        with connect(f"http://{endpoint}") as client:
            assert client.put("/key", b"").succeeded


def test_proxies_for_the_web_are_not_asked(etcd: EtcdServer) -> None:
    """A company's proxy refuses etcd's traffic, or reads it. gRPC reads these variables when a channel is made."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # who connects there gets no answer
        there = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        env = {"http_proxy": there, "https_proxy": there, "grpc_proxy": there, "FTCOORD_ENDPOINTS": etcd.get_endpoint()}
        code = "import ftcoord; print(ftcoord.EtcdClient().put('/proxied', b'').succeeded)"
        with python("-c", code, env=env) as process:
            assert process.communicate(timeout=DEADLINE)[0].split() == ["True"]


def test_an_address_of_a_name_that_hangs_costs_nothing_once_it_is_known(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and does not answer, as a stopped etcd does; the name has another address."""
    with socket.create_server(("127.0.0.2", etcd.get_port())):
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, etcd.get_port())) for host in ("127.0.0.2", "127.0.0.1")
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with connect(f"etcd.example:{etcd.get_port()}") as client:
            assert client.get("/key", timeout=DEADLINE).revision
            began = time.monotonic()
            for _ in range(20):
                client.put("/key", b"")
            assert time.monotonic() - began < DEADLINE / 4


def test_a_name_that_is_moved_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that does not resolve is named."""
    where: list[str] = []

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        if not where:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (where[0], port))]

    with EtcdServer(host="127.0.0.1") as server:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        with connect(f"etcd.example:{server.get_port()}") as client:
            with pytest.raises(EtcdUnavailable, match=r"^no etcd at etcd\.example:\d+: the name does not resolve: "):
                client.get("/key", timeout=0.5)
            where[:] = ["127.0.0.3"]  # nobody listens there
            with pytest.raises(EtcdUnavailable):
                client.get("/key", timeout=0.5)
            where[:] = ["127.0.0.1"]
            assert client.get("/key", timeout=DEADLINE).revision


# -- what it does when etcd fails -----------------------------------------------------------------------------------


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + 10  # the machine may be slow


def test_a_server_that_hangs_costs_no_more_than_the_timeout(fragile: EtcdServer) -> None:
    with fragile.get_client() as client, fragile.get_client() as fresh:
        lease = client.grant(60)
        fragile.pause()
        for reading in (
            lambda: client.get("/key", timeout=0.5),
            lambda: client.range(api.Get(api.Span("/key", is_prefix=True)), timeout=0.5),
            lambda: client.grant(60, timeout=0.5),
            lambda: client.renew(lease.id, timeout=0.5),
            lambda: client.status(timeout=0.5),
            lambda: fresh.get("/key", timeout=0.5),
        ):
            with at_most(0.5), pytest.raises(EtcdUnavailable):
                reading()
        with at_most(0.5), pytest.raises(OutcomeUnknown):
            client.put("/key", b"1", timeout=0.5)
        with at_most(0.5), pytest.raises((OutcomeUnknown, EtcdUnavailable)):
            fresh.put("/key", b"2", timeout=0.5)
        fragile.resume()
        assert client.put("/key", b"3", timeout=DEADLINE).succeeded


def test_a_connection_that_is_half_dead_is_replaced_though_there_is_one_endpoint(etcd: EtcdServer) -> None:
    """gRPC itself would keep it for 10 s."""
    with Cutter(etcd.get_port()) as line, connect(f"127.0.0.1:{line.port}") as client:
        assert client.get("/key").revision
        line.freeze()
        began = time.monotonic()
        with pytest.raises(EtcdUnavailable):
            client.get("/key", timeout=1.5)
        assert client.get("/key", timeout=DEADLINE).revision
        assert time.monotonic() - began < 8
        assert line.taken == 2


def test_a_refused_write_never_left_and_is_sent_when_etcd_comes(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        fragile.kill()
        began = time.monotonic()
        with at_most(1), pytest.raises(EtcdUnavailable, match="connection refused"):
            client.put("/key", b"1", timeout=1)
        assert time.monotonic() - began > 0.8, "it did not try until the deadline"
        back = threading.Timer(0.5, fragile.restart)
        back.start()
        written = client.put("/key", b"1", timeout=DEADLINE)
        back.join()
        stored = client.get("/key").one
        assert stored is not None
        assert (stored.version, stored.mod_revision) == (1, written.revision)


@pytest.fixture
def unfriendly() -> Iterator[tuple[EtcdClient, list[str], dict[str, Callable[[Any], Any]]]]:
    """A server that does as it is told: a client of it, the calls that it got, and its answers by method."""
    calls: list[str] = []
    answers: dict[str, Callable[[Any], Any]] = {}

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
                calls.append(details.method.rpartition("/")[2])
                return bytes(answers[calls[-1]](context))

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with connect(f"127.0.0.1:{port}") as client:
        yield client, calls, answers
    server.stop(0)


def aborting(code: grpc.StatusCode, details: str) -> Callable[[grpc.ServicerContext], bytes]:
    def abort(context: grpc.ServicerContext) -> bytes:
        context.abort(code, details)
        raise AssertionError

    return abort


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out"),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed"),
        (grpc.StatusCode.UNAVAILABLE, "transport is closing"),
        (grpc.StatusCode.UNKNOWN, "context canceled"),
        (grpc.StatusCode.INTERNAL, "stream terminated by RST_STREAM"),
        (grpc.StatusCode.CANCELLED, "etcdserver: server stopped"),
    ],
)
def test_a_write_that_may_have_happened_is_not_sent_again(unfriendly: Any, code: Any, details: str) -> None:
    client, calls, answers = unfriendly
    answers["Txn"] = aborting(code, details)
    with pytest.raises(OutcomeUnknown, match=details):
        client.put("/key", b"")
    assert calls == ["Txn"]


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests"),
    ],
)
def test_a_write_that_etcd_did_not_propose_is_sent_again(unfriendly: Any, code: Any, details: str) -> None:
    client, calls, answers = unfriendly
    attempts = itertools.count(1)
    answers["Txn"] = lambda context: aborting(code, details)(context) if next(attempts) < 3 else b"\x10\x01"
    assert client.put("/key", b"", timeout=DEADLINE).succeeded
    assert calls == ["Txn"] * 3
    answers["Txn"] = aborting(code, details)

    def known() -> bool:
        with pytest.raises((EtcdUnavailable, OutcomeUnknown)) as caught:  # unknown, if the last answer was late
            client.put("/key", b"", timeout=0.5)
        return isinstance(caught.value, EtcdUnavailable) and details in str(caught.value)

    eventually(known, "it is known that nothing was written")


# -- processes ------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_does_no_harm(client: EtcdClient, prefix: str) -> None:
    watch = client.watch(api.Span(prefix, is_prefix=True), 1, lambda item: None)
    lease = client.grant(60)
    client.put(prefix, b"", lease.id)
    refused = ForkedProcessError.__name__
    assert in_fork(lambda: client.get(prefix)) == refused
    assert in_fork(lambda: client.put(prefix, b"child")) == refused
    assert in_fork(lambda: client.renew(lease.id)) == refused
    assert in_fork(lambda: client.revoke(lease.id)) == refused
    assert in_fork(lambda: client.watch(api.Span(prefix), 1, lambda item: None)) == refused
    assert in_fork(lambda: (watch.cancel(), client.close())) == "(None, None)"
    stored = client.get(prefix).one
    assert stored is not None
    assert stored.value == b""
    assert client.put(prefix, b"parent").succeeded


def caught(kind: type[Exception], use: Callable[[], object]) -> Exception:
    with pytest.raises(kind) as error:
        use()
    return error.value


HANDLERS = """
import os, select, signal, sys
if sys.argv[2] == "grpc first":
    import grpc
    channel = grpc.insecure_channel("127.0.0.1:1")
import threading
from ftcoord.config import EtcdConfig
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import EtcdClient
clients = [EtcdClient(EtcdConfig.load(sys.argv[1], request_timeout=60)) for _ in range(2)]
done, called = threading.Event(), threading.Barrier(5)
def call():
    clients[0].range(Get(Span("/handlers")))
    called.wait()
    while not done.is_set():
        clients[0].range(Get(Span("/handlers")))
threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads:
    thread.start()
called.wait()
failed = 0
for _ in range(int(sys.argv[3])):
    if (child := os.fork()) == 0:
        os._exit(0)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], 10)[0]:  # it hangs in a handler of gRPC's
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    if os.waitpid(child, 0)[1] != 0:
        failed += 1
        break
done.set()
for thread in threads:
    thread.join()
for client in clients:
    client.close()
print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), failed)
"""
ASIDE = "fork() handlers"
"""What gRPC logs when its handlers run while somebody calls it."""
WARNED = "may miss changes in etcd"


def forks(etcd: EtcdServer, capfd: pytest.CaptureFixture[str], order: str, count: int, **env: str) -> tuple[str, str]:
    """What the variable is in the end, and what was said."""
    with python("-c", HANDLERS, etcd.get_endpoint(), order, str(count), env=env) as process:
        answer, _ = process.communicate(timeout=DEADLINE)
    said = capfd.readouterr().err
    assert process.returncode == 0, said
    setting, failed = answer.split()
    assert failed == "0" or ASIDE in said, "only with its handlers gRPC lets children crash or hang"
    return setting, said


def test_grpcs_fork_handlers_are_off_and_nobody_else_is_told_so(
    etcd: EtcdServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """With them the parent loses watch events: see forks.py."""
    answer, said = forks(etcd, capfd, "ftcoord first", 50, GRPC_VERBOSITY="INFO")
    assert answer == "None"
    assert not any(word in said for word in (ASIDE, WARNED)), said


def test_a_grpc_that_was_there_first_is_warned_of(etcd: EtcdServer, capfd: pytest.CaptureFixture[str]) -> None:
    _, said = forks(etcd, capfd, "grpc first", 10, GRPC_VERBOSITY="INFO")
    assert ASIDE in said, "this is how one sees that they are on"
    assert said.count("grpc was imported before ftcoord") == 1
    answer, said = forks(etcd, capfd, "grpc first", 50, GRPC_VERBOSITY="INFO", GRPC_ENABLE_FORK_SUPPORT="0")
    assert answer == "0"
    assert not any(word in said for word in (ASIDE, WARNED)), said


OUT_OF_REACH = """
import os, sys, time
from ftcoord.config import EtcdConfig, Tls
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient
assert "GRPC_VERBOSITY" not in os.environ
for endpoint in sys.argv[1:]:
    client = EtcdClient(EtcdConfig.load(endpoint, request_timeout=1))
    client.watch(Span("/key"), 1, lambda item: None)
    for use in (lambda: client.get("/key"), lambda: client.put("/key", b"")):
        try:
            use()
            raise SystemExit("there is an etcd")
        except (EtcdUnavailable, OutcomeUnknown):
            pass
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    client.close()
assert "GRPC_VERBOSITY" not in os.environ
"""


def test_nothing_is_printed_when_etcd_cannot_be_reached(fragile: EtcdServer, capfd: pytest.CaptureFixture[str]) -> None:
    port = fragile.get_port()
    fragile.kill()
    endpoints = [f"127.0.0.1:{port}", f"https://127.0.0.1:{port}", "http://no-such-host.invalid"]
    with python("-c", OUT_OF_REACH, *endpoints) as process:
        printed, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, printed, *capfd.readouterr()) == (0, "", "", "")


@pytest.mark.parametrize(
    ("scheme", "serves", "problem"),
    [
        ("http", False, "connection refused"),
        ("https", False, "connection refused"),
        ("https", True, "it does not answer in TLS: write http://"),
    ],
)
def test_an_error_comes_alone(
    fragile: EtcdServer, scheme: str, serves: bool, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line to act on, not behind the pages of gRPC's tracebacks, which go to the log for those who debug."""
    caplog.set_level(logging.DEBUG)
    if not serves:
        fragile.kill()
    with connect(f"{scheme}://{fragile.get_endpoint()}", request_timeout=1) as client:
        for use in (lambda: client.get("/key"), lambda: client.put("/key", b"")):
            error = caught(EtcdUnavailable, use)
            said = "".join(traceback.format_exception(error))
            assert said.count("Error") + said.count("Unavailable:") + said.count("WrongEndpoint:") == 1, said
            assert said.count("Traceback") == 1
            assert re.search(rf"no etcd at {fragile.get_endpoint()}( \(.*\))?: {problem}", said), said
    assert "_InactiveRpcError" in caplog.text


# -- closing --------------------------------------------------------------------------------------------------------


def stand_still(places: list[set[tuple[int, int]]]) -> bool:
    """Whether the threads that wait for an answer in gRPC are where they were when this was last asked."""
    waiting = {
        (thread, frame.f_lasti)
        for thread, frame in sys._current_frames().items()
        if frame.f_code.co_name == "_blocking" and frame.f_code.co_filename.endswith("_channel.py")
    }
    places.append(waiting)
    return places[-2] == waiting


def test_closing_ends_calls_under_way(fragile: EtcdServer) -> None:
    client = fragile.get_client()
    client.get("/key")
    fragile.pause()
    with futures.ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(client.get, "/key", timeout=DEADLINE),
            pool.submit(client.put, "/key", b"", timeout=DEADLINE),
            pool.submit(client.renew, 1, timeout=DEADLINE),
        ]
        places: list[set[tuple[int, int]]] = [set()]
        eventually(lambda: stand_still(places) and len(places[-1]) == len(calls), what="the calls are under way")
        with at_most(2):
            client.close()
            for call in calls:
                assert isinstance(call.exception(DEADLINE), (EtcdUnavailable, OutcomeUnknown))
    fragile.resume()


NEVER_CLOSED = """
import atexit, sys, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t is not threading.main_thread()]))
from ftcoord.config import EtcdConfig
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient
clients = [EtcdClient(EtcdConfig.load(sys.argv[1])) for _ in range(5)]
for client in clients:
    began = threading.Event()
    client.watch(Span("/key"), 0, lambda item: began.set())
    client.renew(client.grant(60).id)
    began.wait()
"""


def test_a_program_that_closes_nothing_ends_without_threads(etcd: EtcdServer) -> None:
    """Python would stop them where they are, with a lock that a finalizer of gRPC's takes: one exit in 100 hung."""
    with python("-c", NEVER_CLOSED, etcd.get_endpoint()) as process:
        answer, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, answer) == (0, "[]\n")
