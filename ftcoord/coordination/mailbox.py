"""Calls that one process makes and another answers, with etcd between them.

<prefix>/server            which incarnation answers, as long as that lives
<prefix>/in/<line>         the last call on a line, under the caller's lease; gone when the caller gives up or dies,
                           and left there when it was answered
<prefix>/out/<line>        the last answer on it, under the lease of the one who answers
<prefix>/metadata/<rank>   what a rank last told its manager

A line carries one call at a time. Calls and answers carry an id, so that a repeated write
or a second reading is harmless. A call is addressed to the incarnation that was there when it was made: whoever takes
that one's place does not hear it, and it is made anew.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeVar

from ftcoord import concurrency
from ftcoord.core.layout import mailbox_answer_key, mailbox_call_key, mailbox_calls_span, mailbox_server_key
from ftcoord.core.lease import SessionState
from ftcoord.core.strict import build
from ftcoord.errors import EtcdError, LeaseLost
from ftcoord.etcd.api import Compare, Delete, Etcd, KeyValue, Op, Put, Span
from ftcoord.etcd.retry import UNANSWERED, retry_until_answered
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY: Final = 0.5
"""Seconds until a mirror that failed is tried again."""
CALLER_TTL: Final = 10
"""Seconds that a call outlives a caller that died."""
GRACE: Final = 5.0
"""Seconds that the one who answers may be away: it may have lost its lease, and then comes back under another."""
GIVE_UP: Final = 0.5
"""Seconds for taking back a call that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked on a line, and of which incarnation; `deadline` on the clock of the one who answers."""

    line: str
    id: str
    to: str
    body: Mapping[str, Any]
    deadline: float

    def read(self, kind: type[T]) -> T:
        """Its body as a record of that kind. Raises StateError when it is none."""
        wanted = inspect.get_annotations(kind)
        return build(kind, self.line, {name: self.body.get(name) for name in wanted})


class Mailbox:
    """Hears the calls under a prefix, on a thread of its own.

    Args:
        etcd: the door to etcd.
        prefix: of the mailbox.
        incarnation: what is in `server`; calls that are addressed to others are not heard.
        hear: called with each call, once; and with the line of a caller that gave up or died, and None. Must not block.
    """

    def __init__(self, etcd: Etcd, prefix: str, incarnation: str, hear: Callable[[str, Call | None], None]) -> None:
        self._etcd, self._prefix, self._incarnation, self._hear = etcd, prefix, incarnation, hear
        self._heard: dict[str, str] = {}
        self._informer = Informer(etcd, [mailbox_calls_span(prefix)], self._tell, "ftcoord-mailbox")

    def answer(self, call: Call, body: Mapping[str, Any], lease: int) -> None:
        """Answer a call, under a lease, for as long as its caller waits. Raises TimeoutError, EtcdError."""
        value = json.dumps({**body, "id": call.id}).encode()
        put_all(self._etcd, [Put(mailbox_answer_key(self._prefix, call.line), value, lease)], call.deadline)

    def close(self) -> None:
        """Hear no more."""
        self._informer.close()

    def _tell(self, there: Mirror) -> None:
        found = [_parse(kv) for kv in there.kvs.values()]
        calls = {call.line: call for call in found if call is not None and call.to == self._incarnation}
        for line in self._heard.keys() - calls.keys():
            del self._heard[line]
            self._hear(line, None)
        for line, call in calls.items():
            if self._heard.get(line) != call.id:
                self._heard[line] = call.id
                self._hear(line, call)


def _parse(kv: KeyValue) -> Call | None:
    try:
        body = json.loads(kv.value)
        deadline = concurrency.now() + float(body["timeout"])
        return Call(kv.key.rpartition("/")[2], str(body["id"]), str(body["to"]), body, deadline)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        log.warning("etcd key %r is no call of ftcoord's and is ignored: %r", kv.key, error)
        return None


class Gone(ConnectionResetError):
    """Who was asked is gone for longer than it takes to come back."""


class Replaced(Gone):
    """Another incarnation has taken the place of the one that was asked."""


class MailboxClient:
    """Makes calls to a mailbox, one at a time on each line.

    Args:
        etcd: the door to etcd.
        prefix: of the mailbox.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd, self._prefix = etcd, prefix
        self._lock = concurrency.lock("MailboxClient._lock")
        self._session: Session | None = None
        self._lines: dict[str, _Channel] = {}

    def call(self, name: str, body: Mapping[str, Any], deadline: float, *, again: bool) -> Mapping[str, Any]:
        """The answer. Raises TimeoutError after the monotonic `deadline`, EtcdError, and Gone.

        Args:
            again: whether whoever replaces the one that was asked is asked as well, in place of Replaced being raised.
        """
        with self._lock:
            line = self._lines.setdefault(name, _Channel(self._etcd, self._prefix, name))
        with concurrency.held(line.turn, deadline, TimeoutError("another call on this line was not answered")):
            while True:
                try:
                    return line.ask(body, self._lease(deadline), deadline)
                except LeaseLost as error:
                    log.debug("a call is made again: %s", error)
                    self._drop_lease()
                except Replaced as error:
                    if not again:
                        raise
                    log.debug("a call is made again: %s", error)

    def close(self) -> None:
        """Keep no call alive any more, and hear of no answer. Idempotent."""
        self._drop_lease()
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()

    def _lease(self, deadline: float) -> int:
        with self._lock:
            if self._session is None or self._session.state is SessionState.LOST:
                self._session = _in_time(lambda _: Session(self._etcd, CALLER_TTL), deadline)
            return self._session.lease_id

    def _drop_lease(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.orphan()


class _Channel:
    """Carries one call at a time: written, then waited for. Its watches stay for the calls to come.

    `turn` is held by the one who calls.
    """

    def __init__(self, etcd: Etcd, prefix: str, name: str) -> None:
        self.turn = concurrency.lock("_Channel.turn")
        self._etcd, self._key = etcd, mailbox_call_key(prefix, name)
        self._inbox: concurrency.Queue[tuple[Mirror, Posted]] = concurrency.inbox()
        post = lambda *item: self._inbox.put(item)  # noqa: E731
        self._answer = Mirror(etcd, Span(mailbox_answer_key(prefix, name)), post)
        self._server = Mirror(etcd, Span(mailbox_server_key(prefix)), post)
        self._mine = Mirror(etcd, Span(self._key), post)
        self._mirrors = (self._answer, self._server, self._mine)
        self._server_until: float | None = None

    def ask(self, body: Mapping[str, Any], lease: int, deadline: float) -> Mapping[str, Any]:
        """Call, under a lease. Raises what `MailboxClient.call` does; and LeaseLost: make the call again."""
        self._server_until = None
        to = self._await_server(deadline)
        call = {**body, "id": uuid.uuid4().hex, "to": to, "timeout": max(deadline - concurrency.now(), 0.0)}
        value, answer = json.dumps(call).encode(), None
        try:
            revision = put_all(self._etcd, [Put(self._key, value, lease)], deadline)
            self._mine.learn(KeyValue(self._key, value, revision, revision, 1, lease))
            answer = self._await(call["id"], to, deadline)
            return answer
        finally:
            if answer is None:
                self._take_back(value)

    def close(self) -> None:
        """Hear no more."""
        for mirror in self._mirrors:
            mirror.close()

    def _await_server(self, deadline: float) -> str:
        """The incarnation that is there, as soon as one is."""
        while not self._inbox.empty():  # what has become of it since the last call
            self._listen(0, inf)
        while True:
            patience = self._settle()
            there = self._incarnation()
            if there is not None:
                return there
            self._listen(patience, deadline)

    def _await(self, call_id: str, to: str, deadline: float) -> Mapping[str, Any]:
        while True:
            patience = self._settle()
            found = self._answer.one
            if found is not None:
                answer = json.loads(found.value)
                if answer.get("id") == call_id:
                    return dict(answer)
            if self._mine.synced and self._mine.one is None:
                raise LeaseLost("the call vanished from etcd before it was answered")
            if self._incarnation() not in (to, None):
                raise Replaced("another manager of the same name took this one's place")
            self._listen(patience, deadline)

    def _incarnation(self) -> str | None:
        """Who is there; None while nobody is, or that is not known."""
        there = self._server.one
        return there.value.decode(errors="replace") if there is not None and self._server.synced else None

    def _listen(self, patience: float, deadline: float) -> None:
        """Wait for news, for `patience` seconds at the most. Raises TimeoutError after the deadline, and Gone."""
        now = concurrency.now()
        if now >= self._server_deadline():
            raise Gone("the manager of this replica is gone")
        if now >= deadline:
            raise TimeoutError("the call was not answered in time")
        with contextlib.suppress(concurrency.Empty, *UNANSWERED):
            mirror, posted = self._inbox.get(timeout=min(deadline - now, patience, self._server_deadline() - now))
            mirror.apply(posted)

    def _settle(self) -> float:
        """Bring the mirrors up to date; seconds until that must be tried again."""
        try:
            for mirror in self._mirrors:
                if not mirror.synced:
                    mirror.sync()
        except UNANSWERED as error:
            log.debug("a call cannot be followed for now: %s", error)
            return RETRY
        return inf

    def _server_deadline(self) -> float:
        """Until when to wait for the one who answers."""
        if not self._server.synced or self._server.one is not None:
            self._server_until = None
            return inf
        if self._server_until is None:
            self._server_until = concurrency.now() + GRACE
        return self._server_until

    def _take_back(self, value: bytes) -> None:
        mine: list[Compare] = [Compare(self._key, "value", "=", value)]
        try:
            self._etcd.txn(mine, (Delete(Span(self._key)),), timeout=GIVE_UP)
        except EtcdError as error:
            log.debug("a call was not taken back: %s", error)


def put_all(etcd: Etcd, puts: list[Put], deadline: float) -> int:
    """Make the same writes until etcd answers; their revision.

    Raises TimeoutError after the monotonic `deadline`, and EtcdError.
    """
    ops: list[Op] = list(puts)
    return _in_time(lambda left: etcd.txn((), ops, timeout=left), deadline).revision


def _in_time(attempt: Callable[[float], T], deadline: float) -> T:
    try:
        return retry_until_answered(attempt, deadline, concurrency.event())
    except UNANSWERED as error:
        raise TimeoutError(str(error)) from None
