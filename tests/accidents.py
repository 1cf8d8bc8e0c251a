"""Accidents that tests cause: events that get lost, streams that break, an etcd that loses what it was told last."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etcd_cluster import FragileEtcd
from helpers import DEADLINE, eventually
from members import Door

from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Batch, Etcd, Get, RangeResult, Span, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.mirror import Mirror, Posted


class Forgetful(Door):
    """Loses the events that it is told to, as gRPC did around `fork()`, and counts reads."""

    def __init__(self, real: Etcd) -> None:
        super().__init__(real)
        self.loses: Callable[[str], bool] = lambda _key: False
        self.reads = self.lost = 0

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        self.reads += 1
        return super().range(get, timeout=timeout)

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        def lossy(item: WatchItem) -> None:
            if isinstance(item, Batch):
                kept = tuple(event for event in item.events if not self.loses(event.kv.key))
                self.lost += len(item.events) - len(kept)
                if not kept:
                    return
                item = Batch(kept)
            deliver(item)

        return super().watch(span, start_revision, lossy, **how)

    @contextmanager
    def losing(self, *keys: str) -> Iterator[None]:
        """Loses the changes of these keys that are made meanwhile, and waits until it has lost one of each."""
        before, self.loses = self.lost, lambda key: key in keys
        yield
        eventually(lambda: self.lost >= before + len(keys), what="the events that are to be lost")
        self.loses = lambda _key: False


class Rewinding:
    """An etcd that can be set back to what it had earlier, as one is that lost its last writes."""

    def __init__(self, data: Path) -> None:
        self._data, self._copy = data, data.with_name("copy")
        self.server = FragileEtcd(data)

    def remember(self) -> None:
        self.server.kill()
        shutil.copytree(self._data / "member", self._copy)
        self.server.restart()

    def lose(self) -> None:
        """Lose all since `remember()`; `server.restart()` is left to do."""
        self.server.kill()
        shutil.rmtree(self._data / "member")
        self._copy.rename(self._data / "member")


@contextmanager
def cut_off(client: EtcdClient) -> Iterator[None]:
    """No watch stream can be opened meanwhile."""
    transport: Any = client._transport
    stream = client._watches._stream

    def refuse(*_: object) -> None:
        raise EtcdUnavailable("cut off by the test")

    transport.stream = refuse
    if stream is not None:
        stream.cancel()
    eventually(lambda: client._watches._stream is not stream or stream is None, what="the end of the stream")
    yield
    del transport.stream


def settle(mirror: Mirror, inbox: queue.SimpleQueue[Posted]) -> None:
    """Do what the owner of a mirror does until it is in sync."""
    while not mirror.synced:
        mirror.sync()
        if not mirror.synced:
            mirror.apply(inbox.get(timeout=DEADLINE))
