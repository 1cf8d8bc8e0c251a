"""One of several processes leads. When it ends, however it ends, the one that has waited longest leads.

This is a use of ftcoord's group mechanism: members with leases, and one decided record; docs/extending.md explains it.

    $ export FTCOORD_ENDPOINTS=127.0.0.1:2379
    $ python examples/leader.py job1        # in several shells; then kill one of them
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ftcoord import Compare, EtcdClient, Put, concurrency
from ftcoord.core.layout import decided_key, member_of
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.participant import Participant, ParticipantOptions
from ftcoord.primitives.group.use import Look, Use, View, signals_at


@dataclass(frozen=True)
class Candidacy:
    """What a member asks: to lead. `known` is the highest term that it has seen. No two asks are the same bytes."""

    known: int = 0
    nonce: str = ""


@dataclass(frozen=True)
class Term:
    """What is decided: the member that leads. `by` makes it unlike all other records, also of the same number."""

    number: int
    leader: str
    by: str


def read(kv: KeyValue) -> Term:
    """Raises StateError, which names the key."""
    try:
        return Term(**json.loads(kv.value))
    except (ValueError, TypeError) as error:
        raise StateError(kv.key, f"is no term: {error}") from None


class LeaderPolicy:
    """The decider's half."""

    def decide(self, view: View, me: str, now: float) -> Publish[bytes] | Wait:
        last = read(view.decided) if view.decided else None
        members = [member_of(kv.key) for kv in view.members]
        if last is not None and last.leader in members:
            return Wait(f"{last.leader} leads term {last.number}")
        known = [json.loads(kv.value)["known"] for kv in view.members]
        number = max([*known, last.number if last else 0]) + 1  # so that no term is given twice
        term = Term(number, members[0], f"{me} {uuid.uuid4().hex}")  # the oldest member
        return Publish(json.dumps(asdict(term)).encode(), f"{term.leader} leads term {number}")


class LeaderUse(Use[Term, Candidacy]):
    """Keys, records, and the member's half."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._known = prefix, 0

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> LeaderPolicy:
        return LeaderPolicy()

    def parse(self, key: str, value: bytes) -> Term:
        term = read(KeyValue(key, value, 0, 0, 0, 0))
        self._known = max(self._known, term.number)
        return term

    def stamp(self, ask: Candidacy) -> Candidacy:
        return replace(ask, known=self._known, nonce=uuid.uuid4().hex)

    def encode(self, ask: Candidacy) -> bytes:
        return json.dumps(asdict(ask)).encode()

    def outlook(self, record: Term | None, me: Sequence[str], ask: Candidacy) -> Outlook[Candidacy]:
        if record is not None and record.leader == me[-1]:
            return Outlook(Standing.ANSWERED, Next.RETURN)
        return Outlook(Standing.PENDING)


class Patience:
    """The pace of a call that only waits, for as long as it takes."""

    deadline = math.inf

    def __init__(self) -> None:
        self.gone = concurrency.event()

    def see(self, look: Look[Term, Candidacy]) -> Standing:
        return look.standing

    def wake_at(self, standing: Standing) -> float:
        return signals_at()

    def tick(self, look: Look[Term, Candidacy]) -> None:
        """Here it would raise the error that ends the call, such as TimeoutError."""


def main(job: str) -> None:
    prefix = f"/leader-example/{job}"
    with EtcdClient() as client:
        candidate = Participant(client, LeaderUse(prefix), ParticipantOptions(5, 3600, request_timeout=5.0))
        try:
            while True:
                term = candidate.ask(Candidacy(), Patience()).record
                assert term is not None
                print(f"pid {os.getpid()} leads term {term.number}", flush=True)
                while candidate.holds(term.leader):
                    record = json.dumps(asdict(term)).encode()
                    # etcd refuses this write from the next term on, also of a leader that does not know of it yet.
                    fence = Compare(decided_key(prefix), "value", "=", record)
                    if not client.txn([fence], [Put(f"{prefix}/written", str(term.number).encode())]).succeeded:
                        candidate.leave(2.0)
                    time.sleep(0.2)
        finally:
            candidate.leave(2.0)


if __name__ == "__main__":
    main(sys.argv[1])
