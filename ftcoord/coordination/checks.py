"""Arguments checked as torchft's native classes check them, and errors in their words."""

from __future__ import annotations

from datetime import timedelta

LARGEST = 2**63 - 1


def seconds(name: str, value: object) -> float:
    """A timedelta as seconds. Raises TypeError, and ValueError for a negative one."""
    if not isinstance(value, timedelta):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be converted to 'PyDelta'")
    if value < timedelta(0):
        raise ValueError("It is not possible to convert a negative timedelta to a Rust Duration")
    return value.total_seconds()


def string(name: str, value: object) -> str:
    """Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be converted to 'PyString'")
    return value


def boolean(name: str, value: object) -> bool:
    """Raises TypeError for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be converted to 'PyBool'")
    return value


def integer(name: str, value: object, lowest: int = 0) -> int:
    """Raises TypeError, and OverflowError below `lowest` or above 2**63 - 1."""
    if not isinstance(value, int):
        raise TypeError(f"argument {name!r}: {type(value).__name__!r} object cannot be interpreted as an integer")
    if not lowest <= value <= LARGEST:
        raise OverflowError(f"argument {name!r}: {value} is not from {lowest} to {LARGEST}")
    return int(value)


def timed_out(why: str) -> TimeoutError:
    """What a call raises whose time is over; users match what comes before `why`."""
    return TimeoutError(f"{_status('Cancelled', 'Timeout expired')}: {why}")


def failed(code: str, message: str) -> RuntimeError:
    """What a call raises that went wrong otherwise; `code` is gRPC's name of the status."""
    return RuntimeError(_status(code, message))


def _status(code: str, message: str) -> str:
    return f'status: {code}, message: "{message}", details: [], metadata: MetadataMap {{ headers: {{}} }}'
