"""torchft's Manager and process group for TORCHFT_PROACTIVE_RECOVERY=1: no collective waits for a dead peer.

`ftcoord.torchft` replaces torchft's Manager with this one if that variable is 1. See docs/torchft.md. Needs torchft.
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
from ftcoord.closing import weakly
from ftcoord.coordination.lighthouse import QuorumWatch
from ftcoord.errors import ConfigError, FtcoordError

log = logging.getLogger(__name__)

LIGHTHOUSE: Final = "TORCHFT_LIGHTHOUSE"


class PeerLost(FtcoordError, RuntimeError):
    """A replica of the quorum is lost, so the collectives of the step were aborted. The next quorum is without it.

    Args:
        quorum_id: the quorum that the replica was in; only in the message.
        replica_id: the replica that is lost.
        cause: why it died, in one line; empty if no cause is known.
    """

    def __init__(self, quorum_id: int, replica_id: str, cause: str) -> None:
        super().__init__(
            f"replica {replica_id} of quorum {quorum_id} is lost: {cause or 'it is gone, and did not say why'}; the"
            f" collectives of this step are aborted, and the next quorum is without it"
        )
        self.replica_id = replica_id
        self.cause = cause


class ProactiveProcessGroup(ErrorSwallowingProcessGroupWrapper):  # type: ignore[misc]
    """A torchft process group that is aborted as soon as a replica of its current quorum is lost.

    `errored()` then returns a PeerLost. The Manager calls it before it votes, reports the error, and reconfigures the
    process group for the next quorum. Until then an allreduce does nothing, as after any error. So a step is lost, but
    not the process, even with the DDP of torchft 0.2.0.

    Args:
        pg: the process group, such as `torchft.ProcessGroupNCCL()`.
        lighthouse_addr: the job's address, `etcd://h1:2379,h2:2379/job?min_replicas=2`.
        connect_timeout: how long to look for etcd.

    Raises RuntimeError when etcd is not found in that time. If the watch itself fails, an error is logged and
    `failure` is set: from then on, a collective may wait for a dead replica until its own timeout. The watch ends with
    `close()`, or when nobody refers to this object.
    """

    def __init__(
        self, pg: ProcessGroup, lighthouse_addr: str, connect_timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        super().__init__(pg)
        # Held while the process group is configured, and while it is aborted: an abort that comes late must not hit the
        # one that is configured for the next quorum.
        self._turn = concurrency.lock("ProactiveProcessGroup._turn")
        self._quorum_id: int | None = None
        """The quorum that this is configured for, until it is aborted. Guarded by _turn."""
        self._abortable: ProcessGroup = pg
        """The process group that has the communicator. Guarded by _turn."""
        self.failure: BaseException | None = None
        """Why nobody watches any longer; None while somebody does. Written by the watch's thread."""
        lost, failed = weakly(self._note_loss), weakly(self._note_failure)
        self._watch = QuorumWatch(lighthouse_addr, connect_timeout, lost, failed)
        self._cancel_finalizer = concurrency.when_forgotten(self, self._watch.close, last=True)

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
        """Called by the Manager for each new quorum, see torchft."""
        with self._turn:
            self._quorum_id = None
            super().configure(store_addr, replica_id, rank, world_size, quorum_id, *more, **named)
            self._abortable = _abortable(self.parent)
            self._quorum_id = quorum_id
        if quorum_id is not None:
            self._watch.follow(quorum_id)  # which tells also of those that were lost while it was configured

    def errored(self) -> Exception | None:
        """The error that makes the Manager vote against the step: a PeerLost, or one of the process group; or None."""
        return self.error() or self.parent.errored()  # type: ignore[no-any-return]

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work:
        """See torchft."""
        return _Released(super().allreduce(tensors, opts))

    def report_error(self, e: Exception) -> None:
        """See torchft. Later errors do not replace a PeerLost."""
        if not isinstance(self.error(), PeerLost):
            super().report_error(e.with_traceback(None))  # the frames of which hold the collective, see `_Released`

    def abort(self, errored: bool = True) -> None:
        """End all collectives with an error, as far as the wrapped process group can."""
        with self._turn:
            self._quorum_id = None
            self._abortable.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """See torchft."""
        self.parent.set_timeout(timeout)

    def shutdown(self) -> None:
        """Stop watching, and shut down the wrapped process group."""
        self.close()
        self.parent.shutdown()

    def close(self) -> None:
        """Stop watching; the process group may still be used. Idempotent."""
        self._cancel_finalizer()
        self._watch.close()

    def _note_loss(self, quorum_id: int, replica_id: str, cause: str) -> None:
        """On the watch's thread. Gloo's abort may block until the peers have ended their collectives."""
        with self._turn:
            if quorum_id != self._quorum_id:
                return
            self._quorum_id = None
            error = PeerLost(quorum_id, replica_id, cause)
            log.warning("%s", error)
            self.report_error(error)  # first: whoever wakes up by the abort finds it
            self._abortable.abort()

    def _note_failure(self, error: BaseException) -> None:
        """On the watch's thread. The training continues: without the watch, collectives wait as in plain torchft."""
        self.failure = error
        log.error(
            "nobody watches for lost replicas any longer: %s; from now on a collective waits for a dead replica until"
            " its own timeout: restart this process when the job can do without it",
            error,
        )


class _Released(Work):
    """Releases a collective when it has ended, even if somebody still holds this object.

    A Gloo collective keeps the connections of its process group open while anybody refers to it. Peers that wait at
    the other ends would not notice that this process has given up.
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
    """torchft's Manager, with its process group wrapped in a ProactiveProcessGroup. The arguments are torchft's.

    Raises ConfigError if neither `lighthouse_addr` nor TORCHFT_LIGHTHOUSE is set: each rank watches the job, whereas
    torchft needs the address for rank 0 only.
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
    """The process group inside all wrappers: when a wrapper of torchft 0.2.0 is aborted, it drops what it wraps."""
    while isinstance(pg, ProcessGroupWrapper) and isinstance(pg.parent, ProcessGroup):
        pg = pg.parent
    return pg
