"""The base class of the recipes: a participant of a group, which leaves when the user's object ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig, lease_seconds
from ftcoord.errors import ForkedProcessError
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.group.membership import ParticipantOptions
from ftcoord.primitives.group.participant import Participant
from ftcoord.primitives.group.use import Use

R = TypeVar("R")
A = TypeVar("A")

EtcdLike = Etcd | EtcdConfig | str | Sequence[str] | None
RECIPE_RECORD_TTL: Final = 24 * 3600
"""Seconds that the last decision outlives the last member, so that no number is given again."""
REQUEST_TIMEOUT: Final = 5.0
"""Seconds that one request to etcd may take."""
LEAVE_TIMEOUT: Final = 2.0
"""Seconds that leaving may take. If etcd is unreachable for longer, the lease expires."""
GIVE_UP_TIMEOUT: Final = 0.5
"""The same at the end of a call that failed, whose caller may have waited for all of its timeout."""


class RecipeMember(Closing, Generic[R, A]):
    """A context manager around a participant. It leaves with `close()`, at the end of the block, or when dropped.

    `participant` is for the classes of this package.

    Args:
        use_of: makes the use; called with the prefix of the run's keys.
        run, etcd, key_prefix, lease_ttl: the user's arguments.

    Raises ConfigError for bad arguments, before any socket is opened.
    """

    def __init__(
        self, use_of: Callable[[str], Use[R, A]], run: str, etcd: EtcdLike, key_prefix: str, lease_ttl: int
    ) -> None:
        options = ParticipantOptions(lease_seconds("lease_ttl", lease_ttl), RECIPE_RECORD_TTL, REQUEST_TIMEOUT)
        namespace = Namespace.open(run, etcd, key_prefix)
        use = use_of(namespace.prefix)
        self._namespace, self._prefix, self._pid = namespace, use.prefix, os.getpid()  # these never change
        self.participant = Participant(namespace.etcd, use, options)
        self._lock = concurrency.lock("RecipeMember._lock")
        self._calls = 0  # guarded by _lock: the calls that wait
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self.participant, namespace, self._pid)

    def close(self) -> None:
        """Leave at once. Calls that wait, and later ones, raise FtcoordError.

        Takes up to 2 s if etcd is unreachable, and does not raise then: the lease expires. Idempotent; does nothing in
        a forked child.
        """
        self._cancel_finalizer()
        _end(self.participant, self._namespace, self._pid)

    @property
    def is_own_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    @contextlib.contextmanager
    def _or_leave(self) -> Iterator[None]:
        """Leave if the block raises, also by an interrupt, unless another call still waits: that one would end too."""
        with self._lock:
            self._calls += 1
        is_done = False
        try:
            yield
            is_done = True
        finally:
            with self._lock:
                self._calls -= 1
                leaves = not is_done and not self._calls
            if leaves:
                self.participant.leave(GIVE_UP_TIMEOUT)

    def _check_process(self) -> None:
        if not self.is_own_process:
            raise ForkedProcessError.of(f"this {type(self).__name__.lower()} belongs to the parent process")


def _end(participant: Participant[R, A], namespace: Namespace, pid: int) -> None:
    if os.getpid() != pid:
        return
    participant.stop()
    participant.leave(LEAVE_TIMEOUT)
    namespace.close()
