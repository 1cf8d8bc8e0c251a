"""The asker's end of the ask port: this process's way to the decider of a job, for all of its replicas.

The rules are those of `core.asks`; this is the I/O. docs/protocol.md has the frames. The asker tells its `process` and
the number of its `connection` in the greeting. A decider in this process is asked without a socket.
"""

from __future__ import annotations

import logging
import struct
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.port import Frame, Line, Malformed
from ftcoord.core import asks
from ftcoord.core.asks import Ask, Withdrawal
from ftcoord.core.layout import decided_key
from ftcoord.core.office import OfficeRecord
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import StateError, ThreadNotStarted
from ftcoord.log_once import LogOnce

log = logging.getLogger(__name__)

CONNECT_TIMEOUT: Final = 1.0
"""Seconds until a connection counts as impossible."""
SEND_TIMEOUT: Final = 0.5
"""Seconds until a decider that does not read counts as gone."""
LOOKS_EVERY: Final = 1.0
"""Seconds between two looks at whether an open connection is silent."""
LARGEST_PORT: Final = 65535
ANSWER: Final = struct.Struct(">qq")
"""What a `Q` begins with: etcd's revision of the record, and its lease."""

Read = Callable[[str, bytes], QuorumRecord]
"""Parses a decided record. Raises StateError."""


class Caller(Protocol):
    """A replica, to its line. Its methods are called on any thread, and must not block."""

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        """A record was decided while it asked."""

    def by_key(self) -> None:
        """It must ask by its key from now on."""

    def gone(self, member: str) -> None:
        """This member of its has no key."""

    def waits(self, why: str) -> None:
        """The decider does not decide, for this reason."""


class Inside:
    """A connection to a decider in this process, for which it is as a `Peer`.

    Args:
        about: what the greeting would tell.
        tell: takes what the asker sends, and None for its end; must not block, and answers on other threads only.
        take: takes what the decider sends.
    """

    is_open = True

    def __init__(self, about: Mapping[str, object], tell: Tell, take: Callable[[Inside, Frame], None]) -> None:
        self.about, self._tell, self._take = about, tell, take

    def send(self, kind: str, payload: bytes) -> None:
        """The decider sends a frame."""
        self._take(self, Frame(kind, payload))

    def tell(self, message: Ask | Withdrawal) -> None:
        """The asker sends this."""
        self._tell(self, message)

    def close(self) -> None:
        """As `Line.close`."""
        self._tell(self, None)


Tell = Callable[[Inside, "Ask | Withdrawal | None"], None]


class AskLine:
    """The way to the decider of one job; see `line_of`. Thread-safe."""

    def __init__(self, job: Job, read: Read) -> None:
        self._key, self._read = decided_key(job.prefix), read  # never change
        self._process = uuid.uuid4().hex
        self._log = LogOnce(log)  # only with the lock held
        self._changed = concurrency.condition("AskLine._changed")
        """Guards what follows. Never held while a caller is called."""
        self._asker = asks.Asker[Caller](patience=job.heartbeat_timeout + 1)
        self._here: tuple[str, Tell] | None = None
        """The office that this process holds: its key, and where it is asked."""
        self._line: Line | Inside | None = None
        self._office_at = -1
        self._why = ""
        """Why there is no connection; empty if the decider has no port."""
        self._thread: concurrency.Thread | None = None
        self._is_closed = False
        self.users = 0
        """Replicas that have it; guarded by the lock of the process's lines."""

    def office_is(self, office: OfficeRecord | None, revision: int, *, anew: bool) -> None:
        """Who decides, since this revision of etcd, as one of the replicas' watches has it; see `Desk`."""
        place = asks.Place(office.address, office.key) if office is not None else None
        with self._changed:
            if revision < self._office_at and not anew:  # this replica's watch lags
                return
            self._office_at = revision
            if place == self._asker.place:
                return
            self._why = ""
            self._hang_up()
            told = self._asker.decides_at(place, concurrency.now())
            self._changed.notify_all()
        self._have_ask_by_key(told)

    def is_here(self, key: str, tell: Tell) -> None:
        """This process decides, in the office with this key."""
        with self._changed:
            self._here = key, tell

    def is_here_no_more(self, key: str) -> None:
        """It does no more."""
        with self._changed:
            if self._here is None or self._here[0] != key:
                return
            self._here = None
            if isinstance(self._line, Inside):
                self._line = None
                self._asker.lost(self._asker.number, concurrency.now())
                self._changed.notify_all()

    @property
    def is_by_key(self) -> bool:
        """Whether replicas ask by their keys for now."""
        return self._asker.is_by_key

    def ask(self, caller: Caller, ask: Ask) -> bool:
        """Ask, or ask again; False if that goes by key now."""
        with self._changed:
            if self._asker.is_by_key or self._is_closed or not self._has_thread():
                return False
            if self._asker.begin(caller, ask, concurrency.now()):
                self._send(ask, SEND_TIMEOUT)
            else:
                self._changed.notify_all()
            return True

    def end(self, caller: Caller, *, withdraws: bool) -> None:
        """A caller asks no more. Does not block."""
        with self._changed:
            ask = self._asker.end(caller)
            if ask is not None and withdraws:
                self._send(Withdrawal(ask.member, ask.serial), 0.0)

    def close(self) -> None:
        """End the connection. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._hang_up()
            self._changed.notify_all()

    # -- with the lock held --------------------------------------------------------------------------------------------

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = concurrency.thread(self._run, "ftcoord-line")
            try:
                thread.start()
            except ThreadNotStarted as error:
                self._log.say(f"replicas of this process ask through etcd, which takes longer: {error}")
                return False
            self._thread = thread
        return True

    def _send(self, message: Ask | Withdrawal, timeout: float) -> None:
        if isinstance(self._line, Inside):
            self._line.tell(message)
        elif self._line is not None:
            kind = "A" if isinstance(message, Ask) else "D"
            try:
                self._line.send(kind, asks.encode_message(message), concurrency.now() + timeout)
            except OSError as error:
                self._why = str(error)
                self._hang_up()

    def _hang_up(self) -> None:
        """The thread notices."""
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _begin(self, line: Line | Inside, number: int) -> bool:
        """Whether somebody still wants the line."""
        open_ = self._asker.proved(number, concurrency.now())
        if open_ is None or self._is_closed:
            return False
        self._line = line
        self._log.forget()
        for ask in open_:
            self._send(ask, SEND_TIMEOUT)
        return True

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (due := self._next()) is not None:
                if isinstance(due, asks.Connect):
                    self._serve(due)
                else:
                    self._have_ask_by_key(due)
        finally:
            if sys.exc_info()[1] is not None:
                log.exception("the thread that asks the decider failed: replicas of this process ask through etcd")
                with self._changed:
                    self._thread = None  # the next ask begins another
                    told = self._asker.decides_at(asks.Place("", ""), concurrency.now())
                self._have_ask_by_key(told)

    def _next(self) -> asks.Connect | list[Caller] | None:
        with self._changed:
            while not self._is_closed:
                due = self._asker.next(concurrency.now())
                if not isinstance(due, float):
                    return due
                self._changed.wait(min(due - concurrency.now(), concurrency.LONGEST_WAIT))
        return None

    def _have_ask_by_key(self, callers: Sequence[Caller]) -> None:
        with self._changed:
            if callers and self._why:  # else the decider has no port, and has logged why
                self._log.say(
                    f"replicas of this process ask through etcd, which takes longer, for the decider is not reached:"
                    f" {self._why}; if this lasts, give its hosts bind=ADDRESS in the job's address"
                )
        for caller in callers:
            caller.by_key()

    def _serve(self, connect: asks.Connect) -> None:
        """Connect, and receive until the connection ends; a decider in this process calls `_take` itself."""
        (address, key), number = connect
        about = {"process": self._process, "connection": number}
        with self._changed:
            if self._here is not None and self._here[0] == key:
                self._begin(Inside(about, self._here[1], self._take), number)
                self._asker.came(concurrency.now())  # nothing can be lost on that
                return
        line: Line | None = None
        try:
            host, _, port = address.rpartition(":")
            if int(port) > LARGEST_PORT:
                raise ValueError("there is no such port")
            until = concurrency.now() + CONNECT_TIMEOUT
            line = Line(host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(key), until, about)
            with self._changed:
                is_wanted = self._begin(line, number)
            if is_wanted:
                self._receive(line)
        except (OSError, ValueError) as error:  # WrongKey, TimeoutError, Malformed; it was closed; no number, no key
            with self._changed:
                self._why = f"{address}: {error}"
        finally:
            with self._changed:
                if line is not None and self._line is line:
                    self._line = None
                self._asker.lost(number, concurrency.now())
            if line is not None:
                line.close()

    def _receive(self, line: Line) -> None:
        """Raises OSError when the line ends, and Malformed."""
        while True:
            try:
                frame = line.receive(concurrency.now() + LOOKS_EVERY)
            except TimeoutError:
                with self._changed:
                    if self._asker.is_silent(concurrency.now()):
                        raise ConnectionError("it does not answer") from None
                continue
            try:
                self._take(line, frame)
            except (StateError, struct.error) as error:
                raise Malformed(str(error)) from None

    def _take(self, line: Line | Inside, frame: Frame) -> None:
        """Raises Malformed, StateError and struct.error."""
        with self._changed:
            if line is self._line:
                self._asker.came(concurrency.now())
            callers = list(self._asker.asks)
        if frame.kind == "Q":
            revision, lease = ANSWER.unpack_from(frame.payload)
            self._take_answer(frame.payload[ANSWER.size :], revision, lease, callers)
        elif frame.kind == "B":
            for caller in callers:
                caller.waits(frame.payload.decode(errors="replace"))
        elif frame.kind == "G":
            member = frame.payload.decode(errors="replace")
            with self._changed:
                callers = self._asker.answered(lambda ask: ask.member == member)
            for caller in callers:
                caller.gone(member)
        else:
            raise Malformed(f"it sent a frame of kind {frame.kind!r}")

    def _take_answer(self, value: bytes, revision: int, lease: int, callers: Iterable[Caller]) -> None:
        try:
            answered = self._read(self._key, value).answered
        except StateError:  # each caller's member reads it too, and raises this
            answered = {}
        with self._changed:
            self._asker.answered(lambda ask: answered.get(ask.member, 0) >= ask.serial)
        for caller in callers:
            caller.answered(value, revision, lease)


# -- the lines of a process --------------------------------------------------------------------------------------------


class _Lines:
    """Those of this process, by job. Thread-safe."""

    def __init__(self) -> None:
        self.lock = concurrency.lock("_Lines.lock")
        self.lines: dict[tuple[str, str, str], AskLine] = {}


def line_of(job: Job, read: Read) -> AskLine:
    """The line of this process to the decider of a job, for one more replica. Call `release` when that has left."""
    lines = concurrency.of_process(_Lines)
    with lines.lock:
        key = job.scheme, job.endpoints, job.name
        line = lines.lines.get(key) or AskLine(job, read)
        lines.lines[key] = line
        line.users += 1
        return line


def release(job: Job, line: AskLine) -> None:
    """A replica needs its line no more."""
    lines = concurrency.of_process(_Lines)
    with lines.lock:
        line.users -= 1
        if line.users:
            return
        lines.lines.pop((job.scheme, job.endpoints, job.name), None)
    line.close()
