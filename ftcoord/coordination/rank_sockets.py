"""A rank's connections to one of ftcoord's managers in another process."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any, Final

from ftcoord import concurrency, fork
from ftcoord.coordination.failure import TRANSPORT_ERROR, Failure
from ftcoord.coordination.rank_frames import (
    LARGEST_MESSAGE,
    WELCOME,
    WRONG_TOKEN,
    FrameReader,
    RankCall,
    encode_call,
    frame,
    greeting,
    parse_answer,
)
from ftcoord.coordination.tcp import keep_alive

_CHUNK: Final = 64 * 1024


class AnotherProtocol(ConnectionError):
    """The process that listens there is not one of ftcoord's managers; it may be one of torchft's own."""


class TokenRefused(ConnectionError):
    """The manager there requires another token."""


class RankSocket:
    """One connection, for one call at a time.

    Raises ConnectionError, TimeoutError or another OSError when it cannot be made before the monotonic `deadline`;
    AnotherProtocol; and TokenRefused.
    """

    def __init__(self, host: str, port: int, token: str, deadline: float) -> None:
        self._socket = socket.create_connection((host, port), _left(deadline))
        fork.hide(self._socket.fileno())
        with ExitStack() as undo:
            undo.callback(self.close)
            keep_alive(self._socket)
            self._socket.sendall(greeting(token))
            self._await_welcome(deadline)
            undo.pop_all()

    @property
    def is_usable(self) -> bool:
        """False if the manager has closed it, or has sent something unexpected."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def call(self, call: bytes, deadline: float) -> Any:
        """The answer to a call, which may be a Failure; TRANSPORT_ERROR if the manager goes away meanwhile.

        Raises TimeoutError after the monotonic `deadline`. After either, the connection cannot be used again.
        """
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(call)
            return parse_answer(self._receive(deadline))
        except (ConnectionError, ValueError):
            return TRANSPORT_ERROR
        except TimeoutError as error:
            if error.errno is None:  # the deadline is over
                raise
            return TRANSPORT_ERROR  # TCP gave the connection up: the manager's host has lost its power

    def close(self) -> None:
        """Withdraw the call in progress. Idempotent."""
        fork.unhide(self._socket.fileno())
        self._socket.close()

    def _await_welcome(self, deadline: float) -> None:
        said = b""
        while said != WELCOME:
            self._socket.settimeout(_left(deadline))
            try:
                more = self._socket.recv(len(WELCOME) - len(said))
            except ConnectionResetError:
                more = b""
            said += more
            if said == WRONG_TOKEN:
                raise TokenRefused(
                    "the manager there requires another token: take the address from ManagerServer.address() as it is,"
                    " or from the last quorum in this process"
                )
            if not more or not (WELCOME.startswith(said) or WRONG_TOKEN.startswith(said)):
                raise AnotherProtocol("what listens there did not answer as a manager of ftcoord")

    def _receive(self, deadline: float) -> bytes:
        frames = FrameReader()
        while True:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionResetError("the manager has closed the connection")
            payloads = frames.feed(data)
            if payloads:
                return payloads[0]
            self._socket.settimeout(_left(deadline))


class RankSockets:
    """As many connections as there are calls in progress. Thread-safe: it only takes from a list and adds to it.

    Args:
        host, port, token: the manager's.
        first: an existing connection.
    """

    def __init__(self, host: str, port: int, token: str, first: RankSocket) -> None:
        self._host, self._port, self._token = host, port, token
        self._idle = [first]

    def call(self, call: RankCall, deadline: float) -> Any:
        """The answer to a call, which may be a Failure. Raises OSError when no manager listens there, TimeoutError
        after the monotonic `deadline`, and AnotherProtocol."""
        payload = encode_call(call)
        if len(payload) > LARGEST_MESSAGE:
            return Failure("OutOfRange", f"the call has {len(payload)} bytes, above the limit of {LARGEST_MESSAGE}")
        connection = self._take(deadline)
        with ExitStack() as interrupted:
            interrupted.callback(connection.close)  # which withdraws the call
            answer = connection.call(frame(payload), deadline)
            if answer is not TRANSPORT_ERROR:
                interrupted.pop_all()
                self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close all connections. Call it when no call is in progress."""
        while self._idle:
            self._idle.pop().close()

    def _take(self, deadline: float) -> RankSocket:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return RankSocket(self._host, self._port, self._token, deadline)
            if connection.is_usable:
                return connection
            connection.close()


def _left(deadline: float) -> float:
    """The seconds left. Raises TimeoutError when there are none."""
    left = deadline - concurrency.now()
    if left <= 0:
        raise TimeoutError("the manager did not answer in time")
    return left
