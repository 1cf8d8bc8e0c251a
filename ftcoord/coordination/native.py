"""torchft's own protocol between ranks and managers, by gRPC, for both ends: torchft's native classes use nothing else.

Field numbers are those of torchft 0.2.0; its nightly builds add fields.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from typing import Any, Final, NoReturn, cast

from google.protobuf.message import DecodeError

from ftcoord import concurrency, fork
from ftcoord.coordination.checks import KNOWN, RANK_NOT_FOUND, TIMED_OUT, TRANSPORT_ERROR, Failure
from ftcoord.coordination.ranks import MetadataQuery, RankCall, RankGroup, RankRequest, TimedVote
from ftcoord.coordination.types import QuorumResult
from ftcoord.core.manager_address import parted
from ftcoord.etcd.messages import declare
from ftcoord.etcd.quiet_grpc import grpc, quiet_grpc
from ftcoord.pool import DaemonPool

# -- the messages ------------------------------------------------------------------------------------------------------


MANAGER_SERVICE: Final = "torchft.ManagerService"

_MESSAGES: Final = declare(
    "ftcoord.torchft.manager",
    {
        "ManagerQuorumRequest": "group_rank 1 int64, step 2 int64, checkpoint_metadata 3 string, shrink_only 4 bool,"
        " init_sync 5 bool, commit_failures 6 int64",
        "ManagerQuorumResponse": "quorum_id 1 int64, recover_src_manager_address 2 string,"
        " recover_src_replica_rank 3 int64?src, recover_dst_replica_ranks 4 int64*, store_address 5 string,"
        " max_step 6 int64, max_replica_rank 7 int64?max, max_world_size 8 int64, replica_rank 9 int64,"
        " replica_world_size 10 int64, heal 11 bool, commit_failures 12 int64, replica_ids 13 string*",
        "CheckpointMetadataRequest": "rank 1 int64",
        "CheckpointMetadataResponse": "checkpoint_metadata 1 string",
        "ShouldCommitRequest": "should_commit 1 bool, group_rank 2 int64, step 3 int64",
        "ShouldCommitResponse": "should_commit 1 bool",
        "KillRequest": "msg 1 string",
        "KillResponse": "",
    },
)
STATUS_CODES: Final = {
    re.sub(r"(?:^|_)(.)([^_]*)", lambda part: part[1] + part[2].lower(), code.name): code for code in grpc.StatusCode
}
"""gRPC's statuses by the names that torchft's users see, such as `InvalidArgument`."""
_PLAIN: Final = (
    *("quorum_id", "recover_src_manager_address", "store_address", "max_step", "max_world_size"),
    *("replica_rank", "replica_world_size", "heal"),
)
_OPTIONAL: Final = ("recover_src_replica_rank", "max_replica_rank")
_LISTS: Final = ("recover_dst_replica_ranks", "replica_ids")


def write(kind: str, **fields: Any) -> bytes:
    """A message of this kind."""
    return bytes(_MESSAGES[kind](**fields).SerializeToString())


def read(kind: str, message: bytes) -> Any:
    """The fields of a message, as attributes. Raises ValueError."""
    try:
        return _MESSAGES[kind].FromString(message)
    except DecodeError as error:
        raise ValueError(f"this is not a {kind}: {error}") from error


def write_result(result: QuorumResult, commit_failures: int) -> bytes:
    """The answer to one rank, without a token: native ranks have shown none. `commit_failures` is the highest number
    of any replica."""
    fields = {name: getattr(result, name) for name in (*_PLAIN, *_LISTS)}
    fields["recover_src_manager_address"] = parted(result.recover_src_manager_address)[0]
    fields |= {name: value for name in _OPTIONAL if (value := getattr(result, name)) is not None}
    return write("ManagerQuorumResponse", commit_failures=commit_failures, **fields)


def read_result(message: bytes) -> QuorumResult:
    """A manager's answer to a rank. Raises ValueError."""
    told = read("ManagerQuorumResponse", message)
    fields = {name: getattr(told, name) for name in _PLAIN}
    fields |= {name: getattr(told, name) if told.HasField(name) else None for name in _OPTIONAL}
    fields |= {name: [*getattr(told, name)] for name in _LISTS}
    return QuorumResult(**fields)


# -- how calls to our servers end --------------------------------------------------------------------------------------


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


# -- the server --------------------------------------------------------------------------------------------------------


MOST_RPCS_OF_RANK: Final = 8
SPARE_RPCS: Final = 64
"""The most calls in progress, for each rank and beside these. Each has a thread, and further ones are refused: else
anyone who reaches the port could use up all threads of the process."""
MOST_NATIVE: Final = 256
"""The most connections. Further ones are refused: a process often has 1,024 file descriptors."""
_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_allowed_incoming_connections", MOST_NATIVE),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.keepalive_time_ms", 15_000),  # the host of a caller that waits may have lost its power
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),  # newer releases wait a minute, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_STOP_TIMEOUT: Final = 2.0
"""Seconds that calls in progress get to notice that the server has stopped."""


class NativeRanks:
    """A gRPC server for torchft's own ranks and peers, until `close()`. Whoever reaches its port is served.

    Args:
        place: where to listen, `host:port` or `[address]:port`.
        group: the ranks.

    Raises RuntimeError when it cannot listen there.
    """

    def __init__(self, place: str, group: RankGroup) -> None:
        self._group = group
        most_calls = SPARE_RPCS + MOST_RPCS_OF_RANK * group.world_size
        self._pool = DaemonPool(most_calls, "ftcoord-native")  # so no call queues behind those that wait
        calls = {"Quorum": self._quorum, "CheckpointMetadata": self._metadata}
        calls |= {"ShouldCommit": self._commit, "Kill": self._kill}
        with quiet_grpc():
            pool = cast(ThreadPoolExecutor, self._pool)  # gRPC only submits calls to it
            self._server = grpc.server(pool, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=most_calls)
            serve(self._server, MANAGER_SERVICE, calls)
            try:
                self._port = self._server.add_insecure_port(place)
            except RuntimeError:
                raise RuntimeError(f"cannot listen on {place} for torchft's own ranks: see what else uses it") from None
            fork.hide_port(self._port)  # else this process would seem to live for as long as its forked children do
            self._server.start()

    def close(self) -> None:
        """End all calls. Idempotent.

        Does not wait for a call that asks for the group: its request ends when the replica leaves, after this.
        """
        self._server.stop(None).wait(SERVER_STOP_TIMEOUT)  # only then gRPC has no more calls for the pool
        fork.unhide_port(self._port)
        self._pool.close(wait=False)

    # -- torchft's calls, each on a thread of its own -----------------------------------------------------------------

    def _quorum(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            left = time_left(context)
            if math.isinf(left):
                abort(context, Failure("InvalidArgument", "missing timeout"))
            asked = read("ManagerQuorumRequest", message)
            request = RankRequest(
                rank=asked.group_rank,
                step=asked.step,
                metadata=asked.checkpoint_metadata,
                shrink_only=asked.shrink_only,
                commit_failures=asked.commit_failures,
                timeout=left,
                handle="",
                init_sync=asked.init_sync,
            )
            deadline = concurrency.now() + left
            waiting, ask_for_all = self._group.quorum(request)
            if ask_for_all is not None:
                ask_for_all.run()
            quorum = waiting.wait(deadline, context.add_callback)
            failures = max(one.commit_failures for one in quorum.requests)
            return write_result(self._group.result(quorum, request), failures)

    def _metadata(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            query = read("CheckpointMetadataRequest", message)
            deadline = concurrency.now() + time_left(context)
            metadata = self._group.metadata(query.rank).wait(deadline, context.add_callback)
            if metadata is None:
                abort(context, RANK_NOT_FOUND)
            return write("CheckpointMetadataResponse", checkpoint_metadata=metadata)

    def _commit(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            vote = read("ShouldCommitRequest", message)
            deadline = concurrency.now() + time_left(context)
            waiting = self._group.vote(vote.group_rank, vote.step, vote.should_commit)
            return write("ShouldCommitResponse", should_commit=waiting.wait(deadline, context.add_callback))

    def _kill(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            abort(context, self._group.kill(read("KillRequest", message).msg))


# -- the caller --------------------------------------------------------------------------------------------------------


_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_CONNECTED_OR_NOT: Final = {grpc.ChannelConnectivity.READY: True, grpc.ChannelConnectivity.TRANSIENT_FAILURE: False}
_NAMES: Final = {code: name for name, code in STATUS_CODES.items()}


class NativeManager:
    """A channel to a manager. Thread-safe.

    Raises ConnectionError if nobody listens there, and TimeoutError if nobody answers before the monotonic `deadline`.
    """

    def __init__(self, host: str, port: int, deadline: float) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with quiet_grpc():
            self._channel = grpc.insecure_channel(target, _OPTIONS)
        with ExitStack() as undo:
            undo.callback(self._channel.close)
            self._await_ready(deadline)
            undo.pop_all()

    def _await_ready(self, deadline: float) -> None:
        """Wait until connected. gRPC would retry forever, but the process that listened there may have died for
        good."""
        ready: Future[bool] = Future()

        def note(state: grpc.ChannelConnectivity) -> None:  # called by one thread at a time
            if state in _CONNECTED_OR_NOT and not ready.done():
                ready.set_result(_CONNECTED_OR_NOT[state])

        self._channel.subscribe(note, try_to_connect=True)
        try:
            is_ready = ready.result(max(deadline - concurrency.now(), 0))
        except FutureTimeoutError:  # which is no TimeoutError in Python 3.10
            raise TimeoutError("what listens there is no manager") from None
        finally:
            self._channel.unsubscribe(note)  # gRPC has a thread for it that long
        if not is_ready:
            raise ConnectionError(
                "what listens there is no manager of torchft's; the address of one of ftcoord's has a token: take it"
                " from ManagerServer.address() as it is"
            )

    def call(self, call: RankCall, deadline: float) -> Any:
        """The answer to a call, which may be a Failure. Raises TimeoutError after the monotonic `deadline`."""
        if isinstance(call, RankRequest):
            told = self._call("Quorum", _quorum_request(call), deadline)
            return told if isinstance(told, Failure) else read_result(told)
        if isinstance(call, TimedVote):
            vote = write("ShouldCommitRequest", should_commit=call.yes, group_rank=call.rank, step=call.step)
            return self._read("ShouldCommit", vote, deadline, "should_commit")
        if isinstance(call, MetadataQuery):
            query = write("CheckpointMetadataRequest", rank=call.rank)
            return self._read("CheckpointMetadata", query, deadline, "checkpoint_metadata")
        return self._call("Kill", write("KillRequest", msg=call.message), deadline)

    def close(self) -> None:
        """End calls in progress. Idempotent."""
        self._channel.close()

    def _read(self, method: str, message: bytes, deadline: float, field: str) -> Any:
        told = self._call(method, message, deadline)
        return told if isinstance(told, Failure) else getattr(read(f"{method}Response", told), field)

    def _call(self, method: str, message: bytes, deadline: float) -> bytes | Failure:
        invoke: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{MANAGER_SERVICE}/{method}")
        try:
            told: bytes = invoke(message, timeout=max(deadline - concurrency.now(), 0))
        except grpc.RpcError as error:
            return _failure(error)
        return told


def _failure(error: grpc.RpcError) -> Failure:
    """The failure of a call. One that was sent but not answered failed in transport, as with torchft's own client."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" not in details.lower():
        return TRANSPORT_ERROR
    return Failure(_NAMES[code], details)


def _quorum_request(call: RankRequest) -> bytes:
    return write(
        "ManagerQuorumRequest",
        group_rank=call.rank,
        step=call.step,
        checkpoint_metadata=call.metadata,
        shrink_only=call.shrink_only,
        init_sync=call.init_sync,
        commit_failures=call.commit_failures,
    )
