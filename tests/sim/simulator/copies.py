"""Whether the copies that processes have of etcd's keys show what etcd holds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virtual.keyspace import KeySpace

from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Batch, Get, KeyValue, Span
from ftcoord.primitives.mirror import Mirror, Posted
from simulator.stubs import replacing

if TYPE_CHECKING:
    from simulator.world import World


@dataclass
class _Noted:
    """One mirror: its process, and what its owner was told last, by which it may still be held up.

    Args:
        news: the last that was no change.
        revision: of the last change.
        began: the revision from which its watch tells of changes.
        absent: the keys that it took for present then, though etcd had none of them by the time it began.
    """

    process: str
    began: int
    absent: frozenset[str]
    news: object = None
    revision: int = 0


@dataclass(frozen=True)
class _Shown:
    """What a mirror shows at one moment, and the revision of the last change that its owner was told of. `_Noted` says
    what `began` and `absent` are."""

    process: str
    span: Span
    revision: int
    kvs: Mapping[str, KeyValue]
    deletes_only: bool
    told: int
    began: int
    absent: frozenset[str]


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
            absent = frozenset(key for key in mirror.kvs if not self._was_there(key, revision))
            noted = self._mirrors[mirror] = _Noted(self._world.scheduler.process_now, revision, absent)
            if known is None:
                mirror._post = self._noting(mirror._post)
            else:
                noted.news = known.news
            start(mirror, revision, *given)

        with replacing() as put:
            put(Mirror, "_start", starting)
            yield

    def _was_there(self, key: str, revision: int) -> bool:
        """Whether etcd had a key when a watch from this revision began. One that was put back since is another one."""
        kv = self._world.oracles.kvs.get(key)
        return kv is not None and (revision == 0 or kv.create_revision < revision)

    def _noting(self, post: Callable[[Mirror, Posted], None]) -> Callable[[Mirror, Posted], None]:
        def posting(mirror: Mirror, posted: Posted) -> None:
            noted = self._mirrors[mirror]
            if isinstance(posted.item, Batch):
                noted.revision = posted.item.events[-1].kv.mod_revision
            else:
                noted.news = posted.item
            post(mirror, posted)

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
                mirror.span,
                mirror.revision,
                mirror.kvs.copy(),
                mirror._deletes_only,
                noted.revision,
                noted.began,
                noted.absent,
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
    if copy.deletes_only:  # it knows which keys there are, among those that it has read, or that a tail named
        gone = mine.keys() - past.keys() - _gone_before(copy, keys)
        return f"{sorted(gone)} are gone" if gone else ""
    expected = copy.kvs.keys() - mine.keys()
    other = [key for key in (mine.keys() | past.keys()) - expected if mine.get(key) != past.get(key)]
    return f"{sorted(other)} differ at revision {copy.revision}" if other else ""


def _gone_before(copy: _Shown, keys: KeySpace) -> Set[str]:
    """The keys that were gone before the copy began. Whoever joins follows the member that the tail names, without
    reading its key. If somebody has deleted that key alone, the tail stays, and no watch tells of the deletion: the
    joiner finds out when it next reads the key (docs/protocol.md)."""
    told = keys.since(copy.span, copy.began, deletes_only=True)
    return copy.absent - {event.kv.key for event in told}


def _is_known(copy: _Shown, event: Any) -> bool:
    """Whether its owner has made that change itself."""
    kv = copy.kvs.get(event.kv.key)
    return kv is not None and kv.mod_revision >= event.kv.mod_revision
