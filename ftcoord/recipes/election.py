"""One leader at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from ftcoord.config import full_text
from ftcoord.core import election
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
from ftcoord.core.invariants import check_term
from ftcoord.core.layout import KEY_PREFIX, Span, decided_key, election_prefix, other_terms, term_key
from ftcoord.etcd.api import Compare, Get
from ftcoord.primitives.group.pace import UntilDeadline
from ftcoord.primitives.group.plain_policy import PlainRules, Writes
from ftcoord.primitives.group.plain_use import PlainUse
from ftcoord.recipes.leadership import Leadership
from ftcoord.recipes.member import EtcdLike, RecipeMember

P = ParamSpec("P")
T = TypeVar("T")


class ElectionUse(PlainUse[Term, Candidacy]):
    """Elections as a use of the group."""

    def __init__(self, prefix: str) -> None:
        rules = PlainRules(election.decide, election.outlook, parse_candidacy, parse_term, encode, check_term)
        super().__init__(prefix, rules)

    def tell(self, ask: Candidacy, highest: int) -> Candidacy:
        return replace(ask, after=highest)

    def writes(self, now: Term) -> Writes:
        """All other fences go with the transaction that begins a term. Where etcd lost a record, or somebody deleted it
        while no candidate lived, there may be some of any number, also of higher ones. It names its leader: where only
        a leader which was cut off remembers a term, its number is given again, and its fence must not hold for that
        one."""
        fence = term_key(self.prefix, now.number), now.member.encode()
        return Writes((fence,), other_terms(self.prefix, now.number))


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
        text = full_text("name", name)
        self._name = full_text("candidate", candidate or f"{socket.gethostname()} (pid {os.getpid()})")
        super().__init__(lambda of: ElectionUse(election_prefix(of, text)), run, etcd, key_prefix, lease_ttl)

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
                fence = Compare(term_key(self._prefix, term.number), "value", "=", term.member.encode())
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
