"""Checks arguments as torchft's native classes do, and makes errors with their texts.

Failures of calls are gRPC statuses: both manager protocols carry them, and torchft's users see them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from ftcoord.errors import (
    EtcdError,
    NotInQuorum,
    RequestRefused,
    ServerError,
    StateError,
    ThreadFailed,
    ThreadNotStarted,
)
from ftcoord.escaping import neutral

T = TypeVar("T")

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


TIMED_OUT: Final = ("Cancelled", "DeadlineExceeded")
KNOWN: Final = (TimeoutError, NotInQuorum, StateError, ThreadFailed, ThreadNotStarted, ServerError, EtcdError)
"""The errors with which a call to a job or a manager may fail."""
_CODES: Final = (
    (TimeoutError, "Cancelled"),
    (NotInQuorum, "NotFound"),
    (RequestRefused, "InvalidArgument"),
    ((ServerError, EtcdError), "Unavailable"),
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
