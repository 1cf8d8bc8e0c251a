"""Heartbeats: which processes of a run are alive, their data, and which ones left or were lost.

with ftcoord.Heartbeat("job1", "host-7", ttl=10, data={"gpu": 3}) as heartbeat:
    heartbeat.update({"gpu": 4})

for event in ftcoord.watch_heartbeats("job1"):
    print(event.kind, event.name, event.data, event.reason, event.cause)
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig, full_text, lease_seconds
from ftcoord.core.layout import KEY_PREFIX, heartbeat_key, heartbeats_span
from ftcoord.core.strict import build, dump, json_problem, load
from ftcoord.errors import ClientClosed, ConfigError, EtcdAuthError, EtcdError, StateError, ThreadFailed
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.client import Namespace
from ftcoord.primitives.deaths import cause_of_death
from ftcoord.primitives.leased_key import LeasedKey
from ftcoord.primitives.mirror import Change, Feed

log = logging.getLogger(__name__)

LONGEST_DATA: Final = 2**18
"""Characters of JSON in a heartbeat; etcd takes 1.5 MiB, and escaped characters need up to four bytes for each."""
WATCH_CHECK_INTERVAL: Final = 60.0
"""Seconds after which a watch without events checks whether it was closed; `close()` wakes it too."""
WATCH_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed watch is tried again."""
HEARTBEAT_TIMEOUT: Final = 5.0
"""Seconds that a heartbeat waits for etcd when it starts and when it is updated."""
LEAVE_STEP_TIMEOUT: Final = 1.0
"""Seconds that each step of its end may take."""


# -- the records, and which names are alive: pure ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat.

    Args:
        name: the heartbeat's name.
        data: its data, as JSON text.
        left: whether it is about to give up its lease: it has then left, and not expired.
    """

    name: str
    data: str
    left: bool = False


def encode(beat: Beat) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(beat)


def parse_beat(key: str, value: bytes) -> Beat:
    """The heartbeat in a key. Raises StateError."""
    beat = build(Beat, key, load(key, value))
    if problem := json_problem(beat.data):
        raise StateError(key, f"holds data that is no JSON ({problem})")
    return beat


@dataclass(frozen=True, slots=True)
class HeartbeatEvent:
    """A change of one name.

    Attributes:
        kind: ``joined``, ``updated`` (with new data) or ``lost``.
        name: the heartbeat's name.
        data: its last data.
        reason: why it is lost: ``left``, ``died`` or ``expired``; else empty.
        cause: why it died, in one line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; else empty.
    """

    kind: Literal["joined", "updated", "lost"]
    name: str
    data: Any = None
    reason: Literal["", "left", "died", "expired"] = ""
    cause: str = ""


class Roll:
    """The live names. Of several processes with one name only the newest counts: it has replaced the others."""

    def __init__(self) -> None:
        self._lives: dict[str, tuple[str, int, str]] = {}
        """By name: the key of the process that represents it, since which revision that exists, and the data."""

    def note(self, key: str, created: int, beat: Beat) -> HeartbeatEvent | None:
        """The event for a beat that was written, to a key that has existed since the revision `created`."""
        if beat.left:
            return self.drop(key, beat.name, left=True)
        before = self._lives.get(beat.name)
        if before is not None and created < before[1]:
            return None
        self._lives[beat.name] = key, created, beat.data
        if before is not None and before[2] == beat.data:
            return None
        return HeartbeatEvent("updated" if before else "joined", beat.name, json.loads(beat.data))

    def drop(self, key: str, name: str, cause: str = "", *, left: bool = False) -> HeartbeatEvent | None:
        """The event for a key that is gone, or whose heartbeat has `left`; `cause` is why its process died, if it
        did."""
        if not self.speaks_for(key, name):
            return None
        data = json.loads(self._lives.pop(name)[2])
        return HeartbeatEvent("lost", name, data, "left" if left else "died" if cause else "expired", cause)

    def speaks_for(self, key: str, name: str) -> bool:
        """Whether the process with this key represents the name."""
        return self._lives.get(name, ("",))[0] == key


# -- one's own --------------------------------------------------------------------------------------------------------


class Heartbeat:
    """Shows other processes that this one is alive, with some data, until the `with` block ends.

    Args:
        run: the run's id; watchers use the same.
        name: the heartbeat's name. If several processes use one name, only the newest counts, so a killed process may
            be restarted at once.
        ttl: whole seconds, from 1 to 86400, after which a silent heartbeat counts as lost. etcd grants at least 2 s on
            default settings. Renewing costs no writes.
        data: anything that JSON can represent, at most 262,144 characters of JSON.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    If the lease expires because etcd was unreachable for too long, the heartbeat comes back automatically. A heartbeat
    that nobody refers to ends as at the end of its block. Not thread-safe.

    Raises ConfigError (a ValueError) or TypeError for bad arguments, before any socket is opened.
    """

    def __init__(
        self,
        run: str,
        name: str,
        ttl: float,
        data: Any = None,
        *,
        etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None,
        key_prefix: str = KEY_PREFIX,
    ) -> None:
        self._beat = Beat(full_text("name", name), _json(data), left=False)
        self._ttl = lease_seconds("ttl", ttl)
        self._run = Namespace.open(run, etcd, key_prefix)
        self._key: LeasedKey | None = None

    def __enter__(self) -> Heartbeat:
        """Start. Raises EtcdError when etcd does not take the heartbeat within 5 s; EtcdUnavailable if it is down."""
        run, name = self._run, self._beat.name
        with ExitStack() as undo:
            undo.callback(run.close)
            key = LeasedKey(
                run.etcd, self._ttl, lambda lease: heartbeat_key(run.prefix, name, lease), "heartbeats", run.prefix
            )
            undo.callback(key.close, LEAVE_STEP_TIMEOUT)
            _write(key, self._beat)
            undo.pop_all()
        self._key, self._cancel_finalizer = key, concurrency.when_forgotten(self, _leave, key, run, name)
        return self

    def update(self, data: Any) -> None:
        """Replace the data.

        Raises:
            EtcdError: etcd does not take the data within 5 s. It is written later.
            ThreadFailed: the thread that writes has failed. Start another heartbeat.
            TypeError, ConfigError: JSON cannot represent the data, or it is too long.
            RuntimeError: the heartbeat is not running: it is used outside its `with` block.
        """
        self._beat = replace(self._beat, data=_json(data))
        _write(self._running(), self._beat)

    def __exit__(self, *_error: object) -> None:
        """End. Watchers see at once that the heartbeat left.

        Takes a few seconds if etcd is unreachable, and does not raise then: watchers see that the heartbeat expired.
        """
        key, self._key = self._running(), None
        self._cancel_finalizer()
        _leave(key, self._run, self._beat.name)

    def _running(self) -> LeasedKey:
        if self._key is None:
            raise RuntimeError(
                "the heartbeat does not run: use it as a context manager, `with Heartbeat(...) as beat:`"
            )
        return self._key


def _write(key: LeasedKey, beat: Beat) -> None:
    """Raises EtcdError when etcd does not take the beat in time, and ThreadFailed."""
    key.put(encode(beat))
    while not key.wait(HEARTBEAT_TIMEOUT, through_outage=True):
        if (problem := key.problem) is not None:  # else etcd has answered in this very moment
            raise problem


def _leave(key: LeasedKey, run: Namespace, name: str) -> None:
    """Record that the heartbeat leaves, and end it."""
    with suppress(EtcdError, ThreadFailed):
        key.put(encode(Beat(name, "null", left=True)))
        key.wait(LEAVE_STEP_TIMEOUT)
    key.close(LEAVE_STEP_TIMEOUT)
    run.close()


# -- those of others ---------------------------------------------------------------------------------------------------


class HeartbeatWatch(Closing):
    """A blocking iterator over `HeartbeatEvent`s, which ends with `close()` or when its etcd client is closed.

    A context manager. Use it in one thread; only `close()` may be called from others. A watch that nobody refers to is
    closed. Iterating raises EtcdAuthError when etcd refuses the login, or the user lacks the permission.
    """

    def __init__(self, run: Namespace) -> None:
        # Only the thread that iterates, but for `Feed.wake()`:
        self._run, self._feed = run, Feed(run.etcd, heartbeats_span(run.prefix))
        self._closed = concurrency.event()
        self._roll = Roll()
        self._events: deque[HeartbeatEvent] = deque()  # those that came, and were not given out
        # Also for one that was closed: only the thread that iterates may end the feed, and it may never come back.
        self._cancel_finalizer = concurrency.when_forgotten(self, _end_watch, self._feed, run, last=True)

    def __iter__(self) -> Iterator[HeartbeatEvent]:
        return self

    def __next__(self) -> HeartbeatEvent:
        with ExitStack() as end:
            end.callback(self._end)
            while not (self._events or self._closed.is_set()):
                self._events.extend(event for change in self._changes() if (event := self._judge(change)))
            if self._events:
                end.pop_all()
                return self._events.popleft()
        raise StopIteration

    def close(self) -> None:
        """End the iteration, even while another thread waits in it. Idempotent."""
        self._closed.set()
        self._feed.wake()
        self._run.close()

    def _end(self) -> None:
        self._closed.set()
        self._cancel_finalizer()
        _end_watch(self._feed, self._run)

    def _changes(self) -> list[Change]:
        try:
            return self._feed.next(WATCH_CHECK_INTERVAL) or []
        except ClientClosed:
            self._closed.set()
        except EtcdAuthError:
            raise
        except EtcdError as error:
            log.debug("the heartbeats cannot be watched for now: %s", error)
            self._closed.wait(WATCH_RETRY_PAUSE)
        return []

    def _judge(self, change: Change) -> HeartbeatEvent | None:
        kv = change.now or change.was
        assert kv is not None
        try:
            beat = parse_beat(kv.key, kv.value)
            if change.now is not None:
                return self._roll.note(kv.key, kv.create_revision, beat)
            is_end = self._roll.speaks_for(kv.key, beat.name)
            cause = cause_of_death(self._run.etcd, self._run.prefix, kv.lease) if is_end else ""
        except StateError as error:
            log.warning("%s", error)
            return None
        except EtcdError as error:
            log.debug("the cause of a death is not known: %s", error)
            cause = ""
        return self._roll.drop(kv.key, beat.name, cause)


def _end_watch(feed: Feed, run: Namespace) -> None:
    feed.close()
    run.close()


def watch_heartbeats(
    run: str, etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None, *, key_prefix: str = KEY_PREFIX
) -> HeartbeatWatch:
    """Watch the heartbeats of a run. Returns a blocking iterator over `HeartbeatEvent`s, without end until `close()`.

        with ftcoord.watch_heartbeats("job1") as events:
            for event in events:
                print(event.kind, event.name, event.data, event.reason, event.cause)

    The first events are one ``joined`` for each name that is alive; then every change follows. The iterator waits for
    the next event, also through outages of etcd. Close it, or use it as a context manager; `close()` may be called from
    another thread.

    A name is ``lost`` for one of three reasons. ``left``: its heartbeat ended. ``died``: its process died, and its
    sentinel reported the cause, at once. ``expired``: its lease expired, after `ttl` seconds of silence, or longer if
    etcd was down. If etcd compacted its history during an outage, the watch may miss how a heartbeat ended. It then
    reports ``expired``, unless a cause of death is known.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    Raises ConfigError for bad arguments, before any socket is opened. Iterating raises EtcdAuthError when etcd refuses
    the login, or the user lacks the permission.
    """
    return HeartbeatWatch(Namespace.open(run, etcd, key_prefix))


def _json(data: Any) -> str:
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise TypeError(f"data must be what JSON can represent (numbers, texts, lists, dicts): {error}") from None
    except ValueError as error:
        raise ConfigError("data", f"<{type(data).__name__}>", f"give what JSON can represent: {error}") from None
    if len(text) > LONGEST_DATA:
        raise ConfigError(
            "data", f"<{len(text)} characters>", f"give at most {LONGEST_DATA} as JSON; etcd is no file server"
        )
    return text
