"""Records as JSON in etcd: written in one way only, and read strictly.

A record is a frozen dataclass of texts, numbers, flags, other records and tuples of these. What does not have exactly
its fields and types raises StateError naming the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeVar, get_origin, get_type_hints

from ftcoord.errors import StateError

V2: Final = 2
"""The layout of quorums, and of rounds whose roll lies beside them. A ftcoord that reads v1 only refuses them, and says
why."""
VERSION: Final = 1
"""Of the layout: in every record that has a key of its own, unless the record says otherwise."""
LARGEST: Final = 2**63 - 1
"""Of the numbers in a record."""

LARGEST_COUNT: Final = 10**18
"""Of the numbers that are counted on from, such as a term's: there is room for more."""

Record = TypeVar("Record")
Raw = Mapping[str, Any]
"""A JSON object as `json` gives it."""


def dump(record: object, version: int = VERSION) -> bytes:
    """The record as JSON, with the layout's version; one record is always the same bytes."""
    raw = {"v": version, **_plain(record)}
    return _encode(raw).encode()


def load(key: str, value: bytes, version: int = VERSION) -> Raw:
    """The fields of a record that has a key of its own, not yet checked. Raises StateError."""
    return load_one_of(key, value, (version,))[1]


def load_one_of(key: str, value: bytes, versions: Sequence[int]) -> tuple[int, Raw]:
    """The layout's version of a record that has a key of its own, and its fields, not yet checked. Raises StateError,
    also for a version that is none of these."""
    try:
        raw = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise StateError(key, "does not hold JSON, so it is not ftcoord's") from error
    if not isinstance(raw, dict):
        raise StateError(key, "does not hold a JSON object, so it is not ftcoord's")
    version = raw.pop("v", None)
    if type(version) is not int or version not in versions:
        read = " and ".join(map(str, versions))
        raise StateError(
            key, f"has layout version {version!r}, and this ftcoord reads {read}: use one release in all of a job"
        )
    return version, raw


def build(kind: type[Record], key: str, raw: Raw) -> Record:
    """The record of these fields; fields that are records or tuples must have been built before. Raises StateError."""
    form = _form_of(kind)
    if raw.keys() == form.types.keys():
        values = form.values(raw)
        if tuple(map(type, values)) == form.kinds and all(-LARGEST <= values[at] <= LARGEST for at in form.numbers):
            return kind(*values)
    raise StateError(key, _problem(kind.__name__, raw, form.types))


def _problem(record: str, raw: Raw, wanted: Mapping[str, type]) -> str:
    """Why `build` takes no such fields."""
    if raw.keys() != wanted.keys():
        odd = ", ".join(sorted(raw.keys() ^ wanted.keys()))
        return f"does not have the fields of a {record} (differing: {odd})"
    for name, value in raw.items():
        if type(value) is not wanted[name] or (type(value) is int and abs(value) > LARGEST):
            return f"has a {name} that is no {wanted[name].__name__}"
    raise AssertionError("nothing is wrong")


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


def numbers(key: str, raw: Raw, name: str) -> tuple[int, ...]:
    """The field `name`, which must be a list of numbers. Raises StateError."""
    items = raw.get(name)
    if not isinstance(items, list) or not all(type(item) is int and abs(item) <= LARGEST for item in items):
        raise StateError(key, f"has no list of {name}")
    return tuple(items)


def check_number(key: str, number: int) -> None:
    """Raises StateError for a number that nobody has counted to."""
    if not 0 <= number <= LARGEST_COUNT:
        raise StateError(key, f"has the number {number}, which nobody has counted to, so it is not ftcoord's")


def json_problem(text: str) -> str:
    """Why a text is no JSON; nothing if it is, or is empty."""
    if not text:
        return ""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


def _items(kind: type, key: str, raw: Raw, name: str) -> list[Any]:
    items = raw.get(name)
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise StateError(key, f"has no list of {name}")
    return items


def _plain(record: object) -> dict[str, Any]:
    form = _form_of(type(record))
    return dict(zip(form.types, form.attributes(record), strict=True))


_encode: Final = json.JSONEncoder(default=_plain, separators=(",", ":"), sort_keys=True).encode


class _Form:
    """What the fields of a record must be (of a tuple, only that it is one), and how to take them all at once."""

    def __init__(self, kind: type) -> None:
        self.types = {name: get_origin(hint) or hint for name, hint in get_type_hints(kind).items()}
        self.kinds = tuple(self.types.values())
        self.numbers = [at for at, wanted in enumerate(self.kinds) if wanted is int]
        self.values: Callable[[Raw], tuple[Any, ...]] = _all(itemgetter, tuple(self.types))
        self.attributes: Callable[[object], tuple[Any, ...]] = _all(attrgetter, tuple(self.types))


def _all(getter: Callable[..., Any], names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    get = getter(*names)
    return get if len(names) > 1 else lambda record: (get(record),)


_forms: Final[dict[type, _Form]] = {}


def _form_of(kind: type) -> _Form:
    form = _forms.get(kind)
    if form is None:
        form = _forms[kind] = _Form(kind)
    return form
