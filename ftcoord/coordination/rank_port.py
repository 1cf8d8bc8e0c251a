"""How ranks and peers call one of ftcoord's managers: their calls as frames, the manager's port, and their lines to it.

A caller makes one call at a time on a connection: a frame with the call, and a frame with the answer. Closing the
connection withdraws the call. In the manager's process there is no socket: see `RankGroup.at`.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.coordination import api, ranks
from ftcoord.coordination.api import Failure
from ftcoord.coordination.port import LARGEST_FRAME, Frame, Line, Peer, Port, WrongKey
from ftcoord.core.recovery import QuorumResult, result_fields
from ftcoord.core.strict import build, dump, load
from ftcoord.errors import StateError, ThreadNotStarted
from ftcoord.pool import DaemonPool

ASK_THREADS: Final = 64
"""The most requests of a group in progress: usually one, and a few more whose ranks have given up."""
_WHERE: Final = "a rank's call"


# -- calls and answers -------------------------------------------------------------------------------------------------


_KNOWN = ranks.RankRequest, ranks.TimedVote, ranks.MetadataQuery, ranks.KillOrder
_CALLS: Final[Mapping[str, type[ranks.RankCall]]] = dict(zip("qvmk", _KNOWN, strict=True))
_KINDS: Final = {kind: name for name, kind in _CALLS.items()}
_ANSWER: Final = "r"
_FAILURE: Final = "f"


def encode_call(call: ranks.RankCall) -> Frame:
    """The frame of a call."""
    return Frame(_KINDS[type(call)], dump(call))


def parse_call(frame: Frame) -> ranks.RankCall:
    """The call of a frame. Raises ValueError for one that no rank of this version sends."""
    kind = _CALLS.get(frame.kind)
    if kind is None:
        raise ValueError(f"there is no call {frame.kind!r}")
    try:
        call = build(kind, _WHERE, load(_WHERE, frame.payload))
    except StateError as error:
        raise ValueError(str(error)) from None
    timeout = getattr(call, "timeout", 0.0)
    if not 0 <= timeout <= api.TEN_YEARS:  # nor may it be no number
        raise ValueError(f"a call cannot wait for {timeout} seconds")
    return call


def encode_answer(answer: Any) -> Frame:
    """The frame of an answer: JSON, or a Failure. An answer that is too long becomes a Failure."""
    if isinstance(answer, Failure):
        return Frame(_FAILURE, json.dumps([answer.code, answer.message]).encode())
    if isinstance(answer, QuorumResult):
        answer = result_fields(answer)
    payload = json.dumps(answer, separators=(",", ":")).encode()
    if len(payload) > LARGEST_FRAME:
        return encode_answer(Failure("OutOfRange", f"the answer has {len(payload)} bytes, above {LARGEST_FRAME}"))
    return Frame(_ANSWER, payload)


def parse_answer(frame: Frame) -> Any:
    """The answer in a frame, which may be a Failure. Raises ValueError."""
    try:
        told = json.loads(frame.payload)
        if frame.kind == _ANSWER:
            return told
        code, message = told
    except (TypeError, RecursionError) as error:
        raise ValueError(f"this is no answer: {error!r}") from None
    return Failure(str(code), str(message))


# -- at the manager ----------------------------------------------------------------------------------------------------


class RankPort:
    """Serves the calls that arrive at a listening socket, which it owns, until `close()`. What is no call closes its
    connection.

    Args:
        listener: see `port.listen`.
        group: the ranks.
        key: what ranks and peers must know.
        failed: called when one of its threads fails.
    """

    name = "ftcoord-ranks"
    hint = "torchft's own classes reach a manager only if the job's address has native=1, and it then serves everyone"

    def __init__(
        self, listener: socket.socket, group: ranks.RankGroup, key: bytes, failed: Callable[[BaseException], None]
    ) -> None:
        self._group, self.failed = group, failed
        # Only the port's thread: the call that waits, and until when it does.
        self._calls: dict[Peer, tuple[ranks.WaitingCall[Any], float]] = {}
        self._asks = DaemonPool(ASK_THREADS, "ftcoord-ask")
        self._port = Port(listener, key, self)

    def close(self) -> None:
        """Close all connections, and stop listening. Idempotent."""
        self._port.close()
        self._asks.close(wait=False)  # a request that is in progress ends when the replica leaves, after this

    # -- on the port's thread ------------------------------------------------------------------------------------------

    def handle(self, batch: Sequence[tuple[Peer, Frame | None]]) -> None:
        """First withdraw, then call: a vote must not count with one that was withdrawn before it came."""
        over = {peer for peer, frame in batch if frame is None}
        for peer in over:
            self._withdraw(peer)
        for peer, frame in batch:
            if frame is not None and peer not in over and peer.is_open:
                self._begin(peer, frame)

    def tick(self) -> float:
        """Answer the calls whose time is over."""
        now = concurrency.now()
        for peer, (waiting, until) in [*self._calls.items()]:
            if until <= now:
                self._calls[peer] = waiting, math.inf  # else the outcome is about to come
                if waiting.leave():
                    self._answer(peer, Failure("Cancelled", "the other ranks did not come in time"))
        return min((until for _, until in self._calls.values()), default=math.inf)

    def _withdraw(self, peer: Peer) -> None:
        call = self._calls.pop(peer, None)
        if call is not None:
            call[0].leave()

    def _begin(self, peer: Peer, frame: Frame) -> None:
        try:
            # A rank that has its answer has read all of it. One that reads none must not have answers pile up here.
            if peer in self._calls or peer.unsent:
                raise ValueError("it made a call before it had the answer to the last one")
            self._make(peer, parse_call(frame))
        except ranks.NoSuchRank as error:
            self._answer(peer, Failure("InvalidArgument", str(error)))
        except ValueError as error:
            self._withdraw(peer)
            self._port.close_peer(peer, str(error))

    def _make(self, peer: Peer, call: ranks.RankCall) -> None:
        waiting = self._group.begin(call)
        # Who asks for metadata closes the connection when its time is over.
        self._calls[peer] = waiting, concurrency.now() + getattr(call, "timeout", math.inf)
        # On whichever thread completes it, which may hold that of another rank up: so it only wakes the port.
        waiting.outcome.add_done_callback(lambda _: self._port.submit(partial(self._complete, peer, waiting)))
        if waiting.ask is not None:
            try:  # on a thread of its own, which waits for the next request: to start one takes long
                self._asks.submit(waiting.ask).add_done_callback(self._note_end)
            except ThreadNotStarted as error:
                waiting.fail(error)

    def _note_end(self, asked: Future[None]) -> None:
        error = asked.exception()
        if error is not None:
            self.failed(error)

    def _complete(self, peer: Peer, waiting: ranks.WaitingCall[Any]) -> None:
        call = self._calls.get(peer)
        if call is None or call[0] is not waiting:
            return  # it has expired, or the caller has gone
        try:
            answer = waiting.to_answer(waiting.outcome.result())
        except (*api.KNOWN, RuntimeError) as error:
            answer = Failure.of(error)
        self._answer(peer, answer)

    def _answer(self, peer: Peer, answer: object) -> None:
        self._calls.pop(peer, None)
        peer.send(*encode_answer(answer))


# -- at the rank -------------------------------------------------------------------------------------------------------


class ManagerLines:
    """As many lines to a manager in another process as there are calls in progress. Thread-safe: it only takes from a
    list and adds to it. The first line is made at once.

    Args:
        host, port, key: the manager's.
        deadline: on the monotonic clock, for the first line.

    Raises TimeoutError; WrongKey; or another OSError when no manager of ftcoord's listens there.
    """

    def __init__(self, host: str, port: int, key: bytes, deadline: float) -> None:
        self._host, self._port, self._key = host, port, key
        self._idle = [self._connect(deadline)]

    def call(self, call: ranks.RankCall, deadline: float) -> Any:
        """The answer to a call, which may be a Failure: TRANSPORT_ERROR if the manager goes away meanwhile.

        Raises OSError when there is no line to the manager, and TimeoutError after the monotonic `deadline`.
        """
        frame = encode_call(call)
        if len(frame.payload) > LARGEST_FRAME:
            return Failure("OutOfRange", f"the call has {len(frame.payload)} bytes, above the limit of {LARGEST_FRAME}")
        line = self._take(deadline)
        with ExitStack() as undo:
            undo.callback(line.close)  # which withdraws the call
            try:
                line.send(*frame, deadline)
                answer = parse_answer(line.receive(deadline))
            except (ConnectionError, ValueError):
                return api.TRANSPORT_ERROR
            undo.pop_all()
        self._idle.append(line)
        return answer

    def close(self) -> None:
        """Close all lines. Call it when no call is in progress."""
        while self._idle:
            self._idle.pop().close()

    def _take(self, deadline: float) -> Line:
        with suppress(IndexError):
            while True:
                line = self._idle.pop()
                if line.is_quiet:
                    return line
                line.close()
        return self._connect(deadline)

    def _connect(self, deadline: float) -> Line:
        try:
            return Line(self._host, self._port, self._key, deadline)
        except WrongKey:
            raise WrongKey(
                "the manager there requires another token: take the address from ManagerServer.address() as it is, or"
                " from the last quorum in this process"
            ) from None
