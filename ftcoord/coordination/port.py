"""A TCP port that proves itself: frames, a greeting with proofs, a thread that serves all connections, and the caller.

Replicas ask the decider of their job at one, and a manager's ranks and peers call the manager at one. A frame is a
length (4 bytes, big-endian, of the payload, at most 4 MiB), one byte that tells the kind, and the payload. Both ends
know a key, which never travels:

  H  caller  `v`, `nonce`, and what the caller tells about itself
  W  port    `nonce`, `proof` = HMAC-SHA256(key, "W" + the caller's nonce + the port's)
  P  caller  `proof` = HMAC-SHA256(key, "P" + the caller's nonce + the port's); nothing counts before it

Then either end sends frames at any time. Whatever else arrives closes the connection. The traffic is plain text.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import math
import os
import secrets
import select
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple, Protocol

from ftcoord import concurrency, fork

log = logging.getLogger(__name__)

VERSION: Final = 1
"""Of the greeting and of all that follows it."""
LARGEST_FRAME: Final = 4 * 1024 * 1024
"""The most bytes of a payload, as in gRPC."""
LARGEST_GREETING: Final = 1024
"""The most bytes of a payload before the proof: 512 connections must not fill the memory."""
GREETING_TIMEOUT: Final = 5.0
"""Seconds that a connection may stay open without a proof."""
MOST_UNPROVED: Final = 512
"""The most connections without a proof. Of more the oldest is closed: a process often has 1,024 file descriptors."""
MOST_UNSENT: Final = 2 * LARGEST_FRAME
"""The most bytes that wait for a caller that does not read. Beyond that its connection is closed."""
ACCEPTED_AT_ONCE: Final = 32
READ_AT_ONCE: Final = 256 * 1024
MOST_PASSES: Final = 1000
"""How often sockets are read again before what was read is handled: callers that never pause must not stop the port."""
ACCEPT_PAUSE: Final = 1.0
"""Seconds until the port accepts again after the system had no descriptor left."""
REPEAT_INTERVAL: Final = 60.0
"""Seconds until the same trouble is logged again."""
BACKLOG: Final = 1024
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""The host at the other end has lost its power: notice it after 30 s."""
_HEADER: Final = struct.Struct(">Ic")
NONCE_LENGTH, PROOF_LENGTH = 32, 64
_BOTH: Final = selectors.EVENT_READ | selectors.EVENT_WRITE
_NOTHING: Final[Mapping[str, Any]] = {}


# -- frames and proofs -------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """What one end sends: its kind, a character of ASCII, and a payload."""

    kind: str
    payload: bytes


class Malformed(ValueError):
    """The other end does not keep to the protocol."""


def encode_frame(kind: str, payload: bytes) -> bytes:
    """A frame as bytes."""
    return _HEADER.pack(len(payload), kind.encode()) + payload


class FrameReader:
    """Splits received bytes into frames. Not thread-safe.

    `limit` is the most bytes of a payload; it may be changed between two frames.
    """

    def __init__(self, limit: int = LARGEST_FRAME) -> None:
        self.limit, self._buffer = limit, bytearray()

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._buffer += data

    def take(self) -> Frame | None:
        """The next whole frame. Raises Malformed for one above the limit, as soon as its length is known."""
        if len(self._buffer) < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(self._buffer)
        if length > self.limit:
            raise Malformed(f"a frame of {length} bytes is above the limit of {self.limit}")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return Frame(kind.decode("latin-1"), payload)


def _proof(key: bytes, letter: str, nonces: tuple[str, str]) -> str:
    return hmac.digest(key, f"{letter}{nonces[0]}{nonces[1]}".encode(), "sha256").hex()


def _new_nonce() -> str:
    return secrets.token_hex(NONCE_LENGTH // 2)


def _greeting(frame: Frame, kind: str, **lengths: int) -> dict[str, Any]:
    """The fields of a frame of the greeting, of which these are texts of so many characters: nonces of other lengths
    might make the same text of two pairs. Raises Malformed."""
    try:
        found = json.loads(frame.payload) if frame.kind == kind else None
    except (ValueError, RecursionError):
        found = None
    told: dict[str, Any] = found if isinstance(found, dict) else {}
    for name, length in lengths.items():
        text = told.get(name)
        if not (isinstance(text, str) and text.isascii() and len(text) == length):
            raise Malformed(f"its frame {frame.kind!r} is no greeting {kind} with a {name}")
    return told


# -- sockets -----------------------------------------------------------------------------------------------------------


def listen(bind: str) -> socket.socket:
    """A socket that listens at `host:port` or `[address]:port`; `[::]` includes IPv4.

    Raises RuntimeError with torchft's text.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not host:
        raise RuntimeError(f"invalid socket address {bind!r}; write it as [::]:29512 or 0.0.0.0:29512")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise RuntimeError(f"invalid port value in {bind!r}; it is a number from 0 to 65535")
    try:
        return _bound(host.removeprefix("[").removesuffix("]"), int(port))
    except OSError as error:
        if isinstance(error, socket.gaierror) or not error.errno:  # its numbers are no errnos
            raise RuntimeError(f"cannot listen on {bind}: {error}") from None
        raise RuntimeError(f"cannot listen on {bind}: {os.strerror(error.errno)} (os error {error.errno})") from None


def _bound(host: str, port: int) -> socket.socket:
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    dual = family == socket.AF_INET6 and host == "::"
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    _prepare(listener)  # what it accepts inherits these options
    return listener


def _prepare(one: socket.socket) -> None:
    """Hide it from forked children, never block, send small frames at once, and notice a host that lost its power."""
    fork.hide(one.fileno())
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def stop_listening(listener: socket.socket) -> None:
    """Close a socket of `listen`, or any that is hidden from forked children. Idempotent."""
    fork.unhide(listener.fileno())
    listener.close()


# -- the port ----------------------------------------------------------------------------------------------------------


class Peer:
    """A connection, at the port. For the port's thread only, but for `send`.

    Attributes:
        about: what the caller told about itself, unchecked.
        unsent: what waits until the caller reads.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.about: Mapping[str, Any] = {}
        self._socket, self._selector = connection, selector
        self._sending = concurrency.lock("Peer._sending")
        """Held while something is sent, and when the socket is closed: another one may get its number at once."""
        self._frames, self._is_late = FrameReader(LARGEST_GREETING), False
        self.unsent = bytearray()
        self._nonces: tuple[str, str] | None = None  # the caller's and the port's, after the caller's first frame
        self._until = concurrency.now() + GREETING_TIMEOUT  # to prove itself

    @property
    def is_open(self) -> bool:
        """Whether its connection was not closed here."""
        return self._socket.fileno() >= 0

    def send(self, kind: str, payload: bytes) -> None:
        """Send a frame, now or when the caller reads. If its connection is lost, the port reports that later. For any
        thread."""
        with self._sending:
            if self.is_open:
                self.unsent += encode_frame(kind, payload)
                self._flush()

    def _flush(self) -> None:
        """With the lock held. The selector waits until the caller reads, while there is something to send."""
        with suppress(OSError):  # BlockingIOError; or it is lost, which is read
            del self.unsent[: self._socket.send(self.unsent)]
            if len(self.unsent) > MOST_UNSENT:
                self._socket.shutdown(socket.SHUT_RDWR)  # which the port reads as its end
        if self._is_late != bool(self.unsent):
            self._is_late = not self._is_late
            self._selector.modify(self._socket, _BOTH if self._is_late else selectors.EVENT_READ, self)

    def _close(self) -> None:
        """Idempotent."""
        with self._sending:
            if self.is_open:
                self._selector.unregister(self._socket)
                stop_listening(self._socket)


class Handler(Protocol):
    """What a port does with the frames. All methods are called on the port's thread, and must not block."""

    name: str
    """The thread's."""
    hint: str
    """What to do about a stranger that does not greet, for the log."""

    def handle(self, batch: Sequence[tuple[Peer, Frame | None]]) -> None:
        """All that was received until nothing more was there: frames of proved connections, and None where one of
        these has ended, in the order of each connection. So what was withdrawn before is known with what came after.

        It is not told of connections that it has closed itself.
        """

    def tick(self) -> float:
        """Do what is due by now; called after each batch and all that was submitted. Returns when to call it again, on
        the monotonic clock."""

    def failed(self, error: BaseException) -> None:
        """The thread has failed, and has closed all connections."""


class Port:
    """Serves connections at a listening socket, which it owns, on a thread of its own until `close()`.

    Args:
        listener: see `listen`.
        key: what callers must know; 16 random bytes.
        handler: gets the frames.

    Raises OSError and ThreadNotStarted.
    """

    def __init__(self, listener: socket.socket, key: bytes, handler: Handler) -> None:
        self._listener, self._key, self._handler = listener, key, handler
        # Only the thread:
        self._selector = selectors.DefaultSelector()
        self._unproved: dict[Peer, None] = {}  # the oldest first
        self._proved: set[Peer] = set()
        self._accepts_at = math.inf  # when the listener is watched again; infinite while it is
        self._logged: dict[str, float] = {}  # when each kind of trouble was logged last
        # Any thread, one step of a deque at a time; two that wake the port at the same time do so once too often:
        self._due: deque[Callable[[], None]] = deque()
        self._is_woken = self._is_closed = False
        self._is_busy = False  # written by the thread; any reads it
        with ExitStack() as undo:
            undo.callback(self._selector.close)
            self._wakes, self._waker = socket.socketpair()
            for end in (self._wakes, self._waker):
                end.setblocking(False)
                fork.hide(end.fileno())
                undo.callback(stop_listening, end)
            self._selector.register(self._wakes, selectors.EVENT_READ)
            self._selector.register(listener, selectors.EVENT_READ)
            self._thread = concurrency.thread(self._run, handler.name)
            self._thread.start()
            undo.pop_all()

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function on the port's thread soon, in the order of submission; never after the end. Thread-safe."""
        self._due.append(call)
        if not self._is_woken and self._thread is not concurrency.current_thread():
            self._is_woken = True  # one wake for all that comes until the thread runs
            with suppress(OSError):  # enough wakes are there already, or the port was closed
                self._waker.send(b"w")

    @property
    def is_quiet(self) -> bool:
        """Whether the handler has all that had arrived by now. For any thread."""
        with suppress(ValueError, OSError):  # its thread has failed, and closes it
            if self._selector.select(0):
                return False
        return not self._is_busy  # read last: the thread sets it before it takes anything from a socket

    def close_peer(self, peer: Peer, why: str) -> None:
        """Close a connection, of which the handler is told no more. For the port's thread."""
        self._end(peer)
        self._log("a proved connection was closed", why)

    def close(self) -> None:
        """Close all connections and the listener: before this returns, unless the port's thread calls it. Idempotent;
        thread-safe."""
        self._is_closed = True
        self.submit(lambda: None)
        if self._thread is not concurrency.current_thread():
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if batch := self._read_all(self._handler.tick()):
                    self._handler.handle(batch)
                self._is_busy = False
                self._run_due()
            self._run_due()  # answers that were submitted before `close`
        finally:
            failure, self._is_busy = sys.exc_info()[1], False
            for peer in (*self._unproved, *self._proved):
                self._end(peer)
            self._selector.close()
            for one in (self._listener, self._wakes, self._waker):
                stop_listening(one)
            if failure is not None:
                self._handler.failed(failure)

    def _run_due(self) -> None:
        self._is_woken = False  # first: what is submitted from now on is seen below, or wakes the thread once more
        while self._due:
            self._due.popleft()()

    def _read_all(self, due: float) -> list[tuple[Peer, Frame | None]]:
        """Wait until something comes, or until `due`; then read until nothing more is there."""
        batch: list[tuple[Peer, Frame | None]] = []
        first = next(iter(self._unproved)) if self._unproved else None
        at = -math.inf if self._due else min(due, self._accepts_at, first._until if first else math.inf)
        left = min(max(at - concurrency.now(), 0), concurrency.LONGEST_WAIT)
        ready = self._selector.select(None if at == math.inf else left)
        self._is_busy = True
        self._end_late()
        for _ in range(MOST_PASSES):
            for selected, events in ready:
                if isinstance(selected.data, Peer):
                    self._serve(selected.data, events, batch)
                elif selected.fileobj is self._wakes:
                    self._wakes.recv(READ_AT_ONCE)
                else:
                    self._accept()
            # Strangers have one turn only: else they would keep the port from handling what it has read.
            ready = [one for one in self._selector.select(0) if one[0].data in self._proved]
            if not ready:
                break
        return batch

    def _end_late(self) -> None:
        if not self._unproved and self._accepts_at == math.inf:
            return
        now = concurrency.now()
        while self._unproved and (first := next(iter(self._unproved)))._until <= now:
            self._end(first)
        if self._accepts_at <= now:
            self._accepts_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._selector.unregister(self._listener)  # which stays ready: the thread must not spin
                    self._accepts_at = concurrency.now() + ACCEPT_PAUSE
                    self._log("no connection is accepted for now", str(error), logging.ERROR)
                    return
                continue  # that caller has gone again
            _prepare(connection)
            peer = Peer(connection, self._selector)
            self._unproved[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            if len(self._unproved) > MOST_UNPROVED:
                self._end(next(iter(self._unproved)))

    def _serve(self, peer: Peer, events: int, batch: list[tuple[Peer, Frame | None]]) -> None:
        if not peer.is_open:
            return  # closed in this pass, to make room
        if events & selectors.EVENT_WRITE:
            with peer._sending:
                peer._flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            data = peer._socket.recv(READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:  # reset, or TCP has given it up
            data = b""
        try:
            peer._frames.feed(data)
            while (frame := peer._frames.take()) is not None:
                if peer in self._proved:
                    batch.append((peer, frame))
                else:
                    self._greet(peer, frame)
        except Malformed as error:
            data = b""
            if peer in self._proved:
                self._log("a proved connection was closed", str(error))
            else:
                self._log("the connection of a stranger was closed", f"{error}; {self._handler.hint}")
        if not data:
            if peer in self._proved:
                batch.append((peer, None))
            self._end(peer)

    def _greet(self, peer: Peer, frame: Frame) -> None:
        """Raises Malformed."""
        if peer._nonces is None:
            found = _greeting(frame, "H", nonce=NONCE_LENGTH)
            if found.get("v") != VERSION:
                raise Malformed(
                    f"it uses version {found.get('v')!r:.20}, not {VERSION}: use one release in all of a job"
                )
            peer.about, peer._nonces = found, (found["nonce"], _new_nonce())
            answer = {"nonce": peer._nonces[1], "proof": _proof(self._key, "W", peer._nonces)}
            peer.send("W", json.dumps(answer).encode())
            return
        found = _greeting(frame, "P", proof=PROOF_LENGTH)
        if not hmac.compare_digest(found["proof"], _proof(self._key, "P", peer._nonces)):
            raise Malformed("it does not know the key")
        del self._unproved[peer]
        self._proved.add(peer)
        peer._frames.limit = LARGEST_FRAME

    def _log(self, what: str, why: str, level: int = logging.INFO) -> None:
        """Log trouble, at most once a minute of each kind: strangers must not fill the log of a training process."""
        now = concurrency.now()
        if now - self._logged.get(what, -math.inf) >= REPEAT_INTERVAL:
            self._logged[what] = now
            log.log(level, "%s at port %s: %s", what, self._listener.getsockname()[1], why)

    def _end(self, peer: Peer) -> None:
        """Idempotent."""
        self._unproved.pop(peer, None)
        self._proved.discard(peer)
        peer._close()


# -- the caller --------------------------------------------------------------------------------------------------------


class WrongKey(ConnectionError):
    """What listens there proved another key, or none."""


class Line:
    """A caller's connection to a port. One thread may receive while others send, one at a time.

    Args:
        host, port: where it listens.
        key: the port's.
        deadline: on the monotonic clock.
        about: what to tell about the caller, as JSON.

    Raises TimeoutError at the deadline; WrongKey; ConnectionError if something else listens there; another OSError if
    there is no way to it.
    """

    def __init__(self, host: str, port: int, key: bytes, deadline: float, about: Mapping[str, Any] = _NOTHING) -> None:
        self._socket = socket.create_connection((host, port), _left(deadline))
        self._frames, self._reads, self._writes = FrameReader(), select.poll(), select.poll()
        with ExitStack() as undo:
            undo.callback(self.close)
            _prepare(self._socket)
            self._reads.register(self._socket, select.POLLIN)
            self._writes.register(self._socket, select.POLLOUT)
            mine = _new_nonce()
            self.send("H", json.dumps({**about, "v": VERSION, "nonce": mine}).encode(), deadline)
            try:
                found = _greeting(self.receive(deadline), "W", nonce=NONCE_LENGTH, proof=PROOF_LENGTH)
            except (ConnectionError, ValueError) as error:
                raise ConnectionError(f"what listens there is no port of ftcoord's: {error}") from None
            nonces = mine, found["nonce"]
            if not hmac.compare_digest(found["proof"], _proof(key, "W", nonces)):
                raise WrongKey("what listens there has another key")
            self.send("P", json.dumps({"proof": _proof(key, "P", nonces)}).encode(), deadline)
            undo.pop_all()

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and nothing was received that nobody asked for."""
        return not self._reads.poll(0)

    def send(self, kind: str, payload: bytes, deadline: float) -> None:
        """Send a frame. Raises TimeoutError at the deadline, and ConnectionError; the line is of no use then."""
        data = memoryview(encode_frame(kind, payload))
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._await(self._writes, deadline)
            except OSError as error:  # TCP's own time-out is no TimeoutError here
                raise ConnectionError(str(error)) from None

    def receive(self, deadline: float) -> Frame:
        """The next frame. Raises TimeoutError at the deadline, after which it may be called again; ConnectionError and
        Malformed, after which the line is of no use."""
        while (frame := self._frames.take()) is None:
            self._await(self._reads, deadline)
            try:
                data = self._socket.recv(READ_AT_ONCE)
            except OSError as error:
                raise ConnectionError(str(error)) from None
            if not data:
                raise ConnectionError("the other end has closed the connection")
            self._frames.feed(data)
        return frame

    def close(self) -> None:
        """End the connection, also for a thread that receives. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        stop_listening(self._socket)

    def _await(self, poll: select.poll, deadline: float) -> None:
        while True:
            left = _left(deadline)
            if self._socket.fileno() < 0:  # its number may be another one's by now
                raise ConnectionError("it was closed here")
            if poll.poll(1000 * min(left, concurrency.LONGEST_WAIT)):  # which waits for so long as the system allows
                return


def _left(deadline: float) -> float:
    """The seconds left. Raises TimeoutError when there are none."""
    left = deadline - concurrency.now()
    if left <= 0:
        raise TimeoutError("the other end did not answer in time")
    return left
