"""The client without gRPC, with members that answer as a test says, in virtual time."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest

from ftcoord.config import Endpoint, EtcdConfig, Tls
from ftcoord.etcd.rpc import lean, messages
from ftcoord.etcd.rpc.errors import CallFailure
from ftcoord.etcd.rpc.lean import LeanClient
from ftcoord.testing import Scheduler

Answer = CallFailure | bytes
LEASE = 7
NO_LEADER = CallFailure("UNAVAILABLE", "etcdserver: no leader")


def answer(name: str, **fields: object) -> bytes:
    return bytes(messages.message(name)(**fields).SerializeToString())


class Members:
    """Stand in for the connections to all members, by their ports."""

    def __init__(self) -> None:
        self.answers: dict[tuple[int, str], Callable[[str], Answer]] = {}
        self.asked: list[tuple[int, str, str]] = []

    def say(self, port: int, method: messages.Method, *, to: Callable[[str], Answer]) -> None:
        """What one answers to this token."""
        self.answers[port, method.path] = to

    def connect(self, _dialer: object, where: Endpoint, _tls: object, _deadline: float) -> Connected:
        return Connected(self, where.port)


class Connected:
    def __init__(self, members: Members, port: int) -> None:
        self._members, self._port = members, port

    def exchange(self, path: str, _body: bytes, token: str, _deadline: float) -> tuple[CallFailure | None, bytes]:
        self._members.asked.append((self._port, path.rpartition("/")[2], token))
        found = self._members.answers[self._port, path](token)
        return (None, found) if isinstance(found, bytes) else (found, b"")

    def close(self) -> None:
        pass


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Members:
    """Two, that let anybody log in and grant leases."""
    made = Members()
    monkeypatch.setattr(lean, "_Connection", made.connect)
    for port in (1, 2):
        made.say(port, messages.AUTHENTICATE, to=lambda _: answer("AuthenticateResponse", token="t"))
        made.say(port, messages.GRANT, to=lambda _: answer("LeaseGrantResponse", id=LEASE, ttl=10))
    return made


def logging_in() -> LeanClient:
    return LeanClient(EtcdConfig.load("127.0.0.1:1,127.0.0.1:2", env={}, user="root", password="secret"))


def virtually(scenario: Callable[[], None]) -> None:
    Scheduler(0).run(scenario)


@pytest.mark.parametrize("text", ["etcdserver: no leader", "etcdserver: rpc not supported for learner"])
def test_a_member_that_cannot_log_anybody_in_is_left_for_another(members: Members, text: str) -> None:
    def play() -> None:
        members.say(1, messages.AUTHENTICATE, to=lambda _: CallFailure("UNAVAILABLE", text))
        assert logging_in().grant(10).id == LEASE
        assert members.asked == [(1, "Authenticate", ""), (2, "Authenticate", ""), (2, "LeaseGrant", "t")]

    virtually(play)


def test_authentication_that_is_switched_on_later(members: Members) -> None:
    """What was found while it was off is no login."""
    off = CallFailure("FAILED_PRECONDITION", "etcdserver: authentication is not enabled")
    refused = CallFailure("INVALID_ARGUMENT", "etcdserver: user name is empty")
    granted = answer("LeaseGrantResponse", id=LEASE, ttl=10)

    def play() -> None:
        client = logging_in()
        members.say(1, messages.AUTHENTICATE, to=lambda _: off)
        assert client.grant(10).id == LEASE
        members.say(1, messages.AUTHENTICATE, to=lambda _: answer("AuthenticateResponse", token="t"))
        members.say(1, messages.GRANT, to=lambda token: granted if token == "t" else refused)
        assert client.grant(10).id == LEASE

    virtually(play)


@pytest.mark.parametrize("method", [messages.AUTHENTICATE, messages.GRANT])
def test_a_member_that_answers_garbage_is_left_for_another(members: Members, method: messages.Method) -> None:
    def play() -> None:
        members.say(1, method, to=lambda _: b"\xff")
        assert logging_in().grant(10).id == LEASE
        assert members.asked[-1] == (2, "LeaseGrant", "t")

    virtually(play)


def test_an_unknown_reason_to_end_a_call_has_its_number() -> None:
    assert lean._name_of(8) == "CANCEL"
    assert lean._name_of(0xBAD) == "error 2989"


def test_nobody_logs_in_to_renew_a_lease_unless_etcd_wants_that(members: Members) -> None:
    """A login takes etcd a tenth of a second of a processor, and each process has a sentinel."""
    renewed = answer("LeaseKeepAliveResponse", id=LEASE, ttl=10)
    refused = CallFailure("INVALID_ARGUMENT", "etcdserver: user name is empty")

    def play() -> None:
        client = logging_in()
        members.say(1, messages.KEEP_ALIVE, to=lambda _: renewed)
        assert client.renew(LEASE) == 10
        assert members.asked == [(1, "LeaseKeepAlive", "")]
        members.say(1, messages.KEEP_ALIVE, to=lambda token: renewed if token == "t" else refused)
        assert client.renew(LEASE) == 10
        assert members.asked[-2:] == [(1, "Authenticate", ""), (1, "LeaseKeepAlive", "t")]

    virtually(play)


def test_an_authority_that_grpc_accepts_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a Python that asks for more by itself."""
    create = ssl.create_default_context

    def as_from_3_13_on(cafile: str | None = None) -> ssl.SSLContext:
        context = create(cafile=cafile)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_from_3_13_on)
    context = lean.tls_context(Tls(None, None, None, None))
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
