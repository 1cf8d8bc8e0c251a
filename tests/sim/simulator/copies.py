"""Whether the copies that processes have of etcd's keys show what etcd holds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virtual.keyspace import KeySpace

from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Batch, Get, KeyValue, Span
from ftcoord.primitives.mirror import Mirror
from simulator.stubs import replacing

if TYPE_CHECKING:
    from simulator.world import World


@dataclass
class _Noted:
    """One mirror: its process, and what its owner was told last, by which it may still be held up.

    Args:
        news: the last that was no change.
        revision: of the last change.
    """

    process: str
    news: object = None
    revision: int = 0


@dataclass(frozen=True)
class _Shown:
    """What a mirror shows at one moment of the span that it watches, and the revision of the last change that its owner
    received."""

    process: str
    span: Span
    revision: int
    kvs: Mapping[str, KeyValue]
    deletes_only: bool
    told: int


class Copies:
    """The mirrors of all processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mirrors: weakref.WeakKeyDictionary[Mirror, _Noted] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Have each mirror noted that begins to watch, and what it is told."""
        start = Mirror._start

        def starting(mirror: Mirror, revision: int, *given: Any) -> None:
            known = self._mirrors.get(mirror)
            noted = self._mirrors[mirror] = _Noted(self._world.scheduler.process_now)
            if known is None:
                mirror._post = self._noting(mirror)
            else:
                noted.news = known.news
            start(mirror, revision, *given)

        with replacing() as put:
            put(Mirror, "_start", starting)
            yield

    def _noting(self, mirror: Mirror) -> Callable[[Any], None]:
        post, itself = mirror._post, weakref.ref(mirror)

        def posting(apply: Any) -> None:
            noted, item = self._mirrors[itself()], apply.args[-1]  # type: ignore[index]  # who posts is there
            if isinstance(item, Batch):
                noted.revision = item.events[-1].kv.mod_revision
            else:
                noted.news = item
            post(apply)

        return posting

    def wrong(self, revision: int) -> list[str]:
        """The copies of processes that live which take themselves for whole, and show neither what etcd held at their
        own revision, nor what it has told of since, up to this revision. Whose owner has news to look at is left out:
        it may wait for the answer to a request that was lost."""
        shown = [*self._shown()]  # before etcd is asked: meanwhile others go on
        keys = self._world.etcd.snapshot().keys
        problems = ((one, _problem(one, keys, revision)) for one in shown)
        return sorted(f"{one.process} has a wrong copy of {one.span.start}: {text}" for one, text in problems if text)

    def _shown(self) -> Iterator[_Shown]:
        for mirror, noted in self._mirrors.items():
            process = self._world.begun.get(noted.process)
            if process is None or not process.lives or not mirror.synced or mirror._began is not noted.news:
                continue
            yield _Shown(
                noted.process,
                mirror.watched,
                mirror.revision,
                {key: kv for key, kv in mirror.kvs.items() if key in mirror.watched},
                mirror._deletes_only,
                noted.revision,
            )


def _problem(copy: _Shown, keys: KeySpace, revision: int) -> str:
    later = keys.since(copy.span, max(copy.revision, copy.told) + 1, copy.deletes_only)
    unheard = [event for event in later if event.kv.mod_revision <= revision and not _is_known(copy, event)]
    if unheard:
        return f"it has revision {copy.revision}, and has not heard of {unheard[0]}"
    try:
        past = {kv.key: kv for kv in keys.range(Get(copy.span, revision=copy.revision)).kvs}
    except RequestRefused as error:
        return "" if copy.revision < keys.compacted else str(error)
    # What its owner has written itself, and expects the watch to bring, is newer than the copy's revision.
    mine = {key: kv for key, kv in copy.kvs.items() if kv.mod_revision <= copy.revision}
    if copy.deletes_only:  # it knows which keys there are, among those that it has read
        gone = mine.keys() - past.keys()
        return f"{sorted(gone)} are gone" if gone else ""
    expected = copy.kvs.keys() - mine.keys()
    other = [key for key in (mine.keys() | past.keys()) - expected if mine.get(key) != past.get(key)]
    return f"{sorted(other)} differ at revision {copy.revision}" if other else ""


def _is_known(copy: _Shown, event: Any) -> bool:
    """Whether its owner has made that change itself."""
    kv = copy.kvs.get(event.kv.key)
    return kv is not None and kv.mod_revision >= event.kv.mod_revision
