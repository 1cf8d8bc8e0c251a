"""One leader at a time."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import ParamSpec, TypeVar

from ftcoord.config import full_text, whole
from ftcoord.core import election
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
from ftcoord.core.layout import KEY_PREFIX, Span, decided_key, election_prefix, term_key
from ftcoord.core.outlook import Outlook
from ftcoord.etcd.api import Compare, Get, exists
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.group.participant import Participant, UntilDeadline
from ftcoord.primitives.group.plain_policy import PlainPolicy, Writes
from ftcoord.primitives.group.use import Use
from ftcoord.recipes.member import LEAVE_TIMEOUT, EtcdLike, RecipeMember

P = ParamSpec("P")
T = TypeVar("T")
_lease_ttl = whole(1, 86_400, " (seconds); etcd on default settings grants 2 s at the least")


class ElectionUse(Use[Term, Candidacy]):
    """Elections as a use of the group."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> PlainPolicy[Term, Candidacy]:
        return PlainPolicy(election.decide, parse_candidacy, parse_term, encode, self._writes)

    def parse(self, key: str, value: bytes) -> Term:
        return parse_term(key, value)

    def stamp(self, ask: Candidacy) -> Candidacy:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: Candidacy) -> bytes:
        return encode(ask)

    def outlook(self, record: Term | None, me: Sequence[str], ask: Candidacy) -> Outlook[Candidacy]:
        return election.outlook(record, me, ask)

    def _writes(self, before: Term | None, now: Term) -> Writes:
        """The fence of a term goes with the transaction that begins the next one."""
        old = [Span(term_key(self._prefix, before.number))] if before and before.number != now.number else []
        return Writes(((term_key(self._prefix, now.number), b""),), old)


@dataclass(frozen=True, slots=True)
class Leadership:
    """One term of this process. A context manager, which resigns at its end.

    Args:
        number: of the term; it only grows.
        fence: a guard for transactions of your own, which then have no effect once another leader was elected:
            `client.txn([leadership.fence], [Put(...)])`.
    """

    number: int
    fence: Compare
    _member: str
    _participant: Participant[Term, Candidacy]

    @property
    def lost(self) -> bool:
        """Whether this process knows that it leads no longer: it resigned, or its lease was lost. From memory."""
        return not self._participant.holds(self._member)

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until it is `lost`, `timeout` seconds at most; whether it is."""
        return self._participant.wait_for(lambda: self.lost, timeout)

    def resign(self) -> None:
        """Let the next candidate lead at once. Idempotent; never raises for an etcd that is out of reach."""
        if not self.lost:
            self._participant.leave(LEAVE_TIMEOUT)

    def __enter__(self) -> Leadership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resign()


class Election(RecipeMember[Term, Candidacy]):
    """Lets one of several processes lead at a time; the others wait in line.

        with ftcoord.Election("job1", "checkpointer") as election:
            with election.campaign() as leadership:
                while not leadership.lost:
                    client.txn([leadership.fence], [Put("/latest", checkpoint())])

    As etcd's Campaign and kazoo's Election. Promised: terms only grow, and one process leads each; when the lease of a
    dead leader ends, the oldest candidate follows. Not promised: that a leader which etcd cannot hear has stopped
    before the next one begins. Its writes that carry `Leadership.fence` are refused.

    Args:
        run: the run's id, as in `--rdzv-id`.
        name: of the election.
        candidate: this one's name, for people; host and pid if None.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and friends.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        lease_ttl: seconds after which a silent leader counts as dead.

    Raises ConfigError for bad arguments, before any socket is opened. Thread-safe; not for forked children.
    """

    def __init__(
        self,
        run: str,
        name: str,
        candidate: str | None = None,
        *,
        etcd: EtcdLike = None,
        key_prefix: str = KEY_PREFIX,
        lease_ttl: int = 10,
    ) -> None:
        ttl = _lease_ttl("lease_ttl", lease_ttl)
        text = full_text("name", name)
        self._name = full_text("candidate", candidate or f"{socket.gethostname()} (pid {os.getpid()})")
        namespace = Namespace.open(run, etcd, key_prefix)
        self._prefix = election_prefix(namespace.prefix, text)
        self._led: Leadership | None = None  # the last one; any thread that campaigns replaces it
        super().__init__(namespace, ElectionUse(self._prefix), ttl)

    def campaign(self, timeout: float | None = None) -> Leadership:
        """Wait until this process leads.

        Raises TimeoutError after `timeout` seconds, and takes its candidacy back; EtcdError when etcd refuses, or does
        not answer in that time; StateError when the record of the election cannot be read.
        """
        self._check_process()
        pace: UntilDeadline[Term, Candidacy] = UntilDeadline(timeout, f"leading as {self._name!r}")
        last = self._led
        # Terms go on from the last one here, even if etcd has lost it. Who leads still is given the same term again.
        after = 0 if last is None else last.number - (not last.lost)
        with self._or_leave():  # else nobody would lead, if this member were elected
            term = self._participant.ask(Candidacy(self._name, after), pace).record
        assert term is not None
        fence = exists(term_key(self._prefix, term.number))
        self._led = Leadership(term.number, fence, term.member, self._participant)
        return self._led

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait until this process leads, call `work`, resign, and return what `work` returned."""
        with self.campaign():
            return work(*args, **kwargs)

    def leader(self) -> Term | None:
        """Who was elected last, None before the first; whether it still lives is not looked at. Costs one read.

        Raises EtcdError and StateError.
        """
        self._check_process()
        kv = self._namespace.etcd.range(Get(Span(decided_key(self._prefix)))).one
        return parse_term(kv.key, kv.value) if kv else None
