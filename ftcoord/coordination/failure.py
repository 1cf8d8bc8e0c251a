"""Failures of calls as gRPC statuses: both manager protocols carry them, and torchft's users see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ftcoord.coordination import checks
from ftcoord.errors import (
    EtcdError,
    NotInQuorum,
    RequestRefused,
    ServerError,
    StateError,
    ThreadFailed,
    ThreadNotStarted,
)

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
            return checks.timed_out(self.message)
        return checks.failed(self.code, self.message)


RANK_NOT_FOUND: Final = Failure("InvalidArgument", "rank not found")
TRANSPORT_ERROR: Final = Failure("Unknown", "transport error")
KILL_REFUSED: Final = Failure(
    "PermissionDenied",
    "this manager takes no kill from its port: switch it on with allow_kill=1 in the job's address, or use"
    " LighthouseClient.kill, which goes through etcd",
)
