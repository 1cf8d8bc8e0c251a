"""The protocol between ftcoord's own ranks and managers: a greeting, then frames of JSON.

A rank sends HELLO and its manager's token in one line, and is answered with WELCOME, or with WRONG_TOKEN. Then it makes
one call at a time: a frame with the call, and a frame with the answer. Closing the connection withdraws the call.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ftcoord.coordination.checks import TEN_YEARS
from ftcoord.coordination.failure import Failure
from ftcoord.coordination.ranks import RankRequest
from ftcoord.core.manager_address import TOKEN_BYTES
from ftcoord.core.strict import build, dump, load
from ftcoord.errors import StateError

HELLO: Final = b"ftcoord/2 rank to manager\n"
"""Longer than the 24 bytes of HTTP/2's preface, so torchft's own manager refuses it at once."""
GREETING_SIZE: Final = len(HELLO) + 2 * TOKEN_BYTES + 1
"""The bytes of a whole greeting."""
WELCOME: Final = b"ftcoord/2 manager\n"
WRONG_TOKEN: Final = b"ftcoord/2 refused\n"
"""As long as WELCOME, so a rank reads either in the same way."""
LARGEST_MESSAGE: Final = 4 * 1024 * 1024
"""The most bytes of a call or an answer, as in gRPC."""
_LENGTH: Final = struct.Struct(">I")
_WHERE: Final = "a rank's call"


@dataclass(frozen=True, slots=True)
class TimedVote:
    """One rank's vote on a step, and for how many seconds it stands."""

    rank: int
    step: int
    yes: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class MetadataQuery:
    """A peer asks how to fetch the weights of a rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class KillOrder:
    """An order to end the manager's process, with a reason."""

    message: str


RankCall = RankRequest | TimedVote | MetadataQuery | KillOrder
_CALLS: Final[Mapping[str, type[RankCall]]] = {
    "quorum": RankRequest,
    "commit": TimedVote,
    "metadata": MetadataQuery,
    "kill": KillOrder,
}
_NAMES: Final = {kind: name for name, kind in _CALLS.items()}


def greeting(token: str) -> bytes:
    """What a rank sends first. An empty token stands for one that is not known: the manager may be torchft's."""
    return HELLO + token.rjust(2 * TOKEN_BYTES, "-").encode() + b"\n"


def frame(payload: bytes) -> bytes:
    """The payload, preceded by its length."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits received bytes into payloads. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def unfinished(self) -> int:
        """How many bytes of an incomplete message are there."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are now complete. Raises ValueError for one longer than LARGEST_MESSAGE, as soon as its
        length is known."""
        self._buffer += data
        payloads = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > LARGEST_MESSAGE:
                raise ValueError(f"a message of {length} bytes is above the limit of {LARGEST_MESSAGE}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return payloads


def encode_call(call: RankCall) -> bytes:
    """The payload of a call."""
    return _NAMES[type(call)].encode() + b" " + dump(call)


def parse_call(payload: bytes) -> RankCall:
    """The call of a payload. Raises ValueError for a payload that no rank of this version sends."""
    name, _, record = payload.partition(b" ")
    kind = _CALLS.get(name.decode(errors="replace"))
    if kind is None:
        raise ValueError(f"there is no call {name[:20]!r}")
    try:
        call = build(kind, _WHERE, load(_WHERE, record))
    except StateError as error:
        raise ValueError(str(error)) from None
    if isinstance(call, RankRequest | TimedVote) and not 0 <= call.timeout <= TEN_YEARS:  # nor may it be no number
        raise ValueError(f"a call cannot wait for {call.timeout} seconds")
    return call


def encode_answer(answer: Any) -> bytes:
    """The payload of an answer: JSON, or a Failure. An answer that is too long becomes a Failure."""
    if isinstance(answer, Failure):
        return json.dumps({"code": answer.code, "message": answer.message}).encode()
    payload = json.dumps({"is": answer}, separators=(",", ":")).encode()
    if len(payload) > LARGEST_MESSAGE:
        return encode_answer(Failure("OutOfRange", f"the answer has {len(payload)} bytes, above {LARGEST_MESSAGE}"))
    return payload


def parse_answer(payload: bytes) -> Any:
    """The answer in a payload, which may be a Failure. Raises ValueError."""
    try:
        said = json.loads(payload)
        return said["is"] if "is" in said else Failure(str(said["code"]), str(said["message"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is no answer: {error!r}") from None
