"""What a failed call means: maps the status codes and texts of etcd and gRPC to ftcoord's exceptions.

The one rule: a write is reported as without effect (`EtcdUnavailable`) only if that is provable, because the request
never left this process or because etcd says that it refused it before proposing it. Any other failure of a write is
`OutcomeUnknown`. (Compare `isSafeRetryMutableRPC` in etcd's clientv3.)

`EtcdNoSpace` promises nothing: etcd returns it both when it admits a write and after it has applied one
(`quotaApplierV3`).
"""

from __future__ import annotations

from typing import NamedTuple

from ftcoord.errors import (
    EtcdAuthError,
    EtcdError,
    EtcdNoSpace,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
)

_NEVER_LEFT = ("failed to connect to all addresses", "DNS resolution failed", "Name resolution failed")
_NOT_PROPOSED = ("etcdserver: no leader", "etcdserver: too many requests", "etcdserver: rpc not supported for learner")
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
    if _says(details, _NEVER_LEFT) or _says(details, _NOT_PROPOSED):
        return EtcdUnavailable(f"{fate}; is etcd running there, and do the endpoints and the TLS settings fit it?")
    return _explained(details, fate) or _by_code(code, fate, write)


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
