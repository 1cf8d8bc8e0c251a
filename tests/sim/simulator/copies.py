"""Whether the copies that processes have of etcd's keys show what etcd holds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Get
from ftcoord.primitives.mirror import Mirror
from ftcoord.testing.keyspace import KeySpace
from simulator.stubs import replacing

if TYPE_CHECKING:
    from simulator.world import World


class Copies:
    """The mirrors of all processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mirrors: weakref.WeakKeyDictionary[Mirror, str] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Have each mirror noted that begins to watch, with its process."""
        start = Mirror._start

        def starting(mirror: Mirror, *given: Any) -> None:
            self._mirrors[mirror] = self._world.scheduler.process_now
            start(mirror, *given)

        with replacing() as put:
            put(Mirror, "_start", starting)
            yield

    def wrong(self, revision: int) -> list[str]:
        """The copies of processes that live which take themselves for whole, and show neither what etcd held at their
        own revision, nor what it has told of since, up to this revision."""
        keys = self._world.etcd.snapshot().keys
        found = []
        for mirror, name in list(self._mirrors.items()):
            process = self._world.begun.get(name)
            if (
                process is not None
                and process.lives
                and mirror.synced
                and (problem := _problem(mirror, keys, revision))
            ):
                found.append(f"{name} has a wrong copy of {mirror.span.start}: {problem}")
        return sorted(found)


def _problem(mirror: Mirror, keys: KeySpace, revision: int) -> str:
    later = keys.since(mirror.span, mirror.revision + 1, mirror._deletes_only)
    unheard = [event for event in later if event.kv.mod_revision <= revision and not _is_known(mirror, event)]
    if unheard:
        return f"it has revision {mirror.revision}, and has not heard of {unheard[0]}"
    try:
        past = {kv.key: kv for kv in keys.range(Get(mirror.span, revision=mirror.revision)).kvs}
    except RequestRefused as error:
        return "" if mirror.revision < keys.compacted else str(error)
    # What its owner has written itself, and expects the watch to bring, is newer than the copy's revision.
    mine = {key: kv for key, kv in mirror.kvs.items() if kv.mod_revision <= mirror.revision}
    if mirror._deletes_only:  # it knows which keys there are, among those that it has read
        gone = mine.keys() - past.keys()
        return f"{sorted(gone)} are gone" if gone else ""
    expected = mirror.kvs.keys() - mine.keys()
    other = [key for key in (mine.keys() | past.keys()) - expected if mine.get(key) != past.get(key)]
    return f"{sorted(other)} differ at revision {mirror.revision}" if other else ""


def _is_known(mirror: Mirror, event: Any) -> bool:
    """Whether its owner has made that change itself."""
    kv = mirror.kvs.get(event.kv.key)
    return kv is not None and kv.mod_revision >= event.kv.mod_revision
