"""torchft's own protocols by gRPC, its lighthouse's and its managers': its native classes use nothing else.

Field numbers are those of torchft 0.2.0; its nightly builds add fields (9 of a member, the handles).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, NoReturn, cast

from google.protobuf.message import DecodeError

from ftcoord import concurrency, fork
from ftcoord.coordination import api, ranks
from ftcoord.coordination.api import Failure
from ftcoord.core import recovery
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, data_problem
from ftcoord.errors import ServerError
from ftcoord.etcd.messages import declare
from ftcoord.etcd.quiet_grpc import grpc, quiet_grpc
from ftcoord.pool import DaemonPool

# -- the messages ------------------------------------------------------------------------------------------------------


LIGHTHOUSE: Final = "torchft.LighthouseService"
MANAGER: Final = "torchft.ManagerService"

_MESSAGES: Final = declare(
    "ftcoord.torchft",
    {
        "QuorumMember": "replica_id 1 string, address 2 string, store_address 3 string, step 4 int64,"
        " world_size 5 uint64, shrink_only 6 bool, data 7 string, commit_failures 8 int64, handles 9 string*",
        "Timestamp": "seconds 1 int64, nanos 2 int32",
        "Quorum": "quorum_id 1 int64, participants 2 QuorumMember*, created 3 Timestamp",
        "LighthouseQuorumRequest": "requester 1 QuorumMember",
        "LighthouseQuorumResponse": "quorum 1 Quorum",
        "LighthouseHeartbeatRequest": "replica_id 1 string",
        "LighthouseHeartbeatResponse": "",
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
_NOT_SENT: Final = {"commit_failures", "reconfigure_handles"}
"""Fields of either ManagerQuorumResponse or QuorumResult that the other one lacks. torchft's clients read no
`commit_failures`."""


def write(kind: str, **fields: Any) -> bytes:
    """A message of this kind. A field that is None is left out."""
    return bytes(_MESSAGES[kind](**fields).SerializeToString())


def read(kind: str, message: bytes) -> Any:
    """The fields of a message, as attributes. Raises ValueError."""
    try:
        return _MESSAGES[kind].FromString(message)
    except DecodeError as error:
        raise ValueError(f"this is not a {kind}: {error}") from error


def _fields(message: Any) -> dict[str, Any]:
    """By name: lists are Python's own, and an optional field that is not there is None."""
    found = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    optional = [field.name for field in message.DESCRIPTOR.fields if field.containing_oneof is not None]
    found |= {name: None for name in optional if not message.HasField(name)}
    return {
        name: value if isinstance(value, (str, int)) or value is None else [*value] for name, value in found.items()
    }


def read_quorum_request(message: bytes) -> QuorumRequest:
    """A replica's request. Raises ValueError for a message, or for `data` in it, that other replicas could not read."""
    asked = read("LighthouseQuorumRequest", message)
    if not asked.HasField("requester"):
        raise ValueError("the request names no requester")
    if problem := data_problem(asked.requester.data):
        raise ValueError(f"the data of the request is no JSON object: {problem}")
    fields = _fields(asked.requester)
    return QuorumRequest(**{**fields, "handles": tuple(fields["handles"])})


def write_quorum(quorum: QuorumRecord) -> bytes:
    """The answer to all members of a quorum, without tokens: who calls a gateway has shown no right to one."""
    at = api.timestamp(quorum)
    names = QuorumRequest.__slots__
    members = [
        {**{name: getattr(one, name) for name in names}, "address": parted(one.address)[0]} for one in quorum.requests
    ]
    created = {"seconds": at.seconds, "nanos": at.nanos}
    told = {"quorum_id": quorum.id, "participants": members, "created": created}
    return write("LighthouseQuorumResponse", quorum=told)


class _Method(NamedTuple):
    """One call to a manager: its name, that of its messages, its class here, the fields of its request with their names
    here, and the one field of its answer. A quorum's answer has many, and a kill's none."""

    name: str
    kind: str
    call: type[Any]
    fields: Mapping[str, str]
    answer: str = ""

    def write_call(self, call: ranks.RankCall) -> bytes:
        return write(f"{self.kind}Request", **{theirs: getattr(call, ours) for theirs, ours in self.fields.items()})

    def read_call(self, message: bytes, timeout: float) -> ranks.RankCall:
        """Raises ValueError."""
        asked = read(f"{self.kind}Request", message)
        more = {name: value for name, value in (("timeout", timeout), ("handle", "")) if name in self.call.__slots__}
        call: ranks.RankCall = self.call(**{here: getattr(asked, one) for one, here in self.fields.items()}, **more)
        return call

    def write_answer(self, answer: Any) -> bytes:
        """Without a token: native ranks have shown none."""
        if self.answer:
            return write(f"{self.kind}Response", **{self.answer: answer})
        fields = {name: value for name, value in recovery.result_fields(answer).items() if name not in _NOT_SENT}
        source = parted(answer.recover_src_manager_address)[0]
        return write(f"{self.kind}Response", **{**fields, "recover_src_manager_address": source})

    def read_answer(self, message: bytes) -> Any:
        """Raises ValueError."""
        told = read(f"{self.kind}Response", message)
        if self.call is ranks.RankRequest:
            fields = {name: value for name, value in _fields(told).items() if name not in _NOT_SENT}
            return recovery.QuorumResult(**fields)
        return getattr(told, self.answer) if self.answer else message


_SAME: Final = {name: name for name in ("step", "shrink_only", "init_sync", "commit_failures")}
_ASKED: Final = {**_SAME, "group_rank": "rank", "checkpoint_metadata": "metadata"}
_VOTED: Final = {"should_commit": "yes", "group_rank": "rank", "step": "step"}
_METHODS: Final = (
    _Method("Quorum", "ManagerQuorum", ranks.RankRequest, _ASKED),
    _Method("ShouldCommit", "ShouldCommit", ranks.TimedVote, _VOTED, "should_commit"),
    _Method("CheckpointMetadata", "CheckpointMetadata", ranks.MetadataQuery, {"rank": "rank"}, "checkpoint_metadata"),
    _Method("Kill", "Kill", ranks.KillOrder, {"msg": "message"}),
)

# -- how calls to our servers end --------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

STATUS_CODES: Final = {code.name.title().replace("_", ""): code for code in grpc.StatusCode}
"""gRPC's statuses by the names that torchft's users see, such as `InvalidArgument`."""
EARLY_ANSWER: Final = 0.1
"""Seconds before a call's deadline at which we answer that it timed out. At the deadline gRPC does, with another
text."""


@contextlib.contextmanager
def answering(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends a failed call with the status that torchft's own server would return."""
    try:
        yield
    except ValueError as error:
        abort(context, Failure("InvalidArgument", str(error)))
    except api.KNOWN as error:
        abort(context, Failure.of(error))


def abort(context: grpc.ServicerContext, failure: Failure) -> NoReturn:
    """End a call with this failure."""
    log.debug("a call ended: %s", failure.message)
    message = "Timeout expired" if failure.code in api.TIMED_OUT else failure.message
    context.abort(STATUS_CODES[failure.code], message)
    raise AssertionError("gRPC's abort raises")


def time_left(context: grpc.ServicerContext) -> float:
    """Seconds until the answer is due; api.TEN_YEARS for a call without a timeout."""
    left = context.time_remaining()
    return api.TEN_YEARS if left is None else min(max(left - min(left / 10, EARLY_ANSWER), 0), api.TEN_YEARS)


# -- the servers -------------------------------------------------------------------------------------------------------


HANDSHAKE_TIMEOUT: Final = 10.0
"""Seconds that a new connection has until it must use gRPC's protocol."""
SERVER_STOP_TIMEOUT: Final = 2.0
"""Seconds that calls in progress get to notice that the server has stopped."""


class NativeServer:
    """A gRPC server for torchft's native classes, from its creation to `close()`. Whoever reaches its port is served.

    Args:
        place: where to listen, `host:port` or `[address]:port`; port 0 takes a free one.
        service: its name.
        calls: by name what answers a call's bytes, each on a thread of its own.
        most_calls, most_connections: further ones are refused: else anyone could use up all threads, or descriptors.
        keepalive: seconds after which a silent caller is probed, and after which it counts as gone: its host may have
            lost its power.
        name: that of the threads.
        options: more of gRPC's options.

    Raises ServerError when it cannot listen there.
    """

    def __init__(
        self,
        place: str,
        service: str,
        calls: Mapping[str, Callable[[bytes, grpc.ServicerContext], bytes]],
        *,
        most_calls: int,
        most_connections: int,
        keepalive: float,
        name: str,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._pool = DaemonPool(most_calls, name)  # so no call queues behind those that wait
        probe = int(keepalive * 1000)
        options = [
            ("grpc.so_reuseport", 0),  # a port that is taken is an error
            ("grpc.keepalive_time_ms", probe),
            ("grpc.keepalive_timeout_ms", probe),
            ("grpc.http2.ping_timeout_ms", probe),  # newer releases wait a minute, whatever the line above says
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_allowed_incoming_connections", most_connections),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT * 1000)),
            *options,
        ]
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()
        }
        with quiet_grpc():
            pool = cast(ThreadPoolExecutor, self._pool)  # gRPC only submits calls to it
            self._server = grpc.server(pool, options=options, maximum_concurrent_rpcs=most_calls)
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
            try:
                self.port = self._server.add_insecure_port(place)
            except RuntimeError:
                raise ServerError(f"cannot listen on {place}: it is in use, or no address of this host") from None
            fork.hide_port(self.port)  # else this process would seem to live for as long as its forked children do
            self._server.start()

    def close(self, *, wait: bool) -> None:
        """End all calls, and wait for them if that is wanted. Idempotent."""
        self._server.stop(None).wait(SERVER_STOP_TIMEOUT)  # only then gRPC has no more calls for the pool
        fork.unhide_port(self.port)
        self._pool.close(wait=wait)


MOST_RPCS_OF_RANK: Final = 8
SPARE_RPCS: Final = 64
"""The most calls in progress, for each rank and beside these."""
MOST_NATIVE: Final = 256
"""The most connections: a process often has 1,024 file descriptors."""
KEEPALIVE: Final = 15.0


def serve_ranks(place: str, group: ranks.RankGroup) -> NativeServer:
    """Serve torchft's own ranks and peers at `host:port` or `[address]:port`. Raises ServerError when that is
    impossible."""

    def answer(method: _Method, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            left = time_left(context)
            deadline = concurrency.now() + left
            told = group.call(method.read_call(message, left), deadline, context.add_callback)
            if isinstance(told, Failure):
                abort(context, told)
            return method.write_answer(told)

    return NativeServer(
        place,
        MANAGER,
        {method.name: functools.partial(answer, method) for method in _METHODS},
        most_calls=SPARE_RPCS + MOST_RPCS_OF_RANK * group.world_size,
        most_connections=MOST_NATIVE,
        keepalive=KEEPALIVE,
        name="ftcoord-native",
    )


# -- the caller --------------------------------------------------------------------------------------------------------


_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_NAMES: Final = {code: name for name, code in STATUS_CODES.items()}
_NO_MANAGER: Final = (
    "no manager of torchft's answers there; the address of one of ftcoord's has a token: take it from"
    " ManagerServer.address() as it is"
)


class NativeManager:
    """A channel to a manager. Thread-safe.

    Raises ConnectionError if no manager answers there before the monotonic `deadline`.
    """

    def __init__(self, host: str, port: int, deadline: float) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with quiet_grpc():
            self._channel = grpc.insecure_channel(target, _OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(max(deadline - concurrency.now(), 0))
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise ConnectionError(_NO_MANAGER) from None

    def call(self, call: ranks.RankCall, deadline: float) -> Any:
        """The answer to a call, which may be a Failure. Raises TimeoutError after the monotonic `deadline`."""
        method = next(one for one in _METHODS if isinstance(call, one.call))
        invoke: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{MANAGER}/{method.name}")
        try:
            told: bytes = invoke(method.write_call(call), timeout=max(deadline - concurrency.now(), 0))
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            # A call that was sent but not answered failed in transport, as with torchft's own client.
            if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" not in details.lower():
                return api.TRANSPORT_ERROR
            return Failure(_NAMES[code], details)
        return method.read_answer(told)

    def close(self) -> None:
        """End calls in progress. Idempotent."""
        self._channel.close()
