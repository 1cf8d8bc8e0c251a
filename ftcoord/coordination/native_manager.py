"""How one of ftcoord's ranks calls torchft's own manager: by gRPC."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.coordination.failure import TRANSPORT_ERROR, Failure
from ftcoord.coordination.manager_wire import MANAGER_SERVICE, STATUS_CODES, read, read_result, write
from ftcoord.coordination.rank_frames import MetadataQuery, RankCall, TimedVote
from ftcoord.coordination.ranks import RankRequest
from ftcoord.etcd.quiet_grpc import grpc, quiet_grpc

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
            raise ConnectionError("what listens there is no manager, or has just ended")

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
