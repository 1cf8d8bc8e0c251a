"""What happened in one history, for people: a sequence diagram in text, the same for the same seed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Final

from virtual.keyspace import Transaction

from ftcoord.etcd.api import Delete, Event, Op, Put

_PID: Final = re.compile(r" \(pid \d+\)")
_TEXT_LENGTH: Final = 150
_LANE: Final = 3


@dataclass
class Trace:
    """All that happened, in order. `note` costs nearly nothing: what it says is made when somebody reads it."""

    lanes: list[str] = field(default_factory=list)
    noted: list[tuple[float, str, str, object]] = field(default_factory=list)
    """What `note` was given, in order."""

    def note(self, at: float, who: str, mark: str, what: object) -> None:
        """Something that `who` did or that befell it. `mark` is one character of the diagram."""
        if who not in self.lanes:
            self.lanes.append(who)
        self.noted.append((at, who, mark, what))

    def clear(self) -> None:
        """Forget all of it."""
        self.noted.clear()

    def __len__(self) -> int:
        return len(self.noted)

    def text(self, last: int | None = None) -> str:
        """The diagram; of the last events only, if that is given."""
        head = [
            f"{'':>10}  {''.join('|' + ' ' * (_LANE - 1) for _ in range(at))}{name}"
            for at, name in enumerate(self.lanes)
        ]
        noted = self.noted if last is None else self.noted[-last:]
        skipped = len(self.noted) - len(noted)
        gap = [f"... {skipped} lines before"] if skipped else []
        return "\n".join([*head, *gap, *(self._line(*one) for one in noted)]) + "\n"

    def _line(self, at: float, who: str, mark: str, what: object) -> str:
        mine = self.lanes.index(who)
        lanes = "".join((mark if lane == mine else "|").ljust(_LANE) for lane in range(len(self.lanes)))
        return f"{at:9.4f}s  {lanes}{who}: {spelled(what)}"


def spelled(what: object) -> str:
    """One thing that happened, in the field's words."""
    if isinstance(what, str):
        text = what
    elif isinstance(what, Transaction):
        text = "asks etcd to " + (", ".join(map(_op, what.success)) or "compare only")
        if what.compares:
            text += f" if {len(what.compares)} guards hold"
    elif isinstance(what, Event):
        text = _event(what)
    else:
        text = f"asks etcd: {what}"
    text = _PID.sub("", text)
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 3] + "..."


def _op(op: Op) -> str:
    if isinstance(op, Put):
        return f"put {op.key} = {_value(op.value)}"
    if isinstance(op, Delete):
        return f"delete {op.span.start}{'*' if op.span.is_prefix else ''}"
    return f"read {op.span.start}"


def _event(event: Event) -> str:
    kv = event.kv
    if event.kind == "delete":
        return f"revision {kv.mod_revision}: {kv.key} is deleted"
    return f"revision {kv.mod_revision}: {kv.key} = {_value(kv.value)}"


def _value(value: bytes) -> str:
    """Of a record what differs from nothing."""
    try:
        fields = json.loads(value)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return repr(value[:60])
    said = {name: one for name, one in fields.items() if one not in ("", 0, False, [], {}) and name not in _DULL}
    return " ".join(f"{name}={one}" for name, one in said.items())


_DULL: Final = frozenset({"v", "nonce", "by", "host", "address", "created", "wall_ms"})
