"""What a failed call means: maps the status codes and texts of etcd and gRPC to ftcoord's exceptions.

The one rule: a write is reported as without effect (`EtcdUnavailable`) only if that is provable, because the request
never left this process or because etcd says that it refused it before proposing it. Any other failure of a write is
`OutcomeUnknown`. (Compare `isSafeRetryMutableRPC` in etcd's clientv3.)

`EtcdNoSpace` promises nothing: etcd returns it both when it admits a write and after it has applied one
(`quotaApplierV3`).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ftcoord.errors import (
    NO_ETCD,
    EtcdAuthError,
    EtcdError,
    EtcdNoSpace,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
    WrongEndpoint,
)

_NEVER_LEFT = ("failed to connect to all addresses", "DNS resolution failed", "Name resolution failed")
_NOT_PROPOSED = ("etcdserver: no leader", "etcdserver: too many requests", "etcdserver: rpc not supported for learner")
_SETTINGS: Final = "--rdzv-endpoint, --endpoints or FTCOORD_ENDPOINTS"
_UNFIT: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("certificate has expired",), "its certificate has expired: give etcd a new one"),
    (("CERTIFICATE_VERIFY_FAILED",), "its certificate is not trusted: set FTCOORD_CA_CERT to that of its CA"),
    (
        ("Hostname Verification Check failed",),
        "its certificate is for another host: name it as the certificate does, or set FTCOORD_SERVER_NAME",
    ),
    (
        ("ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA"),
        "it wants a client certificate that it trusts: set FTCOORD_CERT and FTCOORD_KEY",
    ),
    (
        ("WRONG_VERSION_NUMBER", "Handshake read failed (Socket closed", "Handshake read failed (recvmsg"),
        "it does not answer in TLS: write http://, and leave out the TLS settings",
    ),
    (("Failed parsing HTTP/2",), f"something else than etcd answers there: correct {_SETTINGS}"),
    (
        ("Socket closed", "reset by peer"),
        f"it closes the connection: write https:// if it wants TLS, or correct {_SETTINGS}",
    ),
)
"""Texts of gRPC for a connection that fails whenever it is tried, and what each means."""
_CONNECT_ERROR = re.compile(r"Failed to connect to remote host: (.*)|(timed out|Endpoint closing)", re.DOTALL)
_STALE_TOKEN = ("invalid auth token", "revision in token is older", "user name is empty")
_LEASE_GONE = "requested lease not found"
_NO_SPACE = "database space exceeded"
_AUTH = (
    "authentication failed",
    "permission denied",
    "user name is empty",
    "user not found",
    "no password",
    "role not found",
)

_UNANSWERED_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN", "ABORTED")
_REFUSED_CODES = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE")


class CallFailure(NamedTuple):
    """How a call failed: the name of its gRPC status code (https://grpc.io/docs/guides/status-codes/), and its text."""

    code: str
    details: str


def _says(details: str, texts: tuple[str, ...]) -> bool:
    return any(text in details for text in texts)


def is_stale_token(details: str) -> bool:
    """Whether a login token expired, was forgotten by a restarted server, or is missing because authentication was
    enabled after the last login. A client with a user logs in again and repeats the call."""
    return _says(details, _STALE_TOKEN)


def blames_member(failure: CallFailure) -> bool:
    """Whether another member may do better."""
    return failure.code in _UNANSWERED_CODES or _says(failure.details, _NOT_PROPOSED)


def translate(failure: CallFailure, *, write: bool, where: str) -> EtcdError:
    """The exception for a failed call of the member `where`."""
    code, details = failure
    fate = f"etcd at {where}: {details or code} ({code})"
    if _says(details, _NEVER_LEFT):
        return _not_connected(details, where)
    if _says(details, _NOT_PROPOSED):
        return EtcdUnavailable(fate)
    return _explained(details, fate) or _by_code(code, fate, write)


def _not_connected(details: str, where: str) -> EtcdUnavailable:
    for texts, meaning in _UNFIT:
        if _says(details, texts):
            return WrongEndpoint(f"{NO_ETCD} {where}: {meaning}")
    found = _CONNECT_ERROR.search(details)
    if found is None:
        return EtcdUnavailable(f"{NO_ETCD} {where}: {details}; correct {_SETTINGS}, or the TLS settings")
    problem = found[1].lower() if found[1] else "the connection is not answered"
    return EtcdUnavailable(f"{NO_ETCD} {where}: {problem}. Start one (ftcoord server), or set {_SETTINGS}")


def _explained(details: str, fate: str) -> EtcdError | None:
    if _LEASE_GONE in details:
        return LeaseLost(f"{fate}; it expired or was revoked: take a new one")
    if _NO_SPACE in details:
        return EtcdNoSpace(
            f"{fate}: NOSPACE; make room with `etcdctl compact REVISION` and `etcdctl defrag`, then"
            " `etcdctl alarm disarm`; a write may have happened all the same: re-read before repeating it"
        )
    if _says(details, _AUTH):
        return EtcdAuthError(
            f"{fate}; check FTCOORD_USER and FTCOORD_PASSWORD, and that the user's role may use the key prefix"
        )
    return None


def _by_code(code: str, fate: str, write: bool) -> EtcdError:
    if code in _UNANSWERED_CODES:
        return OutcomeUnknown(f"{fate}; the write may have happened") if write else EtcdUnavailable(fate)
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return EtcdAuthError(f"{fate}; check FTCOORD_USER, FTCOORD_PASSWORD and the client certificate")
    if code in _REFUSED_CODES:
        return RequestRefused(f"{fate}; etcd takes at most 128 operations and 1.5 MiB a request")
    return EtcdError(fate)
