"""torchft's Manager and process group for TORCHFT_PROACTIVE_RECOVERY=1: no collective waits for a peer that is dead.

`ftcoord.torchft` puts this Manager in the place of torchft's if that variable is 1. See docs/torchft.md. Needs torchft.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from datetime import timedelta
from typing import Any, Final

import torch
import torchft.manager
from torch.distributed import Work
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup, ProcessGroupWrapper

from ftcoord import concurrency
from ftcoord.coordination.quorum_watch import QuorumWatch
from ftcoord.errors import ConfigError, FtcoordError

log = logging.getLogger(__name__)
errors_log: Final = logging.getLogger("torchft_errors")
"""torchft's: with TORCHFT_USE_OTEL, its records go to OpenTelemetry."""

LIGHTHOUSE: Final = "TORCHFT_LIGHTHOUSE"


class PeerLost(FtcoordError, RuntimeError):
    """A replica of the quorum is lost, so the collectives of the step were aborted. The next quorum is without it."""

    def __init__(self, quorum_id: int, replica_id: str, cause: str) -> None:
        super().__init__(
            f"replica {replica_id} of quorum {quorum_id} is lost: {cause or 'it is gone, and did not say why'}; the"
            f" collectives of this step are aborted, and the next quorum is without it"
        )


class ProactiveProcessGroup(ErrorSwallowingProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft's that is aborted as soon as a replica of the quorum that it is configured for is
    lost.

    Then `errored()` returns a PeerLost. The Manager asks for that before it votes, reports the error, and configures
    the process group anew with the next quorum. Until then an allreduce does nothing, as with any error: so a step is
    lost and not the process, though the DDP of torchft 0.2.0 is above it.

    Args:
        pg: the process group, such as `torchft.ProcessGroupNCCL()`.
        lighthouse_addr: the job's address, `etcd://h1:2379,h2:2379/job?min_replicas=2`.
        connect_timeout: how long to look for etcd.

    Raises RuntimeError when etcd is not found. If the watch itself fails, `failure` says so, and a log line: until the
    next quorum a collective may then wait for a dead replica until its time-out. It stops watching when nobody refers
    to it, or with `close()`.
    """

    def __init__(
        self, pg: ProcessGroup, lighthouse_addr: str, connect_timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        super().__init__(pg)
        # Held while the process group is configured, and while it is aborted: an abort that comes late must not hit the
        # one that is configured for the next quorum.
        self._turn = concurrency.lock("ProactiveProcessGroup._turn")
        self._quorum_id: int | None = None
        """The quorum that it is configured for, until it is aborted. Guarded by _turn."""
        self._abortable: ProcessGroup = pg
        """What has the communicator. Guarded by _turn."""
        self._place: tuple[str, int] | None = None
        """The replica and the rank that it is configured for. Guarded by _turn."""
        self.failure: BaseException | None = None
        """Why nobody watches over the quorum that this is configured for; None if it is watched. Written by the watch's
        thread, and by `configure`."""
        self._watch = QuorumWatch(
            lighthouse_addr,
            connect_timeout,
            concurrency.weakly(self._note_loss),
            concurrency.weakly(self._note_failure),
        )

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        """Called by the Manager with each new quorum, see torchft."""
        with self._turn:
            self._quorum_id = None
            super().configure(store_addr, replica_id, rank, world_size, quorum_id, *more, **named)
            self._abortable = _abortable(self.parent)
            self._quorum_id, self.failure = quorum_id, None
            self._place = replica_id, rank
        if quorum_id is not None:
            self._watch.follow(quorum_id)  # which tells also of those that were lost while it was configured

    def errored(self) -> Exception | None:
        """What makes the Manager vote against the step."""
        return self.error() or self.parent.errored()  # type: ignore[no-any-return]

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work:
        """See torchft."""
        return _Released(super().allreduce(tensors, opts))

    def report_error(self, e: Exception) -> None:
        """See torchft. What fails since a peer is lost does not hide that it is lost."""
        if not isinstance(self.error(), PeerLost):
            super().report_error(e.with_traceback(None))  # the frames of which hold the collective, see `_Released`

    def abort(self, errored: bool = True) -> None:
        """End all collectives by an error, as far as the process group inside can."""
        with self._turn:
            self._quorum_id = None
            self._abortable.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """See torchft."""
        self.parent.set_timeout(timeout)

    def shutdown(self) -> None:
        """Stop watching, and shut the process group inside down."""
        self.close()
        self.parent.shutdown()

    def close(self) -> None:
        """Stop watching; the process group may still be used. Idempotent."""
        self._watch.close()

    def _note_loss(self, quorum_id: int, replica_id: str, cause: str) -> None:
        """On the watch's thread. Gloo's abort may take as long as the collectives do that its peers must end."""
        with self._turn:
            if quorum_id != self._quorum_id:
                return
            self._quorum_id = None
            error = PeerLost(quorum_id, replica_id, cause)
            log.warning("%s", error)
            self._tell_of_error(quorum_id, error)
            self.report_error(error)  # first: whoever wakes up by the abort finds it
            self._abortable.abort()

    def _tell_of_error(self, quorum_id: int, error: PeerLost) -> None:
        """With the fields that torchft gives its own record of the abort, which does not say why."""
        replica_id, rank = self._place or (None, None)
        facts = {"replica_id": replica_id, "rank": rank, "quorum_id": quorum_id, "error": str(error)}
        errors_log.info("", extra={"job_id": os.environ.get("JOB_ID", "unknown"), **facts})

    def _note_failure(self, quorum_id: int, error: BaseException) -> None:
        """On the watch's thread. The training goes on: without a watch it waits as torchft does by itself."""
        with self._turn:
            if quorum_id != self._quorum_id:
                return
            self.failure = error
        log.error(
            "nobody watches over quorum %d any longer: %s; until the next quorum, a collective waits for a dead replica"
            " until its own time-out",
            quorum_id,
            error,
        )


class _Released(Work):
    """A collective that is let go of when it has ended, whoever still holds this.

    A collective of Gloo keeps the connections of its process group open for as long as anybody has it. Peers that wait
    at the other ends would not hear that this one has given up.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work: Work | None = work
        self._future = work.get_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See torch."""
        work, self._work = self._work, None
        return work is None or bool(work.wait())

    def get_future(self) -> torch.futures.Future[Any]:
        """See torch."""
        return self._future

    def block_current_stream(self) -> None:
        """See torch."""
        if self._work is not None:
            self._work.block_current_stream()

    def synchronize(self) -> None:
        """See torch."""
        if self._work is not None:
            self._work.synchronize()


class Manager(torchft.manager.Manager):  # type: ignore[misc]
    """torchft's Manager, with its process group in a ProactiveProcessGroup. The arguments are torchft's.

    Raises ConfigError if it is not told where the job is: each rank watches it, where torchft needs that for rank 0
    only.
    """

    def __init__(self, pg: ProcessGroup, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(pg, *args, **kwargs)
        given.apply_defaults()
        address = given.arguments["lighthouse_addr"] or os.environ.get(LIGHTHOUSE, "")
        if not address:
            raise ConfigError(LIGHTHOUSE, address, "set it to etcd://host:port/job for all ranks of all groups")
        with contextlib.ExitStack() as undo:
            self._proactive = ProactiveProcessGroup(pg, address, given.arguments["connect_timeout"])
            undo.callback(self._proactive.close)
            super().__init__(self._proactive, *args, **kwargs)
            undo.pop_all()

    def shutdown(self, wait: bool = True) -> None:
        """See torchft."""
        self._proactive.close()
        super().shutdown(wait)


def _abortable(pg: ProcessGroup) -> ProcessGroup:
    """The process group inside all wrappers: a wrapper of torchft 0.2.0 that is aborted loses what it wraps."""
    while isinstance(pg, ProcessGroupWrapper) and isinstance(pg.parent, ProcessGroup):
        pg = pg.parent
    return pg
