"""One leader at a time."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from ftcoord.config import full_text, whole
from ftcoord.core import election
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
from ftcoord.core.layout import KEY_PREFIX, Span, decided_key, election_prefix, term_key
from ftcoord.core.outlook import Outlook
from ftcoord.etcd.api import Compare, Get, exists
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.group.participant import UntilDeadline
from ftcoord.primitives.group.plain_policy import Heard, PlainPolicy, Writes
from ftcoord.primitives.group.use import Use
from ftcoord.recipes.member import LEAVE_TIMEOUT, EtcdLike, RecipeMember

P = ParamSpec("P")
T = TypeVar("T")
MOST_FENCES: Final = 32
"""Fences that are deleted at once; etcd takes 128 operations in a transaction."""
_lease_ttl = whole(1, 86_400, " (seconds); etcd on default settings grants 2 s at the least")


class ElectionUse(Use[Term, Candidacy]):
    """Elections as a use of the group."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._heard = prefix, Heard(parse_term)

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> PlainPolicy[Term, Candidacy]:
        return PlainPolicy(election.decide, parse_candidacy, self._heard, encode, self._writes)

    def parse(self, key: str, value: bytes) -> Term:
        return self._heard.read(key, value)

    def stamp(self, ask: Candidacy) -> Candidacy:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: Candidacy) -> bytes:
        return encode(replace(ask, after=self._heard.highest))

    def outlook(self, record: Term | None, me: Sequence[str], ask: Candidacy) -> Outlook[Candidacy]:
        return election.outlook(record, me, ask)

    def _writes(self, before: Term | None, now: Term) -> Writes:
        """The fence of a term goes with the transaction that begins the next one. Numbers are left out only where etcd
        lost a record: the terms in between may have left theirs."""
        first = max(before.number if before else 1, now.number - MOST_FENCES)
        old = [Span(term_key(self._prefix, number)) for number in range(first, now.number)]
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
    _election: Election  # which so lives, and remains a member, for as long as this is held

    @property
    def lost(self) -> bool:
        """Whether this process knows that it leads no longer: it resigned, its lease was lost, or a later term began,
        as where its key was deleted. From memory."""
        participant = self._election.participant
        now = participant.record
        return not participant.holds(self._member) or (now is not None and now.number > self.number)

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until it is `lost`, `timeout` seconds at most; whether it is."""
        return self._election.participant.wait_for(lambda: self.lost, timeout)

    def resign(self) -> None:
        """Let the next candidate lead at once. Idempotent; never raises for an etcd that is out of reach. Does nothing
        in a forked child."""
        if self._election.is_own_process and self._election.participant.holds(self._member):
            self._election.participant.leave(LEAVE_TIMEOUT)

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
        super().__init__(namespace, ElectionUse(self._prefix), ttl)

    def campaign(self, timeout: float | None = None) -> Leadership:
        """Wait until this process leads.

        Raises TimeoutError after `timeout` seconds, and takes its candidacy back; EtcdError when etcd refuses, or does
        not answer in that time; StateError when the record of the election cannot be read; FtcoordError when it is
        closed meanwhile.
        """
        self._check_process()
        pace: UntilDeadline[Term, Candidacy] = UntilDeadline(timeout, f"leading as {self._name!r}")
        with self._or_leave():  # else nobody would lead, if this member were elected
            while True:
                look = self.participant.ask(Candidacy(self._name), pace)
                term = look.record
                assert term is not None
                fence = exists(term_key(self._prefix, term.number))
                leadership = Leadership(term.number, fence, term.member, self)
                if not leadership.lost:
                    return leadership
                pace.tick(look)  # it was elected under a lease that is lost by now

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
