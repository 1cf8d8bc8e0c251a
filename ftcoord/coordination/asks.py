"""The ask port: replicas ask the decider of their job over TCP, and it answers with what it has decided in etcd.

The rules are those of `core.asks`; this is the I/O of both ends. The port and the greeting are those of
`coordination.port`, with the key of the office, which is in etcd: no other process and no later office knows it. The
asker tells its `process` and the number of its `connection` in the greeting. Then these frames follow:

  A  asker    an Ask
  D  asker    a Withdrawal
  B  decider  why nothing is decided, as text, while an ask that came on this connection is not answered
  Q  decider  8 bytes revision of etcd, 8 bytes lease, and the value of `decided`; once per connection and decision
  G  decider  the id of an ask's member, as text: its key is gone, so it joins again

The others are JSON. Anything else closes the connection. A decider that is out of office closes all of them.
"""

from __future__ import annotations

import logging
import socket
import struct
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Final, Protocol

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.connection import address_towards_etcd, in_url, is_everywhere
from ftcoord.coordination.port import Frame, Line, Malformed, Peer, Port, listen, stop_listening
from ftcoord.core.asks import (
    REPORTS_AFTER,
    REPORTS_EVERY,
    Ask,
    AskBook,
    Asker,
    Connect,
    OpenAsk,
    Place,
    Via,
    Withdrawal,
    encode_message,
    parse_ask,
    parse_withdrawal,
)
from ftcoord.core.layout import decided_key
from ftcoord.core.office import OfficeRecord
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import StateError, ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import KeyValue
from ftcoord.log_once import LogOnce
from ftcoord.primitives.group.policy import Desk

log = logging.getLogger(__name__)

CONNECT_TIMEOUT: Final = 1.0
"""Seconds until a connection counts as impossible."""
SEND_TIMEOUT: Final = 0.5
"""Seconds until a decider that does not read counts as gone."""
LOOKS_EVERY: Final = 1.0
"""Seconds between two looks at whether an open connection is silent."""
_NO_PORT: Final = "replicas cannot ask this process, and ask through etcd, which takes longer: %s"
_HINT: Final = "its port answers the replicas of the job, which read its key in etcd"
LARGEST_PORT: Final = 65535
LONGEST_REASON: Final = 400
"""Characters of why a connection was closed."""
_ANSWER: Final = struct.Struct(">qq")
_LOOPBACK: Final = "127.0.0.1"

Read = Callable[[str, bytes], QuorumRecord]
"""Parses a decided record. Raises StateError."""


# -- the decider -------------------------------------------------------------------------------------------------------


class AskDesk(Desk):
    """Where replicas ask the member that decides. Two threads use it: the group's, and the port's while it is open.

    Args:
        job: the job.
        line: this process's own, which learns from the group who decides.
        read: parses a decided record.
    """

    has_port = True

    def __init__(self, job: Job, line: AskLine, read: Read) -> None:
        self._job, self._line, self._read = job, line, read  # never change
        # Only the group's thread:
        self._listener: socket.socket | None = None
        self._wake: Callable[[], None] = _nothing
        self._record: KeyValue | None = None
        # Both threads:
        self._lock = concurrency.lock("AskDesk._lock")  # guards what follows
        self._port: Port | None = None
        self._book = AskBook()
        self._peers: dict[Via, Peer | _Here] = {}
        self._answer = b""
        self._seen_at = 0
        self._why = ""
        # Without a lock: True is only written by the port's thread, and False by the group's.
        self._is_swept = False
        self._reports: dict[Via, float] = {}  # only the port's thread: when each gets its next report

    @property
    def changes(self) -> int:  # type: ignore[override]
        return self._book.changes

    # -- the group's thread --------------------------------------------------------------------------------------------

    def open(self, key: str) -> str:
        self.close()
        try:
            self._listener, address = listen_for(self._job)
        except RuntimeError as error:
            log.warning(_NO_PORT, error)
            return ""
        self._key = key
        return address

    def serve(self, wake: Callable[[], None]) -> None:
        listener, self._listener, self._wake = self._listener, None, wake
        with self._lock:  # whoever finds this desk from now on must not find the asks of an earlier term
            self._book, self._peers, self._seen_at = AskBook(), {}, 0
        self._record, self._is_swept = None, False
        if listener is None:
            return
        key = bytes.fromhex(self._key)
        try:
            self._port = Port(listener, key, self, name="ftcoord-port", hint=_HINT, failed=self._note_failure)
        except (OSError, ThreadNotStarted) as error:
            stop_listening(listener)
            log.warning(_NO_PORT, error)
            return
        self._line.is_here(self._key, self)

    def close(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            self._line.is_here_no_more(self)
            port.close()
            self._reports.clear()
        if self._listener is not None:
            stop_listening(self._listener)
            self._listener = None

    def office_is(self, office: OfficeRecord | None, revision: int, *, anew: bool) -> None:
        self._line.office_is(office, revision, anew=anew)

    def has_all(self) -> bool:
        port = self._port
        if port is None or self._is_swept or port.is_quiet:
            self._is_swept = False
            return True
        port.submit(self._sweep)  # it reads all first
        return False

    def asks(self, alive: Collection[str], revision: int) -> Mapping[str, OpenAsk]:
        with self._lock:
            self._seen_at = revision
            gone = [(self._peers.get(one.via), one.ask.member) for one in self._book.lose(alive, revision)]
            counting = self._book.counting(alive)
        _send_each((peer, "G", member.encode()) for peer, member in gone)
        return counting

    def catches_up(self, revision: int) -> float:
        with self._lock:
            return self._book.catches_up(revision)

    def decided(self, record: KeyValue | None) -> None:
        if record is self._record or self._port is None:
            return
        self._record = record
        answered = self._read(record.key, record.value).answered if record is not None else {}
        with self._lock:
            self._answer = _ANSWER.pack(record.mod_revision, record.lease) + record.value if record is not None else b""
            peers = [self._peers.get(via) for via in self._book.answer(answered)]
            answer = self._answer
        _send_each((peer, "Q", answer) for peer in peers)

    def waits(self, reason: str) -> None:
        self._why = reason

    # -- the port's thread ---------------------------------------------------------------------------------------------

    def handle(self, batch: Sequence[tuple[Peer | _Here, Frame | None]]) -> None:
        """Take in what came. The group decides after that. Of this process's own asks, on any thread."""
        answered, closed = dict[Peer | _Here, None](), dict[Peer | _Here, str]()
        now, port = concurrency.now(), self._port
        with self._lock:
            for peer, frame in batch:
                try:
                    if frame is None:
                        self._end(_via(peer))
                    elif peer not in closed and self._take(_via(peer), peer, frame, now):
                        answered[peer] = None
                except (StateError, Malformed) as error:
                    closed[peer] = neutral(str(error)[:LONGEST_REASON])
                    self._end(_via(peer))
            answer = self._answer
        _send_each((peer, "Q", answer) for peer in answered)
        for peer, why in closed.items():
            if isinstance(peer, _Here):
                peer.frames.put(None)
            elif port is not None:
                port.close_peer(peer, why)
        self._wake()

    def tick(self) -> float:
        """Report to those that wait."""
        now = concurrency.now()
        due = [via for via, at in self._reports.items() if at <= now]
        if due:
            with self._lock:
                all_waiting = self._book.waiting()
                waiting = [(via, self._peers.get(via)) for via in due if via in all_waiting]
            for via in due:
                del self._reports[via]
            self._reports.update((via, now + REPORTS_EVERY) for via, _ in waiting)
            _send_each((peer, "B", self._why.encode()) for _, peer in waiting)
        return min(self._reports.values(), default=inf)

    def _take(self, via: Via, peer: Peer | _Here, frame: Frame, now: float) -> bool:
        """With the lock held. Whether it is an ask that is answered already. Raises StateError and Malformed."""
        if not via.process:
            raise Malformed("its greeting lacks process and connection")
        self._peers[via] = peer
        if frame.kind == "A":
            if isinstance(peer, Peer):
                self._reports.setdefault(via, now + REPORTS_AFTER)
            return self._book.take(parse_ask(frame.payload), via, now, self._seen_at)
        if frame.kind != "D":
            raise Malformed(f"it sent a frame of kind {frame.kind!r}")
        self._book.withdraw(parse_withdrawal(frame.payload))
        return False

    def _end(self, via: Via) -> None:
        """With the lock held."""
        self._book.end(via)
        self._peers.pop(via, None)
        self._reports.pop(via, None)

    def _sweep(self) -> None:
        self._is_swept = True
        self._wake()

    def _note_failure(self, error: BaseException) -> None:
        log.error("replicas cannot ask this process any longer, and ask through etcd: %r", error)


def listen_for(job: Job) -> tuple[socket.socket, str]:
    """A listener for those that ask, and its address for others: the job's `bind=`, else that from which this host
    reaches etcd. No names are looked up but etcd's: a name service must not keep the office empty.

    Raises RuntimeError.
    """
    chosen = job.bind if job.bind and not is_everywhere(job.bind) else ""
    host = chosen or address_towards_etcd(job) or _LOOPBACK
    listener = listen(f"{in_url(job.bind or host)}:0")
    return listener, f"{in_url(host)}:{listener.getsockname()[1]}"


def _can_be_read(ask: Ask) -> bool:
    """Whether a decider can parse it. Else it would close the connection of all replicas of this process; by key it is
    this replica alone that cannot be read."""
    try:
        parse_ask(encode_message(ask))
    except StateError:
        return False
    return True


def _nothing() -> None:
    pass


def _send_each(frames: Iterable[tuple[Peer | _Here | None, str, bytes]]) -> None:
    for peer, kind, payload in frames:
        if peer is not None:
            peer.send(kind, payload)


def _via(peer: Peer | _Here) -> Via:
    """The connection that this is; without a process, if its greeting does not tell."""
    process, number = peer.about.get("process"), peer.about.get("connection")
    if not isinstance(process, str) or type(number) is not int:
        return Via("", 0)
    return Via(process, number)


class _Here:
    """The desk's end of a connection from its own process, which needs no socket and no proof."""

    def __init__(self, about: Mapping[str, object]) -> None:
        self.about = about
        self.frames: concurrency.Queue[Frame | None] = concurrency.inbox()
        """What the other end is to receive; None: nothing more."""

    def send(self, kind: str, payload: bytes) -> None:
        """As `Peer.send`."""
        self.frames.put(Frame(kind, payload))


class _LineHere:
    """The other end of that, as a `Line`."""

    def __init__(self, desk: AskDesk, about: Mapping[str, object]) -> None:
        self._desk, self._end, self._is_open = desk, _Here(about), True

    def send(self, kind: str, payload: bytes, deadline: float) -> None:
        """The desk has it then."""
        self._desk.handle([(self._end, Frame(kind, payload))])

    def receive(self, deadline: float) -> Frame:
        """As `Line.receive`."""
        try:
            frame = self._end.frames.get(timeout=max(deadline - concurrency.now(), 0))
        except concurrency.Empty:
            raise TimeoutError("nothing came") from None
        if frame is None:
            raise ConnectionError("this process decides no more")
        return frame

    def close(self) -> None:
        """As `Line.close`."""
        self._desk.handle([(self._end, None)])
        self._end.frames.put(None)


# -- the asker ---------------------------------------------------------------------------------------------------------


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


class AskLine:
    """This process's way to the decider of one job, for all of its replicas; see `line_of`. Thread-safe."""

    def __init__(self, job: Job, read: Read) -> None:
        self._job, self._key, self._read = job, decided_key(job.prefix), read  # never change
        self._process = uuid.uuid4().hex
        self._log = LogOnce(log)  # only with the lock held
        self._changed = concurrency.condition("AskLine._changed")
        """Guards what follows. Never held while a caller is called."""
        self._asker = Asker[Caller](patience=job.heartbeat_timeout + 1)
        self._here: tuple[str, AskDesk] | None = None
        """The office that this process holds: its key, and where it is asked."""
        self._line: Line | _LineHere | None = None
        self._office_at = -1
        self._why = ""
        """Why there is no connection; empty if the decider has no port."""
        self._thread: concurrency.Thread | None = None
        self.users = 0
        """Replicas that have it; guarded by the lock of the process's lines."""
        self._is_closed = False

    def office_is(self, office: OfficeRecord | None, revision: int, *, anew: bool) -> None:
        """Who decides, since this revision of etcd, as one of the replicas' watches has it; see `Desk`."""
        place = Place(office.address, office.key) if office is not None else None
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

    def is_here(self, key: str, desk: AskDesk) -> None:
        """This process decides, in the office with this key."""
        with self._changed:
            self._here = key, desk

    def is_here_no_more(self, desk: AskDesk) -> None:
        """It does no more."""
        with self._changed:
            if self._here is not None and self._here[1] is desk:
                self._here = None
                if isinstance(self._line, _LineHere):
                    self._hang_up()

    @property
    def is_by_key(self) -> bool:
        """Whether replicas ask by their keys for now."""
        return self._asker.is_by_key

    def ask(self, caller: Caller, ask: Ask) -> bool:
        """Ask, or ask again; False if that goes by key now."""
        with self._changed:
            if self._asker.is_by_key or self._is_closed or not self._has_thread() or not _can_be_read(ask):
                return False
            if self._asker.begin(caller, ask, concurrency.now()):
                self._send("A", ask, SEND_TIMEOUT)
            else:
                self._changed.notify_all()
            return True

    def end(self, caller: Caller, *, withdraws: bool) -> None:
        """A caller asks no more. Does not block."""
        with self._changed:
            ask = self._asker.end(caller)
            if ask is not None and withdraws:
                self._send("D", Withdrawal(ask.member, ask.serial), 0.0)

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

    def _send(self, kind: str, message: Ask | Withdrawal, timeout: float) -> None:
        if self._line is not None:
            try:
                self._line.send(kind, encode_message(message), concurrency.now() + timeout)
            except OSError as error:
                self._why = str(error)
                self._hang_up()

    def _hang_up(self) -> None:
        """The thread notices."""
        line, self._line = self._line, None
        if line is not None:
            line.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (due := self._next()) is not None:
                if isinstance(due, Connect):
                    self._serve(due)
                else:
                    self._have_ask_by_key(due)
        finally:
            if sys.exc_info()[1] is not None:
                log.exception("the thread that asks the decider failed: replicas of this process ask through etcd")
                with self._changed:
                    self._thread = None  # the next ask begins another
                    told = self._asker.decides_at(Place("", ""), concurrency.now())
                self._have_ask_by_key(told)

    def _next(self) -> Connect | list[Caller] | None:
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

    def _serve(self, connect: Connect) -> None:
        """Connect, and receive until the connection ends."""
        line: Line | _LineHere | None = None
        try:
            line = self._connected(connect)
            if self._begin(line, connect.number):
                self._receive(line)
        except (OSError, ValueError) as error:  # WrongKey, TimeoutError, Malformed; it was closed; no number, no key
            with self._changed:
                self._why = f"{connect.place.address}: {error}"
        finally:
            with self._changed:
                if line is not None and self._line is line:
                    self._line = None
                self._asker.lost(connect.number, concurrency.now())
            if line is not None:
                line.close()

    def _connected(self, connect: Connect) -> Line | _LineHere:
        """Raises OSError and ValueError."""
        about = {"process": self._process, "connection": connect.number}
        address, key = connect.place
        here = self._here
        if here is not None and here[0] == key:
            return _LineHere(here[1], about)
        host, _, port = address.rpartition(":")
        if int(port) > LARGEST_PORT:
            raise ValueError("there is no such port")
        until = concurrency.now() + CONNECT_TIMEOUT
        return Line(host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(key), until, about)

    def _begin(self, line: Line | _LineHere, number: int) -> bool:
        """Whether somebody still wants the line."""
        with self._changed:
            asks = self._asker.proved(number, concurrency.now())
            if asks is None or self._is_closed:
                return False
            self._line = line
            if isinstance(line, _LineHere):
                self._asker.came(concurrency.now())  # nothing can be lost on that
            self._log.forget()
            for ask in asks:
                self._send("A", ask, SEND_TIMEOUT)
            return True

    def _receive(self, line: Line | _LineHere) -> None:
        """Raises OSError when the line ends, and Malformed."""
        while True:
            try:
                frame = line.receive(concurrency.now() + LOOKS_EVERY)
            except TimeoutError:
                with self._changed:
                    if not isinstance(line, _LineHere) and self._asker.is_silent(concurrency.now()):
                        raise ConnectionError("it does not answer") from None
                continue
            try:
                self._take(frame)
            except (StateError, struct.error) as error:
                raise Malformed(str(error)) from None

    def _take(self, frame: Frame) -> None:
        """Raises Malformed, StateError and struct.error."""
        with self._changed:
            self._asker.came(concurrency.now())
            callers = list(self._asker.asks)
        if frame.kind == "Q":
            revision, lease = _ANSWER.unpack_from(frame.payload)
            self._take_answer(frame.payload[_ANSWER.size :], revision, lease, callers)
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
        line = lines.lines.get(key)
        if line is None:
            line = lines.lines[key] = AskLine(job, read)
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
