"""Records as JSON in etcd: written in one way only, and read strictly.

A record is a frozen dataclass of texts, numbers, flags, other records and tuples of these. A value without exactly its
fields and types raises StateError with the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ftcoord.errors import OtherLayout, StateError

V4: Final = 4
"""The layout of all records of rounds and of quorums. When a field of one of them is added or changed, all of them get
the next number, if the layout has been released: another version then refuses the decided record, and says why."""
VERSION: Final = 1
"""The layout of every other record that has its own key."""
LARGEST: Final = 2**63 - 1
"""The largest number in a record."""

LARGEST_COUNT: Final = 10**18
"""The largest number that is counted on from, such as a term's."""
LARGEST_STEP: Final = 10**15
"""By how much a number that a member names may exceed all that is known here, or a decider does not count on from
it."""
LARGEST_DECIDED_STEP: Final = 10**17
"""The same for a decided number. It is much more, since a reader may know less than the decider that counted on."""


class Range(NamedTuple):
    """The numbers that a field may hold. Without one, that is -LARGEST to LARGEST."""

    lowest: int
    highest: int


Count = Annotated[int, Range(0, LARGEST_COUNT)]
"""A number that is counted on from, or was counted to; 0 for none."""
Size = Annotated[int, Range(0, LARGEST)]
"""How much, or how many, of something, or a revision of etcd."""

Record = TypeVar("Record")
Raw = Mapping[str, Any]
"""A JSON object as returned by `json`."""


def dump(record: object, version: int = VERSION) -> bytes:
    """The record as JSON, with the layout's version. The same record always gives the same bytes."""
    raw = {"v": version, **_plain(record)}
    text = _encode(raw)
    if "\\ud" in text:  # a worker's exception, or a host's name, may hold half a character, which nobody would read
        text = _encode(json.loads(_encode_utf8(raw).encode(errors="replace")))
    return text.encode()


def load(key: str, value: bytes, version: int = VERSION) -> Raw:
    """The unchecked fields of a record that has its own key. Raises StateError, also for a record of another
    version."""
    try:
        raw = _read(value.decode())
    except (ValueError, RecursionError) as error:
        raise StateError(key, f"does not hold JSON, so it is not ftcoord's: {error}") from error
    if not isinstance(raw, dict):
        raise StateError(key, "does not hold a JSON object, so it is not ftcoord's")
    found = raw.pop("v", None)
    if type(found) is not int or found != version:
        raise OtherLayout(
            key, f"has layout version {found!r}, and this ftcoord reads {version}: use one release in all of a job"
        )
    return raw


LARGEST_PACKED: Final = 1 << 26
"""Bytes of the JSON in a packed record. etcd takes 1.5 MiB, but others may have compressed anything."""


def dump_packed(record: object) -> bytes:
    """As `dump` of a record of rounds or quorums, compressed: for those that list many that are alike."""
    return zlib.compress(dump(record, V4), 1)


def load_packed(key: str, value: bytes) -> Raw:
    """As `load`, of what `dump_packed` returned."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(value, LARGEST_PACKED)
    except zlib.error:
        load(key, value, V4)  # raises the error that names its layout, if it is of another release
        raise StateError(key, "is not compressed, so it is not ftcoord's") from None
    if reader.unconsumed_tail or not reader.eof:
        raise StateError(key, "is cut off, or too large, so it is not ftcoord's")
    return load(key, found, V4)


def build(kind: type[Record], key: str, raw: Raw) -> Record:
    """The record with these fields. Lists of texts or numbers become tuples; fields that are records, or tuples of
    them, must have been built before. Raises StateError."""
    form = _form_of(kind)
    if raw.keys() == form.types.keys():
        values = form.values(raw)
        if tuple(map(type, values)) == form.kinds and (fitting := form.fitting(values)) is not None:
            return kind(*fitting)
    raise StateError(key, _problem(kind.__name__, raw, form))


def _problem(record: str, raw: Raw, form: _Form) -> str:
    """Why `build` refuses these fields."""
    if raw.keys() != form.types.keys():
        odd = ", ".join(sorted(raw.keys() ^ form.types.keys()))
        return f"does not have the fields of a {record} (differing: {odd})"
    for (name, wanted), value in zip(form.types.items(), form.values(raw), strict=True):
        if wanted is list and (type(value) is not list or not _are(form.items[name], value)):
            return f"has no list of {name}"
        if wanted is not list and type(value) is not wanted:
            return f"has a {name} that is no {wanted.__name__}"
        if wanted is int and not form.ranges[name].lowest <= value <= form.ranges[name].highest:
            lowest, highest = form.ranges[name]
            return f"has the {name} {value}, outside {lowest} to {highest}, so it is not ftcoord's"
    raise AssertionError("nothing is wrong")


def build_each(kind: type[Record], key: str, raw: Raw, name: str) -> tuple[Record, ...]:
    """The records in the list field `name`. Raises StateError."""
    return tuple(build(kind, key, item) for item in objects(key, raw, name))


def objects(key: str, raw: Raw, name: str) -> list[Raw]:
    """The field `name`, which must be a list of objects. Raises StateError."""
    items = raw.get(name)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise StateError(key, f"has no list of {name}")
    return items


def part(key: str, raw: Raw, name: str) -> Raw:
    """The field `name`, which must be an object. Raises StateError."""
    found = raw.get(name)
    if not isinstance(found, dict):
        raise StateError(key, f"has no {name}")
    return found


def check_step(key: str, number: int, known: int, step: int) -> None:
    """Raises StateError for a number so far above the highest `known` one that nobody has counted to it since."""
    if number > known + step:
        problem = f"has the number {number}, which nobody has counted to: the highest known one is {known}"
        raise StateError(key, f"{problem}; delete it, and all decide anew" if step == LARGEST_DECIDED_STEP else problem)


def json_problem(text: str) -> str:
    """Why a text is not JSON; empty if it is, or is empty."""
    if not text:
        return ""
    try:
        _read(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


def _read(text: str) -> Any:
    """Parsed JSON. Raises ValueError, also for texts that UTF-8 cannot carry: torchft's protocol could not pass them
    on."""
    found = json.loads(text)
    if "\\ud" in text or "\\uD" in text or not text.isascii():  # an escape or a letter that may be half of a character
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _plain(record: object) -> dict[str, Any]:
    form = _form_of(type(record))
    return dict(zip(form.types, form.attributes(record)))  # noqa: B905 - both are of the same form


# A record has no cycles, so nobody need look for them.
_ENCODING: Final[Mapping[str, Any]] = {"separators": (",", ":"), "sort_keys": True, "check_circular": False}
_encode: Final = json.JSONEncoder(default=_plain, **_ENCODING).encode
_encode_utf8: Final = json.JSONEncoder(default=_plain, ensure_ascii=False, **_ENCODING).encode


class _Form:
    """The JSON types of a record's fields (for a tuple of records, only that it is a list), and how to check them all
    at once."""

    def __init__(self, kind: type) -> None:
        self.ranges = {name: _range_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        hints = get_type_hints(kind)
        self.items = {name: get_args(hint)[0] for name, hint in hints.items() if _is_plain_list(hint)}
        """The fields that are lists of texts or numbers in JSON, and which of the two."""
        self.types = {name: list if name in self.items else get_origin(hint) or hint for name, hint in hints.items()}
        self.kinds = tuple(self.types.values())
        self.numbers = [(at, *self.ranges[name]) for at, name in enumerate(self.types) if self.types[name] is int]
        self.lists = [(at, self.items[name]) for at, name in enumerate(self.types) if name in self.items]
        self.values: Callable[[Raw], tuple[Any, ...]] = _all(itemgetter, tuple(self.types))
        self.attributes: Callable[[object], tuple[Any, ...]] = _all(attrgetter, tuple(self.types))

    def fitting(self, values: Sequence[Any]) -> Sequence[Any] | None:
        """Values of the right types, with tuples for the lists; None if a number is out of range, or a list has another
        element."""
        for at, lowest, highest in self.numbers:
            if not lowest <= values[at] <= highest:
                return None
        if not self.lists:
            return values
        found = list(values)
        for at, item in self.lists:
            if not _are(item, found[at]):
                return None
            found[at] = tuple(found[at])
        return found


def _range_of(hint: Any) -> Range:
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Range)), Range(-LARGEST, LARGEST))


def _is_plain_list(hint: Any) -> bool:
    return get_origin(hint) is tuple and get_args(hint)[0] in (str, int)


def _are(kind: Any, values: Sequence[Any]) -> bool:
    """Whether all are of this type, and numbers are in range."""
    return not values or all(type(one) is kind and (kind is not int or abs(one) <= LARGEST) for one in values)


def _all(getter: Callable[..., Any], names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    get = getter(*names)
    return get if len(names) > 1 else lambda record: (get(record),)


_forms: Final[dict[type, _Form]] = {}


def _form_of(kind: type) -> _Form:
    form = _forms.get(kind)
    if form is None:
        form = _forms[kind] = _Form(kind)
    return form
