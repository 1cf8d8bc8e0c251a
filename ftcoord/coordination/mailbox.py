"""Calls that one process makes and another answers, with etcd between them.

<prefix>/server            which incarnation answers, as long as it lives
<prefix>/in/<channel>      the last call on a channel, under the caller's lease; gone when the caller gives up or dies,
                           and still there when it was answered
<prefix>/out/<channel>     the last answer on it, under the lease of the mailbox's owner
<prefix>/metadata/<rank>   what a rank last told its manager

A channel carries one call at a time. Calls and answers carry an id, so a repeated write or a second reading is
harmless. A call is addressed to the incarnation that was there when it was made. A successor ignores it, and the caller
makes it again.
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
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost
from ftcoord.etcd.api import Compare, Delete, Etcd, KeyValue, Op, Put, Span
from ftcoord.etcd.retry import UNANSWERED, retry_until_answered
from ftcoord.primitives.informer import Informer
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

T = TypeVar("T")
RESYNC_INTERVAL: Final = 0.5
"""Seconds until a caller reads its keys again, after that failed."""
CALLER_TTL: Final = 10
"""Seconds that a call outlives a caller that died."""
SERVER_ABSENCE: Final = 5.0
"""Seconds that the mailbox's owner may be away: one that lost its lease comes back under another."""
WITHDRAW_TIMEOUT: Final = 0.5
"""Seconds for taking back a call whose caller has given up."""


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked on a channel, and of which incarnation; `deadline` on the monotonic clock of the owner."""

    channel: str
    id: str
    to: str
    body: Mapping[str, Any]
    deadline: float

    def read(self, kind: type[T]) -> T:
        """The body as a record of that kind. Raises StateError if it is not one."""
        wanted = inspect.get_annotations(kind)
        return build(kind, self.channel, {name: self.body.get(name) for name in wanted})


class Mailbox:
    """Receives the calls under a prefix, on a thread of its own.

    Args:
        etcd: the client.
        prefix: of the mailbox.
        incarnation: what is in `server`; calls that are addressed to others are ignored.
        on_call: called once with the channel of each call, and the call; and with a channel and None when its caller
            gave up or died. Must not block. Where it raises StateError, that call is left alone.
        failed: called on the thread when that ends by an error: no more calls are received.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        incarnation: str,
        on_call: Callable[[str, Call | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._etcd, self._prefix, self._incarnation, self._on_call = etcd, prefix, incarnation, on_call
        self._delivered: dict[str, str] = {}  # only the informer's thread: the id of the last call, by channel
        self._informer = Informer(etcd, [mailbox_calls_span(prefix)], self._deliver, "ftcoord-mailbox", failed=failed)

    def answer(self, call: Call, body: Mapping[str, Any], lease: int) -> None:
        """Answer a call, under a lease, for as long as its caller waits. Raises TimeoutError, EtcdError."""
        value = json.dumps({**body, "id": call.id}).encode()
        put_all(self._etcd, [Put(mailbox_answer_key(self._prefix, call.channel), value, lease)], call.deadline)

    def close(self) -> None:
        """Receive no more calls."""
        self._informer.close()

    def _deliver(self, there: Mirror) -> None:
        found = [_parse(kv) for kv in there.kvs.values()]
        calls = {call.channel: call for call in found if call is not None and call.to == self._incarnation}
        for channel in self._delivered.keys() - calls.keys():
            del self._delivered[channel]
            self._on_call(channel, None)
        for channel, call in calls.items():
            if self._delivered.get(channel) != call.id:
                self._delivered[channel] = call.id  # first: a call that cannot be read must not come again
                self._on_call(channel, call)


def _parse(kv: KeyValue) -> Call | None:
    try:
        body = json.loads(kv.value)
        deadline = concurrency.now() + float(body["timeout"])
        return Call(kv.key.rpartition("/")[2], str(body["id"]), str(body["to"]), body, deadline)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        log.warning("etcd key %r is not a call of ftcoord's and is ignored: %r", kv.key, error)
        return None


class Gone(ConnectionResetError):
    """The mailbox's owner is gone for longer than it takes to come back."""


class Replaced(Gone):
    """Another incarnation has replaced the one that was asked."""


class MailboxClient:
    """Makes calls to a mailbox, one at a time on each channel. Thread-safe.

    Args:
        etcd: the client.
        prefix: of the mailbox.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd, self._prefix = etcd, prefix
        # Held while a lease is granted, which takes as long as etcd is away; so callers wait for it with a time-out.
        self._granting = concurrency.lock("MailboxClient._granting")
        self._lock = concurrency.lock("MailboxClient._lock")  # guards all below, and is never held over a request
        self._session: Session | None = None
        self._channels: dict[str, _Channel] = {}
        self._closed = False

    def call(self, name: str, body: Mapping[str, Any], deadline: float, *, again: bool) -> Mapping[str, Any]:
        """The answer. Raises TimeoutError after the monotonic `deadline`, EtcdError, and Gone.

        Args:
            again: whether to ask a successor too, if the incarnation that was asked is replaced; if not, Replaced is
                raised.
        """
        with self._lock:
            channel = self._channels.setdefault(name, _Channel(self._etcd, self._prefix, name))
        busy = TimeoutError("another call on this channel was not answered")
        with concurrency.held(channel.turn, deadline, busy):
            while True:
                try:
                    return channel.call(body, self._lease(deadline), deadline)
                except LeaseLost as error:
                    log.debug("a call is made again: %s", error)
                    self._drop_lease()
                except Replaced as error:
                    if not again:
                        raise
                    log.debug("a call is made again: %s", error)

    def close(self) -> None:
        """Let the lease of all calls expire, and stop waiting for answers. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
        self._drop_lease()
        for channel in channels:
            channel.close()

    def _lease(self, deadline: float) -> int:
        """The lease of this client's calls. Raises TimeoutError, EtcdError."""
        with concurrency.held(self._granting, deadline, TimeoutError("etcd granted no lease in time")):
            with self._lock:
                session = self._session
            if session is None or session.state is SessionState.LOST:
                session = self._adopt(_in_time(lambda _: Session(self._etcd, CALLER_TTL), deadline))
            return session.lease_id

    def _adopt(self, session: Session) -> Session:
        """Raises ClientClosed if this client was closed meanwhile: nobody would end the session."""
        with self._lock:
            if not self._closed:
                self._session = session
                return session
        session.orphan()
        raise ClientClosed("this client was closed; make a new one")

    def _drop_lease(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.orphan()


class _Channel:
    """Carries one call at a time: written, then waited for. Its watches stay for later calls.

    `turn` is held by the caller, from before its call to the answer; it guards everything else here but the inbox.
    """

    def __init__(self, etcd: Etcd, prefix: str, name: str) -> None:
        self.turn = concurrency.lock("_Channel.turn")
        self._etcd, self._key = etcd, mailbox_call_key(prefix, name)
        # The client's thread puts, and the caller gets: a mirror is applied by the caller alone.
        self._inbox: concurrency.Queue[tuple[Mirror, Posted]] = concurrency.inbox()
        self._answer = Mirror(etcd, Span(mailbox_answer_key(prefix, name)), self._post)
        self._server = Mirror(etcd, Span(mailbox_server_key(prefix)), self._post)
        self._mine = Mirror(etcd, Span(self._key), self._post)
        self._mirrors = (self._answer, self._server, self._mine)
        self._gone_at: float | None = None  # when the owner, which is not there, counts as gone

    def call(self, body: Mapping[str, Any], lease: int, deadline: float) -> Mapping[str, Any]:
        """Call, under a lease. Raises what `MailboxClient.call` does; and LeaseLost: make the call again."""
        self._gone_at = None
        to = self._await_server(deadline)
        call = {**body, "id": uuid.uuid4().hex, "to": to, "timeout": max(deadline - concurrency.now(), 0.0)}
        value, answer = json.dumps(call).encode(), None
        try:
            revision = put_all(self._etcd, [Put(self._key, value, lease)], deadline)
            # Before the watch tells: else this mirror may still be empty, which means that the call has vanished.
            self._mine.learn(KeyValue(self._key, value, revision, revision, 1, lease))
            answer = self._await_answer(call["id"], to, deadline)
            return answer
        finally:
            if answer is None:
                self._withdraw(value)

    def close(self) -> None:
        """Stop watching."""
        for mirror in self._mirrors:
            mirror.close()

    def _post(self, mirror: Mirror, posted: Posted) -> None:
        self._inbox.put((mirror, posted))

    def _await_server(self, deadline: float) -> str:
        """The incarnation that is there, as soon as one is."""
        while not self._inbox.empty():  # what happened to it since the last call
            self._apply_next(0, inf)
        while True:
            longest = self._sync()
            there = self._incarnation()
            if there is not None:
                return there
            self._apply_next(longest, deadline)

    def _await_answer(self, call_id: str, to: str, deadline: float) -> Mapping[str, Any]:
        while True:
            longest = self._sync()
            found = self._answer.one
            if found is not None:
                answer = json.loads(found.value)
                if answer.get("id") == call_id:
                    return dict(answer)
            if self._mine.synced and self._mine.one is None:
                raise LeaseLost("the call vanished from etcd before it was answered")
            if self._incarnation() not in (to, None):
                raise Replaced("another manager of the same name replaced this one")
            self._apply_next(longest, deadline)

    def _incarnation(self) -> str | None:
        """The incarnation of the owner; None while it is away, or that is not known."""
        there = self._server.one
        return there.value.decode(errors="replace") if there is not None and self._server.synced else None

    def _apply_next(self, longest: float, deadline: float) -> None:
        """Wait for a change, `longest` seconds at the most. Raises TimeoutError after the deadline, and Gone."""
        now = concurrency.now()
        if now >= self._server_deadline():
            raise Gone("the manager of this replica is gone")
        if now >= deadline:
            raise TimeoutError("the call was not answered in time")
        with contextlib.suppress(concurrency.Empty, *UNANSWERED):
            mirror, posted = self._inbox.get(timeout=min(deadline - now, longest, self._server_deadline() - now))
            mirror.apply(posted)

    def _sync(self) -> float:
        """Bring the mirrors up to date; seconds until that must be tried again."""
        try:
            for mirror in self._mirrors:
                if not mirror.synced:
                    mirror.sync()
        except UNANSWERED as error:
            log.debug("a call cannot be followed for now: %s", error)
            return RESYNC_INTERVAL
        return inf

    def _server_deadline(self) -> float:
        """When to stop waiting for the owner; never while it is there, or while that is not known."""
        if not self._server.synced or self._server.one is not None:
            self._gone_at = None
            return inf
        if self._gone_at is None:
            self._gone_at = concurrency.now() + SERVER_ABSENCE
        return self._gone_at

    def _withdraw(self, value: bytes) -> None:
        """Take back the call, unless a later one has replaced it: that is the compare."""
        mine: list[Compare] = [Compare(self._key, "value", "=", value)]
        try:
            self._etcd.txn(mine, (Delete(Span(self._key)),), timeout=WITHDRAW_TIMEOUT)
        except EtcdError as error:
            log.debug("a call was not taken back: %s", error)


def put_all(etcd: Etcd, puts: list[Put], deadline: float) -> int:
    """Repeat the same writes until etcd answers; their revision.

    Raises TimeoutError after the monotonic `deadline`, and EtcdError.
    """
    ops: list[Op] = list(puts)
    return _in_time(lambda left: etcd.txn((), ops, timeout=left), deadline).revision


def _in_time(attempt: Callable[[float], T], deadline: float) -> T:
    try:
        return retry_until_answered(attempt, deadline, concurrency.event())
    except UNANSWERED as error:
        raise TimeoutError(str(error)) from None
