"""Every exception ftcoord raises on its own account.

Each message says what happened, to what, and what to do next. Nothing here imports torch or grpc: the
rendezvous layer translates these into torch's own error types where torch's API promises those.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

_E = TypeVar("_E", bound="FtcoordError")

MORE_THREADS: Final = "raise the limit on threads (ulimit -u, or the container's limit on processes) if it is reached"
"""What to do where no thread can be started."""


class FtcoordError(Exception):
    """The root of the tree: catch this to catch everything ftcoord raises.

    Each can be copied, also into another process, as multiprocessing and concurrent.futures do: it has the same text
    and attributes there.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python itself would call the constructor with the finished text, and a pool that cannot read an error breaks.
        return _again, (type(self), self.args), self._state()

    def _state(self) -> dict[str, Any]:
        """The attributes, as they are to be in another process."""
        return self.__dict__


def _again(kind: type[_E], args: tuple[object, ...]) -> _E:
    """An error that was copied, without its attributes."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


_PLAIN: Final = (type(None), bool, int, float, str, bytes, timedelta, type(Path()))


def _is_plain(value: object) -> bool:
    """Whether every process can read a copy of it. A class of the user's, even one that derives from these, may not."""
    if type(value) is dict:
        return all(_is_plain(inner) for item in value.items() for inner in item)
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(inner) for inner in value)  # type: ignore[attr-defined]
    return type(value) in _PLAIN


class ConfigError(FtcoordError, ValueError):
    """A setting is wrong; raised before any socket is opened.

    Args:
        key: the setting, as the user wrote it (``lease_ttl``, ``FTCOORD_ENDPOINTS``).
        value: what it was set to (never a secret). A copy of the error has the `repr` of what is no plain value, since
            another process may not be able to read that.
        allowed: what would have been accepted.
    """

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}={value!r} is not valid: {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "value": self.value if _is_plain(self.value) else repr(self.value)}


class ForkedProcessError(FtcoordError, RuntimeError):
    """A forked child used what belongs to its parent, or wanted an etcd client though its parent had one.

    gRPC does not survive ``fork()``, with no setting: its locks are copied as they are, its threads are not.
    """

    @classmethod
    def of(cls, what: str) -> ForkedProcessError:
        """The error that says what is the parent's, and what to do."""
        return cls(
            f"{what}, and gRPC does not survive fork(): start this process with the 'spawn' or 'forkserver' method, or"
            " fork it before the parent makes its first etcd client"
        )


class StateError(FtcoordError):
    """A key holds what this version of ftcoord cannot read; the key is named and left alone."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(
            f"etcd key {key!r} {problem}; look at it with `etcdctl get {key}`, or choose another run id or key_prefix"
        )
        self.key = key


class ServerError(FtcoordError, RuntimeError):
    """A server of ftcoord's (an embedded etcd, a gateway) could not be found, started or reached."""


class ThreadNotStarted(FtcoordError, RuntimeError):
    """A thread that ftcoord needs cannot be started: there are too many, or the interpreter ends.

    Args:
        name: of the thread.
        error: Python's.
    """

    def __init__(self, name: str, error: RuntimeError) -> None:
        super().__init__(f"the thread {name!r} cannot be started: {error}; {MORE_THREADS}")


class ThreadFailed(FtcoordError, RuntimeError):
    """A thread of ftcoord ended by an error that nobody foresaw, which is its cause and was logged.

    Args:
        what: what the thread did.
        error: what ended it.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(
            f"the thread that {what} failed: {error!r}; this is a bug of ftcoord: report it, with the traceback from"
            " the log. Trying again starts a new one"
        )


class EtcdError(FtcoordError):
    """A call to etcd failed. Raised itself for answers that no subclass describes."""


class EtcdUnavailable(EtcdError, ConnectionError):
    """No member answered in time. The call had no effect: it is safe to make it again."""


class ClientClosed(EtcdError):
    """The client was closed, so no later call will be answered, and none must be repeated. Make a new client."""


class OutcomeUnknown(EtcdError):
    """A write was sent but not answered: it may or may not have happened. Re-read before writing again."""


class EtcdAuthError(EtcdError, PermissionError):
    """etcd refused the user, the password or the permission."""


class EtcdNoSpace(EtcdError):
    """etcd's quota is used up (NOSPACE): it takes no writes until somebody makes room.

    A write that raises it may have happened all the same, as with OutcomeUnknown: etcd makes what it had let in before,
    and answers NOSPACE to that too. Reads still work, so re-read before writing again.
    """


class RequestRefused(EtcdError, ValueError):
    """etcd will never accept this request (too large, malformed): the same call fails again."""


class Compacted(EtcdError):
    """The revision asked for was compacted away; list the keys again.

    Args:
        compact_revision: the oldest revision that etcd can still watch from.
    """

    def __init__(self, compact_revision: int) -> None:
        super().__init__(f"etcd has compacted its history up to revision {compact_revision}; list the keys again")
        self.compact_revision = compact_revision


class Rewound(Compacted):
    """etcd's history is shorter than it was; list the keys again.

    Args:
        revision: where etcd is now.
        seen: where it was before.
    """

    def __init__(self, revision: int, seen: int) -> None:
        EtcdError.__init__(
            self,
            f"etcd is at revision {revision} and was at {seen} before: it lost writes, or another etcd has its address;"
            f" list the keys again",
        )
        self.compact_revision = revision


class LeaseLost(EtcdError):
    """The lease is gone, and with it every key put under it. Take a new lease and join again."""


class RoundOver(FtcoordError):
    """A store belongs to a round that a newer round has replaced; its writes are refused for good."""


class NotInQuorum(FtcoordError, LookupError):
    """A replica has no seat in the quorum that it was given, so there is no rank for it. Ask for the next quorum.

    Args:
        replica_id: the replica that was looked up. The message is torchft's own: its users search for it.
    """

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"replica {replica_id} not participating in returned quorum")
        self.replica_id = replica_id
