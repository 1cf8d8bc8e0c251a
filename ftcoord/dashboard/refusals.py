"""How an order that is not done is answered, and whom it is from."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ftcoord.errors import EtcdError, OutcomeUnknown


def refusal(status: int, why: str) -> Response:
    """An answer that says why nothing was done."""
    return JSONResponse({"error": why}, status)


def status_of(error: Exception) -> int:
    """The status of HTTP for what an order raised."""
    if isinstance(error, ValueError):  # ConfigError too; no JSON
        return 400
    if isinstance(error, OutcomeUnknown):
        return 504
    return 503 if isinstance(error, EtcdError) else 409


def reason_of(error: Exception) -> str:
    """What happened to the order, for whoever gave it."""
    if isinstance(error, OutcomeUnknown):
        return f"etcd did not answer: it may have been done, or not: {error}"
    return f"etcd did not do it: {error}" if isinstance(error, EtcdError) else str(error)


def peer_of(request: Request) -> str:
    """The address of whoever sent it, whatever its headers say: anybody can write those. Empty if nobody knows."""
    return request.client.host if request.client else ""


def sender_of(request: Request) -> str:
    """The same for people."""
    return peer_of(request) or "an unknown address"
