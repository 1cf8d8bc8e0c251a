"""A connection of one of ftcoord's ranks, at its manager."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from ftcoord.coordination.checks import TEN_YEARS
from ftcoord.coordination.convert import result_fields
from ftcoord.coordination.crowd import Crowd, Unfinished
from ftcoord.coordination.failure import KNOWN, RANK_NOT_FOUND, Failure
from ftcoord.coordination.rank_frames import (
    FrameReader,
    MetadataQuery,
    RankCall,
    TimedVote,
    encode_answer,
    frame,
    parse_call,
)
from ftcoord.coordination.rank_group import NoSuchRank, RankGroup, WaitingCall
from ftcoord.coordination.ranks import GroupAsk, RankRequest
from ftcoord.coordination.tcp import has_hung_up

log = logging.getLogger(__name__)

T = TypeVar("T")


class RankConnection(asyncio.Protocol):
    """Makes the calls of one rank, one at a time. Anything that is not a call closes the connection. For the loop's
    thread.

    Args:
        group: the ranks.
        transport: the connection, after the greetings.
        call_soon: calls a function on the loop's thread.
        ask_soon: asks for the group's quorum, which takes time.
        on_lost: called when the connection has ended.
        idle: the port's connections that make no call now.
        unfinished: those that have sent a part of one.
    """

    def __init__(
        self,
        group: RankGroup,
        transport: asyncio.Transport,
        call_soon: Callable[[Callable[[], None]], None],
        ask_soon: Callable[[GroupAsk], None],
        on_lost: Callable[[], None],
        idle: Crowd,
        unfinished: Unfinished,
    ) -> None:
        self._group, self._transport, self._call_soon, self._ask_soon = group, transport, call_soon, ask_soon
        self._on_lost, self._frames = on_lost, FrameReader()
        self._idle, self._unfinished, self._noted = idle, unfinished, 0
        self._waiting: WaitingCall[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._begin_soon(parse_call(payload))
        except ValueError as error:
            self._refuse(error)
        self._note_unfinished(self._frames.unfinished)  # usually 0 before and after: a call comes as a whole

    def connection_lost(self, error: Exception | None) -> None:
        self._note_unfinished(0)
        waiting = self._end_wait()
        if waiting is not None:
            waiting.leave()
        self._on_lost()

    def _note_unfinished(self, size: int) -> None:
        if size != self._noted:
            self._noted = size
            self._unfinished.note(self._transport, size)

    def _begin_soon(self, call: RankCall) -> None:
        """Make the call after two turns of the loop. A busy loop finds this call and closed connections at the same
        time, in any order, and asyncio reports those one turn later. The call must not count together with calls that
        were withdrawn before it came."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._begin_or_end, call)

    def _begin_or_end(self, call: RankCall) -> None:
        with ExitStack() as unforeseen:
            unforeseen.callback(self._transport.abort)  # the rank must not wait until its time is over
            self._begin(call)
            unforeseen.pop_all()

    def _refuse(self, why: object) -> None:
        log.info("the connection of a rank was closed: %s", why)
        self._transport.abort()

    def _begin(self, call: RankCall) -> None:
        if self._transport.is_closing():
            return
        if has_hung_up(self._transport.get_extra_info("socket").fileno()):
            self._transport.abort()  # a manager that was stopped meanwhile reads what was withdrawn long ago
            return
        # A rank that has its answer has read all of it. One that reads none must not have answers pile up here.
        if self._waiting is not None or self._transport.get_write_buffer_size():
            self._refuse("it made a call before it had the answer to the last one")
            return
        self._idle.forget(self._transport)  # before its vote answers others, which are idle then
        try:
            self._make(call)
        except NoSuchRank as error:
            self._answer(Failure("InvalidArgument", str(error)))

    def _make(self, call: RankCall) -> None:
        if isinstance(call, RankRequest):
            self._ask(call)
        elif isinstance(call, TimedVote):
            self._await(self._group.vote(call.rank, call.step, call.yes), call.timeout, bool)
        elif isinstance(call, MetadataQuery):
            # The peer closes the connection when its time is over.
            self._await(self._group.metadata(call.rank), TEN_YEARS, _metadata_or_failure)
        else:
            self._answer(self._group.kill(call.message))

    def _ask(self, request: RankRequest) -> None:
        waiting, ask_for_all = self._group.quorum(request)
        self._await(waiting, request.timeout, lambda quorum: result_fields(self._group.result(quorum, request)))
        if ask_for_all is not None:
            self._ask_soon(ask_for_all)

    def _await(self, waiting: WaitingCall[T], timeout: float, to_answer: Callable[[T], object]) -> None:
        self._waiting = waiting
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)
        # On whichever thread completes it, which may hold that of another rank up: so it only wakes the loop.
        waiting.outcome.add_done_callback(lambda _: self._call_soon(lambda: self._complete(waiting, to_answer)))

    def _complete(self, waiting: WaitingCall[T], to_answer: Callable[[T], object]) -> None:
        if self._waiting is not waiting:
            return  # it has expired, or the rank has gone
        self._end_wait()
        with ExitStack() as unforeseen:
            unforeseen.callback(self._transport.abort)  # the rank must not wait until its time is over
            try:
                answer = to_answer(waiting.outcome.result())
            except (*KNOWN, RuntimeError) as error:
                answer = Failure.of(error)
            self._answer(answer)
            unforeseen.pop_all()

    def _expire(self) -> None:
        assert self._waiting is not None
        if self._waiting.leave():
            self._end_wait()
            self._answer(Failure("Cancelled", "the other ranks did not come in time"))

    def _end_wait(self) -> WaitingCall[Any] | None:
        waiting, self._waiting = self._waiting, None
        if self._timer is not None:
            self._timer.cancel()
        return waiting

    def _answer(self, answer: object) -> None:
        self._idle.note(self._transport)
        self._transport.write(frame(encode_answer(answer)))


def _metadata_or_failure(metadata: str | None) -> str | Failure:
    return RANK_NOT_FOUND if metadata is None else metadata
