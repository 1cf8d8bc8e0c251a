"""What an etcd that is started here is asked through its gRPC API. Loading this loads gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdError
from ftcoord.etcd.rpc import messages
from ftcoord.etcd.rpc.transport import Transport

CLOSE_TIMEOUT: Final = 2.0
"""Seconds to wait for gRPC's threads, which have no work left."""


def status(config: EtcdConfig) -> Any:
    """The StatusResponse of a member. Raises EtcdError."""
    with _connected(config) as etcd:
        return etcd.call(messages.STATUS, messages.message("StatusRequest")())


def set_login(config: EtcdConfig, wanted: bool) -> None:
    """Have etcd require the login of `config`, who may do everything; or, if it is not wanted, no login at all.

    Idempotent, so that it completes what an earlier start left half done. Raises EtcdError.
    """
    login = config.credentials
    assert login is not None
    with _connected(config) as etcd:
        if bool(etcd.token()) == wanted:
            return
        switch = messages.message("AuthSwitchRequest")()
        if not wanted:
            etcd.call(messages.AUTH_DISABLE, switch)
            return
        user = messages.message("AuthUserRequest")(name=login.user, password=login.password)
        try:
            etcd.call(messages.USER_ADD, user)
        except EtcdError:  # the user is there already, perhaps with another password
            etcd.call(messages.USER_CHANGE_PASSWORD, user)
        role = messages.message("AuthUserGrantRoleRequest")(user=login.user, role="root")
        etcd.call(messages.USER_GRANT_ROLE, role)
        etcd.call(messages.AUTH_ENABLE, switch)


@contextmanager
def _connected(config: EtcdConfig) -> Iterator[Transport]:
    transport = Transport(config)
    try:
        yield transport
    finally:
        transport.close()
        transport.join(CLOSE_TIMEOUT)
