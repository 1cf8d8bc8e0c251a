"""Every exception class of ftcoord.

Each message says what happened, to what, and what to do next. This module imports neither torch nor grpc: the
rendezvous layer translates these errors into torch's own types where torch's API promises those.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from ftcoord.escaping import neutral

NO_ETCD: Final = "no etcd at"
"""How the errors begin that state why an endpoint cannot be used, and what to do."""

_E = TypeVar("_E", bound="FtcoordError")

MORE_THREADS: Final = "raise the limit on threads (ulimit -u, or the container's limit on processes) if it is reached"
"""What to do when no thread can be started."""


class FtcoordError(Exception):
    """The root of the tree: catch this to catch everything ftcoord raises.

    Errors can be copied into another process, as multiprocessing and concurrent.futures do. The copy has the same text
    and attributes. `str` shows what others wrote with escapes, on one line.
    """

    def __str__(self) -> str:
        return neutral(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        # Python itself would call the constructor with the finished text, and a pool that cannot read an error breaks.
        return _again, (type(self), self.args), self._state()

    def _state(self) -> dict[str, Any]:
        """The attributes of a copy in another process."""
        return self.__dict__


def _again(kind: type[_E], args: tuple[object, ...]) -> _E:
    """A copy of an error, without its attributes."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


_PLAIN: Final = (type(None), bool, int, float, str, bytes)
"""What every process can read a copy of. A process may lack a user's class, even one that derives from these."""


class ConfigError(FtcoordError, ValueError):
    """A setting is wrong; raised before any socket is opened.

    Args:
        key: the setting, as the user wrote it (``lease_ttl``, ``FTCOORD_ENDPOINTS``).
        value: what it was set to (never a secret); None if it is missing. A copy of the error in
            another process has the `repr` of what is no plain text or number.
        allowed: what would have been accepted.
    """

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(
            f"{key} is missing: {allowed}" if value is None else f"{key}={value!r} is not valid: {allowed}"
        )
        self.key = key
        self.value = value
        self.allowed = allowed

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "value": self.value if type(self.value) in _PLAIN else repr(self.value)}


class ForkedProcessError(FtcoordError, RuntimeError):
    """A forked child used an object of its parent, or made an etcd client although its parent had one.

    gRPC does not survive ``fork()``, whatever its settings: the child copies its locks, but not its threads.
    """

    @classmethod
    def of(cls, what: str) -> ForkedProcessError:
        """The error for an object of the parent; `what` names it."""
        return cls(
            f"{what}, and gRPC does not survive fork(): start this process with the 'spawn' or 'forkserver' method, or"
            " fork it before the parent makes its first etcd client"
        )


class StateError(FtcoordError):
    """A key holds a value that this version of ftcoord cannot read. The key is left as it is.

    Args:
        key: the key.
        problem: what is wrong with its value.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(
            f"etcd key {key!r} {problem}; look at it with `etcdctl get {key}`, or choose another run id or key_prefix"
        )
        self.key = key


class OtherLayout(StateError):
    """A key holds a value of another layout: another release of ftcoord takes part in the job."""


class ServerError(FtcoordError, RuntimeError):
    """An embedded etcd or a gateway could not be found, started or reached."""


class ThreadNotStarted(FtcoordError, RuntimeError):
    """A thread that ftcoord needs cannot be started: there are too many, or the interpreter is shutting down.

    Args:
        name: the thread's name.
        error: the error that Python raised.
    """

    def __init__(self, name: str, error: RuntimeError) -> None:
        super().__init__(f"the thread {name!r} cannot be started: {error}; {MORE_THREADS}")


class ThreadFailed(FtcoordError, RuntimeError):
    """A thread of ftcoord ended with an unexpected error. The error was logged, and is this one's ``__cause__``.

    Args:
        what: what the thread did.
        error: the error that ended it.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(
            f"the thread that {what} failed: {error!r}; this is a bug of ftcoord: report it, with the traceback from"
            " the log. Trying again starts a new one"
        )


class EtcdError(FtcoordError):
    """A call to etcd failed. Errors of etcd that no subclass describes are raised as this class."""


class EtcdUnavailable(EtcdError, ConnectionError):
    """No member answered in time. The call had no effect: it is safe to make it again."""


class WrongEndpoint(EtcdUnavailable):
    """Something answers at an endpoint, but it is no etcd, or the TLS settings do not fit it. Waiting does not help."""


class ClientClosed(EtcdError):
    """The client was closed. Raised by every later call, and by calls in flight. Make a new client.

    A closed `EtcdTimerClient` raises it too.
    """


class OutcomeUnknown(EtcdError):
    """A write was sent but not answered: it may or may not have happened. Re-read before writing again."""


class EtcdAuthError(EtcdError, PermissionError):
    """etcd refused the login, or the user lacks a permission. Any call to etcd may raise it."""


class EtcdNoSpace(EtcdError):
    """etcd's quota is used up (NOSPACE): it takes no writes until somebody makes room.

    The write may have happened, as with OutcomeUnknown: etcd also answers NOSPACE to writes that it had admitted
    before, and then applies. Reads still work, so re-read before writing again.
    """


class RequestRefused(EtcdError, ValueError):
    """etcd will never accept this request, because it is too large or malformed. Do not repeat it."""


class Compacted(EtcdError):
    """A watch asked for a revision that etcd has compacted away. List the keys again.

    Args:
        compact_revision: the oldest revision from which etcd can still watch.
    """

    def __init__(self, compact_revision: int) -> None:
        super().__init__(f"etcd has compacted its history up to revision {compact_revision}; list the keys again")
        self.compact_revision = compact_revision


class Rewound(Compacted):
    """etcd's revision went back: it lost writes, or another etcd has its address. List the keys again.

    Args:
        revision: etcd's revision now; kept as `compact_revision`.
        seen: its revision before; only in the message.
    """

    def __init__(self, revision: int, seen: int) -> None:
        EtcdError.__init__(
            self,
            f"etcd is at revision {revision} and was at {seen} before: it lost writes, or another etcd has its address;"
            f" list the keys again",
        )
        self.compact_revision = revision


class LeaseLost(EtcdError):
    """The lease is gone, and so are its keys. Take a new lease and join again.

    Raised when a lease is renewed, and when a key is put under it.
    """


class RoundOver(FtcoordError):
    """A store belongs to a round that a newer round has replaced. Its writes are refused for good."""


class NotInQuorum(FtcoordError, LookupError):
    """A replica has no seat in the quorum that it was given, so it has no rank. Ask for the next quorum.

    The message is torchft's own, because users search for it.

    Args:
        replica_id: the replica that was looked up.
    """

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"replica {replica_id} not participating in returned quorum")
        self.replica_id = replica_id
