"""How the values of a store lie in etcd: as they are, but for counters, which etcd counts itself.

A counter says how to read its number off the key's *version* (how often the key was put since it was created):

    number = base + step * version

So all who add the same amount put the same bytes, guarded by nothing but these bytes being there: they need not know
the number, and none of them ever fails because of another.
"""

from __future__ import annotations

from typing import Final

_MARK: Final = b"\0ftcoord"
_PLAIN: Final = _MARK + b"="
_COUNTER: Final = _MARK + b"+"


def as_bytes(value: str | bytes) -> bytes:
    """A user's value as bytes. Raises TypeError, also for a number: bytes(5) would be five zeros."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a value is str or bytes, not {type(value).__name__}")


def stored(value: bytes) -> bytes:
    """The bytes to put for a value."""
    return _PLAIN + value if value.startswith(_MARK) else value


def counter(step: int, number: int, version: int) -> bytes:
    """The bytes to put for a counter that is `number` at `version` of its key, and grows by `step` with each put."""
    return _COUNTER + b"%d:%d" % (number - step * version, step)


def counts_by(value: bytes, step: int) -> bool:
    """Whether these are the bytes of a counter with this step."""
    return value.startswith(_COUNTER) and value.endswith(b":%d" % step)


def plain(value: bytes, version: int) -> bytes:
    """The value that these bytes stand for at this version of their key. Raises ValueError for a broken counter."""
    if value.startswith(_PLAIN):
        return value.removeprefix(_PLAIN)
    if value.startswith(_COUNTER):
        base, step = value.removeprefix(_COUNTER).split(b":")
        return b"%d" % (int(base) + int(step) * version)
    return value
