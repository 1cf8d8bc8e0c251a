"""Elections: one leader at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from ftcoord.config import full_text
from ftcoord.core import election
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
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
        rules = PlainRules(election.decide, election.outlook, parse_candidacy, parse_term, encode)
        super().__init__(prefix, rules)

    def tell(self, ask: Candidacy, highest: int) -> Candidacy:
        return replace(ask, after=highest)

    def writes(self, now: Term) -> Writes:
        """The transaction that begins a term writes its fence and deletes all others. If etcd lost the record, or
        somebody deleted it while no candidate was alive, there may be fences of any number, even of higher ones.

        A fence holds the leader's id. If only a leader that was cut off remembers a term, the term's number is given
        again; the old leader's fence must not hold for the new term."""
        fence = term_key(self.prefix, now.number), now.member.encode()
        return Writes((fence,), other_terms(self.prefix, now.number))


class Election(RecipeMember[Term, Candidacy]):
    """Lets one of several processes lead at a time; the others wait in line.

        client = ftcoord.EtcdClient()
        with ftcoord.Election("job1", "checkpointer", etcd=client) as election:
            with election.campaign() as leadership:
                while not leadership.lost:
                    client.txn([leadership.fence], [ftcoord.Put("/latest", checkpoint())])  # bytes

    It works like etcd's Campaign and kazoo's Election. Promised: term numbers only grow, and each term has one leader.
    When the leader dies, the oldest candidate follows: at once, because the leader's sentinel revokes its lease. If the
    leader's host is lost, or it has no sentinel, the next one leads when the lease expires.

    Not promised: that a leader that etcd cannot reach has stopped before the next one begins. Its writes that carry
    `Leadership.fence` are refused.

    Args:
        run: the run's id, as in `--rdzv-id`.
        name: the election's name.
        candidate: this candidate's name, for people; None stands for host and pid.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        lease_ttl: whole seconds, from 1 to 86400, after which a silent leader counts as dead. etcd grants at least 2 s
            on default settings.

    Raises ConfigError for bad arguments, before any socket is opened. Thread-safe. In a forked child, calls raise
    ForkedProcessError.
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
        """Wait until this process leads: `timeout` seconds, or forever if None.

        After an error this process withdraws, which takes up to 0.5 s, unless another call of it still waits.

        Raises:
            TimeoutError: the time is over.
            EtcdError: etcd refuses, or does not answer in that time.
            StateError: the election's record cannot be read.
            FtcoordError: the election was closed, before or during the call.
            ForkedProcessError: this is a forked child.
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
        """Wait forever until this process leads, call `work`, resign, and return what `work` returned.

        `work` is not interrupted when the leadership is lost: use `campaign` to check `Leadership.lost`, or to fence
        writes. Raises what `campaign` raises, but TimeoutError, and what `work` raises; this process has then resigned.
        """
        with self.campaign():
            return work(*args, **kwargs)

    def leader(self) -> Term | None:
        """The last term: its number and its leader; None before the first election. The leader may be dead.

        Costs one read, which takes up to the etcd client's default timeout (5 s). Raises EtcdError, StateError and
        ForkedProcessError.
        """
        self._check_process()
        kv = self._namespace.etcd.range(Get(Span(decided_key(self._prefix)))).one
        return parse_term(kv.key, kv.value) if kv else None
