"""What a ProactiveProcessGroup does when it is told of a loss: early, late, twice, and around another wrapper."""

from __future__ import annotations

import ftcoord.torchft  # noqa: F401  (before torchft)

# isort: split
import sys
from collections.abc import Callable
from datetime import timedelta

from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupDummy

from ftcoord import proactive


class Inner(ProcessGroupDummy):  # type: ignore[misc]
    """Counts."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


class Watch:
    """Stands for a QuorumWatch; the test says who is lost."""

    def __init__(
        self, addr: str, connect_timeout: timedelta, on_lost: Callable[..., None], on_failed: Callable[..., None]
    ) -> None:
        self.on_lost, self.on_failed, self.followed, self.closed = on_lost, on_failed, list[int](), False
        watches.append(self)

    def follow(self, quorum_id: int) -> None:
        self.followed.append(quorum_id)

    def close(self) -> None:
        self.closed = True


watches: list[Watch] = []


def main() -> None:
    proactive.QuorumWatch = Watch  # type: ignore[assignment,misc]
    inner = Inner()
    group = proactive.ProactiveProcessGroup(ErrorSwallowingProcessGroupWrapper(inner), sys.argv[1])
    (watch,) = watches

    def configure(quorum_id: int) -> None:
        group.configure("store", "a", 0, 1, quorum_id, 0, 1, [0])

    watch.on_lost(1, "b", "killed")
    assert (inner.aborts, group.errored()) == (0, None), "it is configured for none"
    configure(1)
    configure(2)
    watch.on_lost(1, "b", "killed")
    assert (inner.aborts, group.errored(), watch.followed) == (0, None, [1, 2]), "the loss comes late"
    for _ in range(2):
        watch.on_lost(2, "c", "host7 was killed")
    error = group.errored()
    assert inner.aborts == 1, "once"
    assert isinstance(error, proactive.PeerLost)
    assert "replica c of quorum 2 is lost: host7 was killed" in str(error)
    assert (error.replica_id, error.cause) == ("c", "host7 was killed")
    configure(3)
    assert group.errored() is None
    watch.on_lost(3, "d", "")
    assert inner.aborts == 2, "it can be aborted again, though torchft's wrapper loses what it wraps"
    configure(4)
    group.abort()
    watch.on_lost(4, "d", "")
    assert (inner.aborts, group.errored()) == (3, None), "who aborts it knows why"
    configure(5)
    broken = MemoryError("made by the test")
    watch.on_failed(broken)
    assert (group.failure, group.errored()) == (broken, None), "the step goes on without a watch"
    group.shutdown()
    assert watch.closed
    print("done")


if __name__ == "__main__":
    main()
