"""A history: what the clients of stores and of rounds asked and were told, a line of JSON for each operation.

The fields of a line are those of `Operation`, with times by one clock for all clients. Values are texts in which each
character is one byte (Latin-1). The result of a join is the round's number and a text that lists its members. Nothing
here, and nothing in this package, comes from ftcoord.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

FIELDS: Final = frozenset({"client", "object", "key", "op", "arguments", "result", "invoked", "returned"})
ARGUMENTS: Final = {
    ("store", "get"): 0,
    ("store", "set"): 1,
    ("store", "add"): 1,
    ("store", "append"): 1,
    ("store", "compare_set"): 2,
    ("store", "delete"): 0,
    ("store", "check"): 0,
    ("rounds", "join"): 0,
}
"""The operations of each kind of object, and how many arguments each has."""
TEXTS: Final = "arguments are texts, of one character up to U+00FF for each byte"


class MalformedHistoryError(ValueError):
    """A line that is no operation. The text names the line."""


@dataclass(frozen=True)
class Operation:
    """One call of a client.

    Args:
        object, key: the kind of object, "store" or "rounds", and which one of them. Each is judged by itself.
        result: what the client was told; None if it was told nothing.
        invoked, returned: when the call began and ended, on one clock for all. `returned` is None where nobody knows
            the outcome: the operation may have taken place at any time since, or may never.
        line: where it stands in its file, from 1; 0 where it is in none.
    """

    client: str
    object: str
    key: str
    op: str
    arguments: tuple[str, ...]
    result: Any
    invoked: float
    returned: float | None
    line: int = 0

    @property
    def is_answered(self) -> bool:
        return self.returned is not None

    def __str__(self) -> str:
        asked = f"{self.client}: {self.op}({', '.join([self.key, *map(repr, self.arguments)])})"
        told = f" -> {self.result!r}" if self.is_answered else ""
        return f"line {self.line}: {asked}{told}" if self.line else f"{asked}{told}"


def written(operations: Iterable[Operation]) -> str:
    """The file of a history, as `read` takes it."""
    return "".join(
        json.dumps({name: value for name, value in asdict(one).items() if name in FIELDS}) + "\n" for one in operations
    )


def read(lines: Iterable[str]) -> list[Operation]:
    """The operations of a history. Raises MalformedHistoryError."""
    operations = [_operation(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    appended = {one.key for one in operations if one.op == "append"}
    for one in operations:
        if one.op == "add" and one.key in appended:
            raise MalformedHistoryError(f"line {one.line}: {one.key!r} is added to and appended to: use two keys")
    return operations


def _operation(number: int, line: str) -> Operation:
    try:
        said = json.loads(line)
    except ValueError as error:
        raise MalformedHistoryError(f"line {number} is not JSON ({error}): write one JSON object a line") from None
    if not isinstance(said, dict) or said.keys() != FIELDS:
        raise MalformedHistoryError(f"line {number}: write an object with the fields {', '.join(sorted(FIELDS))}")
    _check(number, said)
    result = tuple(said["result"]) if isinstance(said["result"], list) else said["result"]
    return Operation(**{**said, "arguments": tuple(said["arguments"]), "result": result}, line=number)


def _check(number: int, said: dict[str, Any]) -> None:
    def require(holds: object, text: str) -> None:
        if not holds:
            raise MalformedHistoryError(f"line {number}: {text}")

    require(all(isinstance(said[name], str) for name in ("client", "object", "key", "op")), "names are texts")
    count = ARGUMENTS.get((said["object"], said["op"]))
    known = ", ".join(f"{op} of {kind}" for kind, op in ARGUMENTS)
    require(count is not None, f"no operation {said['op']!r} of {said['object']!r} is known: use {known}")
    arguments = said["arguments"]
    require(isinstance(arguments, list) and all(_is_text(one) for one in arguments), TEXTS)
    require(len(arguments) == count, f"{said['op']} has {count} arguments besides the key")
    require(said["op"] != "add" or is_decimal(arguments[0]), "what is added is a decimal number")
    require(_is_time(said["invoked"]), "invoked is a number")
    require(said["returned"] is None or _is_time(said["returned"]), "returned is a number, or null if nobody knows")
    require(said["returned"] is None or said["invoked"] <= said["returned"], "it returned before it was invoked")
    if said["returned"] is not None:
        fits, what = RESULTS[said["op"]]
        require(fits(said["result"]), f"{said['op']} returns {what}")


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_decimal(text: str) -> bool:
    """Whether it is a decimal number as a counter holds it."""
    return text.removeprefix("-").isdecimal()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and max(value, default="") <= "\xff"


def _is_flag(result: object) -> bool:
    return isinstance(result, bool)


def _is_round(result: object) -> bool:
    return isinstance(result, list) and [type(one) for one in result] == [int, str] and result[0] > 0


RESULTS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "get": (_is_text, "a text, of one character up to U+00FF for each byte"),
    "set": (lambda result: result is None, "null"),
    "add": (lambda result: isinstance(result, str) and is_decimal(result), "a decimal number, as a text"),
    "append": (lambda result: result is None, "null"),
    "compare_set": (_is_text, "a text, of one character up to U+00FF for each byte"),
    "delete": (_is_flag, "true or false"),
    "check": (_is_flag, "true or false"),
    "join": (_is_round, "the round's number, from 1, and a text that tells its members"),
}
"""What each operation may return, if it does."""
