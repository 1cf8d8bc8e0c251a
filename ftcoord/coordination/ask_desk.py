"""The decider's end of the ask port: replicas ask here, and it answers with what it has decided in etcd.

The rules are those of `core.asks`; this is the I/O. The port and the greeting are those of `coordination.port`, with
the key of the office, which is in etcd: no other process and no later office knows it. Then these frames follow:

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.coordination.address import EVERYWHERE, Job, address_towards_etcd, in_url
from ftcoord.coordination.ask_line import ANSWER, AskLine, Inside, Read
from ftcoord.coordination.port import Frame, Malformed, Peer, Port, listen, stop_listening
from ftcoord.core import asks
from ftcoord.core.asks import Ask, OpenAsk, Via, Withdrawal
from ftcoord.core.office import OfficeRecord
from ftcoord.errors import StateError, ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.use import Desk

log = logging.getLogger(__name__)

_NO_PORT: Final = "replicas cannot ask this process, and ask through etcd, which takes longer: %s"
LONGEST_REASON: Final = 400
"""Characters of why a connection was closed."""
_LOOPBACK: Final = "127.0.0.1"
_Sender: TypeAlias = "Peer | Inside"


class AskDesk(Desk):
    """Where replicas ask the member that decides. Two threads use it: the group's, and the port's while it is open.

    Args:
        job: the job.
        line: this process's own, which learns from the group who decides.
        read: parses a decided record.
    """

    has_port = True
    name, hint = "ftcoord-port", "its port answers the replicas of the job, which read its key in etcd"

    def __init__(self, job: Job, line: AskLine, read: Read) -> None:
        self._job, self._line, self._read = job, line, read  # never change
        # Only the group's thread:
        self._listener: socket.socket | None = None
        self._wake: Callable[[], None] = lambda: None
        self._record: KeyValue | None = None
        # Both threads:
        self._lock = concurrency.lock("AskDesk._lock")  # guards what follows; nothing is sent while it is held
        self._port: Port | None = None
        self._book = asks.AskBook()
        self._senders: dict[Via, _Sender] = {}
        self._answer = b""
        self._seen_at = 0
        self._reports_at = inf
        # Without a lock:
        self._why = ""
        self._is_swept = False  # True is only written by the port's thread, and False by the group's

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
            self._book, self._senders, self._seen_at, self._reports_at = asks.AskBook(), {}, 0, inf
        self._record, self._is_swept = None, False
        if listener is None:
            return
        try:
            self._port = Port(listener, bytes.fromhex(self._key), self)
        except (OSError, ThreadNotStarted) as error:
            stop_listening(listener)
            log.warning(_NO_PORT, error)
            return
        self._line.is_here(self._key, self.ask_here)

    def close(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            self._line.is_here_no_more(self._key)
            port.close()
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
            gone = [(self._senders.get(one.via), one.ask.member) for one in self._book.lose(alive, revision)]
            counting = self._book.counting(alive)
        for sender, member in gone:
            _send_each((sender,), "G", member.encode())
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
            self._answer = ANSWER.pack(record.mod_revision, record.lease) + record.value if record is not None else b""
            senders = [self._senders.get(via) for via in self._book.answer(answered)]
            answer = self._answer
        _send_each(senders, "Q", answer)

    def waits(self, reason: str) -> None:
        self._why = reason

    # -- the port's thread ---------------------------------------------------------------------------------------------

    def handle(self, batch: Sequence[tuple[Peer, Frame | None]]) -> None:
        """Take in what came. The group decides after that."""
        came, closed = list[tuple[Peer, Via, Ask | Withdrawal | None]](), set[Peer]()
        for peer, frame in batch:
            if peer in closed:
                continue
            via, message = _via(peer), None
            try:
                message = _parse(via, frame)
            except (StateError, Malformed) as error:
                closed.add(peer)
                if self._port is not None:
                    self._port.close_peer(peer, neutral(str(error)[:LONGEST_REASON]))
            came.append((peer, via, message))
        _send_each(*self._take(came))

    def tick(self) -> float:
        """Report to those that wait."""
        now = concurrency.now()
        if self._reports_at <= now:
            with self._lock:
                waiting = [self._senders.get(via) for via in self._book.waiting()]
                self._reports_at = now + asks.REPORTS_EVERY if waiting else inf
            _send_each(waiting, "B", self._why.encode())
        return self._reports_at

    def failed(self, error: BaseException) -> None:
        """See `Handler`."""
        log.error("replicas cannot ask this process any longer, and ask through etcd: %r", error)

    def _sweep(self) -> None:
        self._is_swept = True
        self._wake()

    # -- any thread ----------------------------------------------------------------------------------------------------

    def ask_here(self, via: Inside, message: Ask | Withdrawal | None) -> None:
        """As if this had come on a connection; None: its end. The port's thread answers: who asks holds a lock."""
        told, port = self._take([(via, _via(via), message)]), self._port
        if told[0] and port is not None:
            port.submit(lambda: _send_each(*told))

    def _take(
        self, came: Iterable[tuple[_Sender, Via, Ask | Withdrawal | None]]
    ) -> tuple[Collection[_Sender], str, bytes]:
        """Returns who has asked what is answered already, and what to send them."""
        answered, now = dict[_Sender, None](), concurrency.now()
        with self._lock:
            before = self._book.changes
            for sender, via, message in came:
                if message is None:
                    self._book.end(via)
                    self._senders.pop(via, None)
                elif isinstance(message, Withdrawal):
                    self._book.withdraw(message)
                else:
                    self._senders[via] = sender
                    self._reports_at = min(self._reports_at, now + asks.REPORTS_AFTER)
                    if self._book.take(message, via, now, self._seen_at):
                        answered[sender] = None
            has_changed, answer = self._book.changes != before, self._answer
        if has_changed:
            self._wake()
        return answered, "Q", answer


def listen_for(job: Job) -> tuple[socket.socket, str]:
    """A listener for those that ask, and its address for others: the job's `bind=`, else that from which this host
    reaches etcd. No names are looked up but etcd's: a name service must not keep the office empty.

    Raises RuntimeError.
    """
    chosen = job.bind if job.bind not in EVERYWHERE else ""
    host = chosen or address_towards_etcd(job) or _LOOPBACK
    listener = listen(f"{in_url(job.bind or host)}:0")
    return listener, f"{in_url(host)}:{listener.getsockname()[1]}"


def _via(sender: _Sender) -> Via:
    """The connection that this is; without a process, if its greeting does not tell."""
    process, number = sender.about.get("process"), sender.about.get("connection")
    return Via(process, number) if isinstance(process, str) and type(number) is int else Via("", 0)


def _parse(via: Via, frame: Frame | None) -> Ask | Withdrawal | None:
    """Raises StateError and Malformed."""
    if frame is None:
        return None
    if not via.process:
        raise Malformed("its greeting lacks process and connection")
    if frame.kind == "A":
        return asks.parse_ask(frame.payload)
    if frame.kind == "D":
        return asks.parse_withdrawal(frame.payload)
    raise Malformed(f"it sent a frame of kind {frame.kind!r}")


def _send_each(senders: Iterable[_Sender | None], kind: str, payload: bytes) -> None:
    for sender in senders:
        if sender is not None:
            sender.send(kind, payload)
