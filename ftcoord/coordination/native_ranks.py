"""Serves torchft's own ranks at ftcoord's manager: its gRPC service, for bytes that the manager's port forwards."""

from __future__ import annotations

import asyncio
import math
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, cast

from ftcoord import concurrency
from ftcoord.coordination.failure import RANK_NOT_FOUND, Failure
from ftcoord.coordination.manager_wire import MANAGER_SERVICE, read, write, write_result
from ftcoord.coordination.native_calls import abort, answering, serve, time_left
from ftcoord.coordination.rank_group import RankGroup
from ftcoord.coordination.ranks import MOST_CALLS, RankRequest
from ftcoord.coordination.splice import SpliceEnd
from ftcoord.etcd.quiet_grpc import grpc, quiet_grpc
from ftcoord.pool import DaemonPool

SPARE_CALLS: Final = 64
"""The most calls in progress, each with a thread, above those that all ranks may have waiting. Further ones are
refused: else anyone who reaches the port could use up all threads of the process."""
SERVER_STOP_TIMEOUT: Final = 2.0
"""Seconds that calls in progress get to notice that the server has stopped."""


class NativeRanks:
    """A gRPC server that is started with the first connection, and listens where only this host reaches it.

    Args:
        group: the ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._most_calls = SPARE_CALLS + 2 * MOST_CALLS * group.world_size  # requests and votes
        self._pool = DaemonPool(self._most_calls, "ftcoord-native")  # so no call queues behind those that wait
        self._server: grpc.Server | None = None
        self._place: str | int = ""  # where it listens: a name in Linux's abstract namespace, else a port

    async def connect(self, loop: asyncio.AbstractEventLoop, make: Callable[[], SpliceEnd]) -> SpliceEnd:
        """Open a new connection to it. Raises OSError."""
        if self._server is None:
            self._start()
        if isinstance(self._place, int):
            _, end = await loop.create_connection(make, "127.0.0.1", self._place)
        else:
            _, end = await loop.create_unix_connection(make, f"\0{self._place}")
        return end

    def close(self) -> None:
        """End all calls. Idempotent.

        Does not wait for a call that asks for the group: its request ends when the replica leaves, after this.
        """
        if self._server is not None:
            self._server.stop(None).wait(SERVER_STOP_TIMEOUT)  # only then gRPC has no more calls for the pool
        self._pool.close(wait=False)

    def _start(self) -> None:
        calls = {"Quorum": self._quorum, "CheckpointMetadata": self._metadata}
        calls |= {"ShouldCommit": self._commit, "Kill": self._kill}
        with quiet_grpc():
            pool = cast(ThreadPoolExecutor, self._pool)  # gRPC only submits calls to it
            server = grpc.server(pool, options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=self._most_calls)
            serve(server, MANAGER_SERVICE, calls)
            if sys.platform == "linux":  # nothing is left there when the process is killed
                self._place = f"ftcoord-{uuid.uuid4().hex}"
                server.add_insecure_port(f"unix-abstract:{self._place}")
            else:
                self._place = server.add_insecure_port("127.0.0.1:0")
            server.start()
        self._server = server

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
