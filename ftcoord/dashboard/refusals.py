"""The answers to orders that are not carried out, and the senders of orders."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ftcoord.errors import EtcdError, OutcomeUnknown


def refusal(status: int, why: str) -> Response:
    """An answer that gives the reason why nothing was done."""
    return JSONResponse({"error": why}, status)


def status_of(error: Exception) -> int:
    """The HTTP status for an order's error."""
    if isinstance(error, ValueError):  # ConfigError too; no JSON
        return 400
    if isinstance(error, OutcomeUnknown):
        return 504
    return 503 if isinstance(error, EtcdError) else 409


def reason_of(error: Exception) -> str:
    """What happened to the order, for its sender."""
    if isinstance(error, OutcomeUnknown):
        return f"etcd did not answer: it may have been done, or not: {error}"
    return f"etcd did not do it: {error}" if isinstance(error, EtcdError) else str(error)


def peer_of(request: Request) -> str:
    """The sender's address, regardless of its headers, which anybody can write. Empty if it is unknown."""
    return request.client.host if request.client else ""


def sender_of(request: Request) -> str:
    """The same for people."""
    return peer_of(request) or "an unknown address"
