"""What torchft's coordination API (`torchft.coordination`, torchft 0.2.0 and its nightly builds) gives and takes: its
values, the checks of its arguments, and its errors with their texts, one line that tells everything, without a chain.

https://docs.pytorch.org/torchft/coordination.html. Failures of calls are gRPC statuses: both manager protocols carry
them, and torchft's users see them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, TypeVar

from ftcoord import errors
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.escaping import neutral

T = TypeVar("T")

# -- values ------------------------------------------------------------------------------------------------------------


# As with torchft's native classes, any name but a declared one raises AttributeError, and each is equal to itself only.


@dataclass(slots=True, eq=False)
class Timestamp:
    """A time on the wall clock of the process that decided. For information only: no decision depends on it.

    Args:
        seconds: seconds since 1970.
        nanos: nanoseconds within that second.
    """

    seconds: int
    nanos: int


@dataclass(slots=True, eq=False)
class QuorumMember:
    """One replica of a quorum, with the values of its request.

    Args:
        replica_id: its name, which no other replica has.
        address: the address of its manager.
        store_address: the address of its store.
        step: the training step that it is at.
        world_size: the number of its ranks.
        shrink_only: whether it asked to admit no new replicas.
        data: its other data, as read from JSON, so keys are str; None if it sent none.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Any, Any] | None = None


def timestamp(quorum: QuorumRecord) -> Timestamp:
    """When a quorum was decided, on the decider's wall clock."""
    seconds, fraction = divmod(quorum.created, 1)
    return Timestamp(int(seconds), int(fraction * 1e9))


class Quorum:
    """The replicas that train together, equal to itself only.

    Args:
        record: the decided record.

    `quorum_id` grows whenever the members change, or one of them failed to commit; an id is never used again.
    `participants` are the members, sorted by the bytes of their replica ids. `created` is when it was decided.
    """

    def __init__(self, record: QuorumRecord) -> None:
        self.quorum_id, self.created = record.id, timestamp(record)
        self._record = record

    @cached_property
    def participants(self) -> list[QuorumMember]:  # not before somebody reads them: a step of many replicas costs less
        return [
            QuorumMember(
                one.replica_id,
                without_token(one.address),
                one.store_address,
                one.step,
                one.world_size,
                one.shrink_only,
                json.loads(one.data) if one.data else None,
            )
            for one in self._record.requests
        ]

    def __repr__(self) -> str:
        return f"Quorum(quorum_id={self.quorum_id}, participants={self.participants}, created={self.created})"


# -- addresses of managers ---------------------------------------------------------------------------------------------


MOST: Final = 100_000
"""The most tokens that are kept. Beyond that all are forgotten: a quorum brings those in use again."""

_tokens: dict[str, str] = {}  # by address; any thread, one step of a dict at a time


def without_token(address: str) -> str:
    """The address as others may see it. Its token is remembered."""
    plain, token = parted(address)
    if token:
        if len(_tokens) >= MOST:
            _tokens.clear()
        _tokens[plain] = token
    return plain


def with_known_token(address: str) -> tuple[str, str]:
    """An address without its token, and the token: that of the address, else the remembered one; empty if none is
    known."""
    plain, token = parted(address)
    return plain, token or _tokens.get(plain, "")


# -- arguments, checked as torchft's native classes do -----------------------------------------------------------------


LARGEST: Final = 2**63 - 1
"""The largest integer of torchft's protocol."""
TEN_YEARS: Final = 10.0 * 365 * 24 * 3600
"""Seconds. A longer timeout is cut to this, because Python's locks refuse timeouts of several hundred years."""


def _typed(name: str, value: object, kind: type[T], wanted: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be {wanted}")
    return value


def seconds(name: str, value: object) -> float:
    """A timedelta as seconds, at most TEN_YEARS. Raises TypeError, and ValueError for a negative one."""
    limit = _typed(name, value, timedelta, "converted to 'PyDelta'")
    if limit < timedelta(0):
        raise ValueError("It is not possible to convert a negative timedelta to a Rust Duration")
    return min(limit.total_seconds(), TEN_YEARS)


def string(name: str, value: object) -> str:
    """The value, which must be a str. Raises TypeError."""
    return _typed(name, value, str, "converted to 'PyString'")


def boolean(name: str, value: object) -> bool:
    """The value, which must be True or False. Raises TypeError."""
    return _typed(name, value, bool, "converted to 'PyBool'")


def integer(name: str, value: object, lowest: int = 0) -> int:
    """The value, which must be an int. Raises TypeError, and OverflowError below `lowest` or above 2**63 - 1."""
    number = int(_typed(name, value, int, "interpreted as an integer"))
    if not lowest <= number <= LARGEST:
        raise OverflowError(f"argument {name!r}: {number} is not from {lowest} to {LARGEST}")
    return number


def json_text(data: object) -> str:
    """The `data` of a request as JSON. Raises TypeError if it is not a dict, RuntimeError if JSON cannot represent
    it."""
    if data is None:
        return ""
    try:
        return json.dumps(_typed("data", data, dict, "converted to 'PyDict'"))
    except (TypeError, ValueError) as error:
        if not isinstance(data, dict):
            raise
        raise Failure("Internal", f"{type(error).__name__}: {error}").error() from None


# -- errors ------------------------------------------------------------------------------------------------------------


TIMED_OUT: Final = ("Cancelled", "DeadlineExceeded")
KNOWN: Final = (
    TimeoutError,
    errors.NotInQuorum,
    errors.StateError,
    errors.ThreadFailed,
    errors.ThreadNotStarted,
    errors.ServerError,
    errors.EtcdError,
)
"""The errors with which a call to a job or a manager may fail."""
_CODES: Final = (
    (TimeoutError, "Cancelled"),
    (errors.NotInQuorum, "NotFound"),
    (errors.RequestRefused, "InvalidArgument"),
    ((errors.ServerError, errors.EtcdError), "Unavailable"),
)
"""gRPC's names of statuses for kinds of errors; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed; `code` is gRPC's name of the status, such as `InvalidArgument`."""

    code: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure to report to the caller for an error."""
        return cls(next((code for kinds, code in _CODES if isinstance(error, kinds)), "Internal"), str(error))

    def error(self) -> Exception:
        """A TimeoutError or a RuntimeError with torchft's text: users match its beginning."""
        late = self.code in TIMED_OUT
        code, message = ("Cancelled", "Timeout expired") if late else (self.code, neutral(self.message))
        text = f'status: {code}, message: "{message}", details: [], metadata: MetadataMap {{ headers: {{}} }}'
        return TimeoutError(f"{text}: {self.message}") if late else RuntimeError(text)


RANK_NOT_FOUND: Final = Failure("InvalidArgument", "rank not found")
TRANSPORT_ERROR: Final = Failure("Unknown", "transport error")
KILL_REFUSED: Final = Failure(
    "PermissionDenied",
    "this manager takes no kill from its port: switch it on with allow_kill=1 in the job's address, or use"
    " LighthouseClient.kill, which goes through etcd",
)


def unreachable(address: str, connect_timeout: float, problem: object, who: str = "etcd") -> RuntimeError:
    """The error for an address that nobody answers at in time. Users match the beginning of its text."""
    return RuntimeError(
        f"failed to connect to {address.partition('?')[0]} within timeout of {connect_timeout:g}s; verify the"
        f" address and that {who} is up: {problem}"
    )


def check_process(pid: int) -> None:
    """Raises ForkedProcessError in any process but `pid`. Call it before taking a lock, which a forked child may never
    get."""
    if os.getpid() != pid:
        raise errors.ForkedProcessError(
            f"this belongs to process {pid}, which was forked, and a child cannot use its connections: start processes"
            f" by multiprocessing's 'spawn', or fork before you use ftcoord"
        )


@contextlib.contextmanager
def torchft_errors() -> Iterator[None]:
    """Translates ftcoord's errors into TimeoutError and RuntimeError with torchft's texts."""
    try:
        yield
    except KNOWN as error:
        raise Failure.of(error).error() from None
