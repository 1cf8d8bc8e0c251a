"""Records as JSON in etcd: written in one way only, and read strictly.

A record is a frozen dataclass of texts, numbers, flags, other records and tuples of these. What does not have exactly
its fields and types raises StateError naming the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_origin, get_type_hints

from ftcoord.errors import StateError

VERSION: Final = 1
"""Of the layout: in every record that has a key of its own."""
LARGEST: Final = 2**63 - 1
"""Of the numbers in a record."""

Record = TypeVar("Record")
Raw = Mapping[str, Any]
"""A JSON object as `json` gives it."""


def dump(record: object) -> bytes:
    """The record as JSON, with the layout's version; one record is always the same bytes."""
    raw = {"v": VERSION, **_plain(record)}
    return json.dumps(raw, default=_plain, separators=(",", ":"), sort_keys=True).encode()


def load(key: str, value: bytes) -> Raw:
    """The fields of a record that has a key of its own, not yet checked. Raises StateError."""
    try:
        raw = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise StateError(key, "does not hold JSON, so it is not ftcoord's") from error
    if not isinstance(raw, dict):
        raise StateError(key, "does not hold a JSON object, so it is not ftcoord's")
    version = raw.pop("v", None)
    if type(version) is not int or version != VERSION:
        raise StateError(
            key, f"has layout version {version!r}, and this ftcoord reads {VERSION}: use one release in all of a job"
        )
    return raw


def build(kind: type[Record], key: str, raw: Raw) -> Record:
    """The record of these fields; fields that are records or tuples must have been built before. Raises StateError."""
    wanted = _types_of(kind)
    if raw.keys() != wanted.keys():
        odd = ", ".join(sorted(raw.keys() ^ wanted.keys()))
        raise StateError(key, f"does not have the fields of a {kind.__name__} (differing: {odd})")
    for name, value in raw.items():
        if type(value) is not wanted[name] or (type(value) is int and abs(value) > LARGEST):
            raise StateError(key, f"has a {name} that is no {wanted[name].__name__}")
    return kind(**raw)


def build_each(kind: type[Record], key: str, raw: Raw, name: str) -> tuple[Record, ...]:
    """The records in the list that the field `name` is. Raises StateError."""
    return tuple(build(kind, key, item) for item in objects(key, raw, name))


def objects(key: str, raw: Raw, name: str) -> list[Raw]:
    """The field `name`, which must be a list of objects. Raises StateError."""
    return _items(dict, key, raw, name)


def part(key: str, raw: Raw, name: str) -> Raw:
    """The field `name`, which must be an object. Raises StateError."""
    found = raw.get(name)
    if not isinstance(found, dict):
        raise StateError(key, f"has no {name}")
    return found


def texts(key: str, raw: Raw, name: str) -> tuple[str, ...]:
    """The field `name`, which must be a list of texts. Raises StateError."""
    return tuple(_items(str, key, raw, name))


def json_problem(text: str) -> str:
    """Why a text is no JSON; nothing if it is, or is empty."""
    try:
        json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


def _items(kind: type, key: str, raw: Raw, name: str) -> list[Any]:
    items = raw.get(name)
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise StateError(key, f"has no list of {name}")
    return items


def _plain(record: object) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _types_of(type(record))}


_types: Final[dict[type, dict[str, type]]] = {}


def _types_of(kind: type) -> dict[str, type]:
    """What each field of a record must be; of a tuple, only that it is one."""
    types = _types.get(kind)
    if types is None:
        types = _types[kind] = {name: get_origin(hint) or hint for name, hint in get_type_hints(kind).items()}
    return types
