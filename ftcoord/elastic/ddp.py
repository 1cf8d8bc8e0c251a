"""torch's DistributedDataParallel on a group, with waits that end when the group is over.

DDP waits for collectives inside C++, where nobody can free it. Those of gradients go through a comm hook, whose future
`Group` ends. All others (buffers, the order of buckets, which parameters were used) go through a process group of this
module, which waits for them before it returns. Once its group is over it begins none, so a DDP that is left behind
takes no part in the next group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import Work
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ftcoord.elastic.group import Group


def wrapped(group: Group, model: nn.Module, options: Mapping[str, Any]) -> DistributedDataParallel:
    """The model in a DDP of this group, which must have the same state on all ranks."""
    ddp = DistributedDataParallel(model, process_group=_Collectives(group), init_sync=False, **options)
    ddp.register_comm_hook(None, lambda _, bucket: _averaged(group, bucket))
    group.reducers.append(ddp.reducer)
    return ddp


def _averaged(group: Group, bucket: dist.GradBucket) -> Future[Any]:
    """The bucket's gradients, averaged over all ranks. It has not the frames of what it raises, since C++ calls it."""
    group.check()
    buffer = bucket.buffer().div_(group.world)
    try:
        work = dist.all_reduce(buffer, async_op=True)
    except RuntimeError as error:
        group.fail(error)
        raise
    assert work is not None
    return group.promise(work, buffer)


class _Collectives(dist.ProcessGroup):
    """What DDP itself needs of a process group. torch calls these methods by their names."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.world)  # type: ignore[call-arg]
        self._group = group

    def getBackendName(self) -> str:  # noqa: N802
        return "ftcoord-elastic"

    def allreduce(self, *arguments: Any) -> Work:
        return self._waited("allreduce", *arguments)

    def broadcast(self, *arguments: Any) -> Work:
        return self._waited("broadcast", *arguments)

    def _waited(self, name: str, *arguments: Any) -> Work:
        """The work of the default group, done: a Work of Python's own would be freed while C++ still has it."""
        group = self._group
        group.check()
        try:
            work: Work = getattr(dist.group.WORLD, name)(*arguments)
        except RuntimeError as error:
            group.fail(error)
            raise
        group.wait(work)
        return work
