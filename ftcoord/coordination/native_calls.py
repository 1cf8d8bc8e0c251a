"""Calls of torchft's own clients to our gRPC servers: how long they wait, and how they fail."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NoReturn

from ftcoord.coordination.failure import KNOWN, TIMED_OUT, Failure
from ftcoord.coordination.manager_wire import STATUS_CODES
from ftcoord.etcd.quiet_grpc import grpc

log = logging.getLogger(__name__)

EARLY_ANSWER: Final = 0.1
"""Seconds before a call's deadline at which we answer that it timed out. At the deadline gRPC does, with another
text."""
NO_TIMEOUT: Final = 10.0 * 365 * 24 * 3600
"""Seconds. gRPC reports about this much for a call without a timeout."""


def serve(
    server: grpc.Server, service: str, calls: Mapping[str, Callable[[bytes, grpc.ServicerContext], bytes]]
) -> None:
    """Register handlers for the calls of a service with a server that was not started yet. Each gets the call's
    bytes."""
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


@contextlib.contextmanager
def answering(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends a failed call with the status that torchft's own server would return."""
    try:
        yield
    except ValueError as error:
        abort(context, Failure("InvalidArgument", str(error)))
    except KNOWN as error:
        abort(context, Failure.of(error))


def abort(context: grpc.ServicerContext, failure: Failure) -> NoReturn:
    """End a call with this failure."""
    log.debug("a call ended: %s", failure.message)
    message = "Timeout expired" if failure.code in TIMED_OUT else failure.message
    context.abort(STATUS_CODES[failure.code], message)
    raise AssertionError("gRPC's abort raises")


def time_left(context: grpc.ServicerContext) -> float:
    """Seconds until the answer is due; infinite for a call without a timeout."""
    left = context.time_remaining()
    return math.inf if left is None or left > NO_TIMEOUT else max(left - min(left / 10, EARLY_ANSWER), 0)
