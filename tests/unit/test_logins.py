"""When a client logs in, on a transport whose etcd is made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from virtual import Scheduler

from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdAuthError
from ftcoord.etcd import messages
from ftcoord.etcd.transport import LOGIN_PAUSE, Member, Transport


class Refusal(grpc.RpcError):
    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAUTHENTICATED

    def details(self) -> str:
        return self._details


class Guarded(Member):
    """An etcd with logins, which answers at once."""

    def __init__(self, *, refuses_logins: bool = False) -> None:
        self.name, self.alive_at = "etcd", 0.0
        self.refuses_logins = refuses_logins
        self.logins = 0
        self.tokens: list[str | None] = []
        """Those of renewals."""

    def unary(self, method: messages.Method) -> Any:
        return self._log_in if method is messages.AUTHENTICATE else self._answer(method)

    def _log_in(self, _request: Any, **_how: Any) -> Any:
        self.logins += 1
        if self.refuses_logins:
            raise Refusal("etcdserver: authentication failed, invalid user ID or password")
        return messages.message("AuthenticateResponse")(token=f"token {self.logins}")

    def _answer(self, method: messages.Method) -> Any:
        def answer(_request: Any, metadata: tuple[tuple[str, str], ...], **_how: Any) -> Any:
            token = dict(metadata).get("token")
            if method is messages.KEEP_ALIVE:
                self.tokens.append(token)
            if method is not messages.KEEP_ALIVE and token != f"token {self.logins}":
                raise Refusal("etcdserver: invalid auth token")
            return messages.message("LeaseKeepAliveResponse" if method is messages.KEEP_ALIVE else "RangeResponse")()

        return answer


def made() -> Transport:
    return Transport(EtcdConfig.load("127.0.0.1:1", env={}, user="somebody", password="secret"))


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = made()
    yield transport
    transport.close()


def serve(transport: Transport, etcd: Guarded, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    monkeypatch.setattr(transport, "member", lambda *_: etcd)
    return etcd


def renew(transport: Transport) -> None:
    transport.call(messages.KEEP_ALIVE, messages.message("LeaseKeepAliveRequest")(id=1))


def read(transport: Transport) -> None:
    transport.call(messages.RANGE, messages.message("RangeRequest")(key=b"/key"))


def test_a_lease_is_renewed_though_the_login_is_refused(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = serve(transport, Guarded(), monkeypatch)
    read(transport)
    renew(transport)
    etcd.refuses_logins = True
    transport.forget_token("token 1")
    with pytest.raises(EtcdAuthError):
        read(transport)
    renew(transport)
    assert etcd.tokens == ["token 1", None]


def test_a_login_that_is_refused_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls comes back four times a second."""
    scheduler = Scheduler(1)

    def play() -> None:
        transport = made()
        etcd = serve(transport, Guarded(refuses_logins=True), monkeypatch)
        told = set()
        for _ in range(4 * 100):
            with pytest.raises(EtcdAuthError, match="authentication failed") as caught:
                transport.token()
            told.add(str(caught.value))
            scheduler.sleep(0.25)
        assert len(told) == 1  # whoever logs each problem once does so
        assert 10 <= etcd.logins <= 20
        etcd.refuses_logins = False
        scheduler.sleep(LOGIN_PAUSE)
        assert transport.token() == f"token {etcd.logins}"
        transport.close()

    scheduler.run(play)
