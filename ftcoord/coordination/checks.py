"""Checks arguments as torchft's native classes do, and makes errors with their texts.

Failures of calls are gRPC statuses: both manager protocols carry them, and torchft's users see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

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

LARGEST: Final = 2**63 - 1
"""The largest integer of torchft's protocol."""
TEN_YEARS: Final = 10.0 * 365 * 24 * 3600
"""Seconds. A longer timeout is cut to this, because Python's locks refuse timeouts of several hundred years."""


def seconds(name: str, value: object) -> float:
    """A timedelta as seconds, at most TEN_YEARS. Raises TypeError, and ValueError for a negative one."""
    if not isinstance(value, timedelta):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be converted to 'PyDelta'")
    if value < timedelta(0):
        raise ValueError("It is not possible to convert a negative timedelta to a Rust Duration")
    return min(value.total_seconds(), TEN_YEARS)


def string(name: str, value: object) -> str:
    """The value, which must be a str. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be converted to 'PyString'")
    return value


def boolean(name: str, value: object) -> bool:
    """The value, which must be True or False. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be converted to 'PyBool'")
    return value


def integer(name: str, value: object, lowest: int = 0) -> int:
    """The value, which must be an int. Raises TypeError, and OverflowError below `lowest` or above 2**63 - 1."""
    if not isinstance(value, int):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be interpreted as an integer")
    if not lowest <= value <= LARGEST:
        raise OverflowError(f"argument {name!r}: {value} is not from {lowest} to {LARGEST}")
    return int(value)


def timed_out(why: str) -> TimeoutError:
    """The error of a call that timed out; users match the text before `why`."""
    return TimeoutError(f"{_status('Cancelled', 'Timeout expired')}: {why}")


def failed(code: str, message: str) -> RuntimeError:
    """The error of a call that failed for another reason; `code` is gRPC's name of the status."""
    return RuntimeError(_status(code, message))


def _status(code: str, message: str) -> str:
    return f'status: {code}, message: "{neutral(message)}", details: [], metadata: MetadataMap {{ headers: {{}} }}'


TIMED_OUT: Final = ("Cancelled", "DeadlineExceeded")
KNOWN: Final = (TimeoutError, NotInQuorum, StateError, ThreadFailed, ThreadNotStarted, ServerError, EtcdError)
"""The errors with which a call to a job or a manager may fail."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed; `code` is gRPC's name of the status, such as `InvalidArgument`."""

    code: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure to report to the caller for an error."""
        if isinstance(error, TimeoutError):
            return cls("Cancelled", str(error))
        if isinstance(error, NotInQuorum):
            return cls("NotFound", str(error))
        if isinstance(error, RequestRefused):
            return cls("InvalidArgument", str(error))
        if isinstance(error, (ServerError, EtcdError)):
            return cls("Unavailable", str(error))
        return cls("Internal", str(error))

    def error(self) -> Exception:
        """A TimeoutError or a RuntimeError with torchft's text."""
        if self.code in TIMED_OUT:
            return timed_out(self.message)
        return failed(self.code, self.message)


RANK_NOT_FOUND: Final = Failure("InvalidArgument", "rank not found")
TRANSPORT_ERROR: Final = Failure("Unknown", "transport error")
KILL_REFUSED: Final = Failure(
    "PermissionDenied",
    "this manager takes no kill from its port: switch it on with allow_kill=1 in the job's address, or use"
    " LighthouseClient.kill, which goes through etcd",
)
