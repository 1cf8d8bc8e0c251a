"""Members of a group for tests, whose policy is to keep a roll of who is there. Run as a script this is one of them."""

from __future__ import annotations

import json
import random
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown, StateError
from ftcoord.etcd.api import Batch, Compare, Etcd, Get, KeyValue, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.group.group import Group
from ftcoord.primitives.group.policy import View
from ftcoord.primitives.session import Session

CALL_TIMEOUT = 5.0
RECORD_TTL = 60
"""Seconds; longer than a crowded machine keeps a decider from renewing it."""


class Roll:
    """Publishes {"number": n, "members": {id: what it asks}, "by": id} when the members are others than last time."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def decide(self, view: View, me: str, now: float) -> Publish | Wait:
        members = {kv.key.rpartition("/")[2]: kv.value.decode() for kv in view.members}
        last = read(view.decided) if view.decided else {"number": 0, "members": {}}
        if members == last["members"] and not view.vanished:
            return Wait("nobody came or went")
        number = last["number"] + 1
        record = {"number": number, "members": members, "by": me, "nonce": uuid.uuid4().hex}
        return Publish(json.dumps(record).encode(), f"roll {number}", puts=((f"{self._prefix}/roll/{number}", b""),))


def read(kv: KeyValue) -> dict[str, Any]:
    try:
        record = json.loads(kv.value)
        return {"number": record["number"], "members": record["members"], "by": record["by"]}
    except (ValueError, KeyError, TypeError):
        raise StateError(kv.key, "is not a roll") from None


class Door:
    """An `Etcd` in front of another; the tests' doubles change what they need of it."""

    def __init__(self, real: Etcd) -> None:
        self.real = real

    @property
    def config(self) -> EtcdConfig | None:
        return self.real.config

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        return self.real.range(get, timeout=timeout)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        return self.real.txn(compares, success, failure, timeout=timeout)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Any:
        return self.real.grant(ttl, timeout=timeout)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        return self.real.renew(lease_id, timeout=timeout)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        self.real.revoke(lease_id, timeout=timeout)

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        return self.real.watch(span, start_revision, deliver, **how)


class Lossy(Door):
    """Loses half of the transactions: the request (the caller may know) or, after it was done, the answer."""

    def __init__(self, real: Etcd, seed: int) -> None:
        super().__init__(real)
        self._random = random.Random(seed)

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        fate = self._random.random()
        if fate < 0.1:
            raise EtcdUnavailable("refused by the test")
        if fate < 0.25:
            raise OutcomeUnknown("the test lost the request")
        result = self.real.txn(*args, **kwargs)
        if fate < 0.5:
            raise OutcomeUnknown("the test lost the answer")
        return result


class Overtaken(Door):
    """Loses the answer to its owner's first transaction, after which somebody else comes."""

    def __init__(self, real: Etcd, somebody: Callable[[], object]) -> None:
        super().__init__(real)
        self._somebody: Callable[[], object] | None = somebody

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        result = self.real.txn(*args, **kwargs)
        if self._somebody is not None:
            somebody, self._somebody = self._somebody, None
            somebody()
            raise OutcomeUnknown("the test lost the answer")
        return result


class Blind(Door):
    """Never sees an older member, so that its owner believes it is the decider from the first moment on."""

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        result = self.real.txn(*args, **kwargs)
        gets = args[1] if result.succeeded else args[2]
        hidden = [
            RangeResult((), 1, found.revision) if isinstance(op, Get) and op.limit == 1 else found
            for op, found in zip(gets, result.results, strict=True)
        ]
        return TxnResult(result.succeeded, result.revision, tuple(hidden))


class Counting(Door):
    """Counts what its watches deliver, and knows what is watched now, and what it ever began to watch."""

    def __init__(self, real: Etcd) -> None:
        super().__init__(real)
        self.events: list[str] = []
        self.errors: list[Exception] = []
        self.watched: list[Span] = []
        self.begun: list[Span] = []

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        def count(item: WatchItem) -> None:
            if isinstance(item, Exception):
                self.errors.append(item)
            elif isinstance(item, Batch):
                self.events.extend(event.kv.key for event in item.events)
            deliver(item)

        counting, watch = self, self.real.watch(span, start_revision, count, **how)

        class Counted:
            def cancel(self) -> None:
                counting.watched.remove(span)
                watch.cancel()

        self.watched.append(span)
        self.begun.append(span)
        return Counted()


class Node:
    """One member of the group at `prefix`, from the start until `leave()`.

    It tests `Group` below the Participant, which would hide what these tests look at: it repeats what was not answered,
    replaces a lost lease, and reads the record in its own words. tests/sim/rolls.py has participants of the same group.
    """

    def __init__(self, etcd: Etcd, prefix: str, ask: str = "", ttl: int = 30, record_ttl: int = RECORD_TTL) -> None:
        self.rolls: list[dict[str, Any]] = []
        self.errors: list[StateError] = []
        self._heard = concurrency.condition("Node._heard")
        self.session = Session(etcd, ttl)
        self.group = Group(etcd, self.session, prefix, Roll(prefix), record_ttl, self._listen)
        self.id = self.group.id
        self.ask(ask)

    def ask(self, ask: str) -> None:
        """Enter, however often it takes."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.group.enter(f"{ask}/{attempt}".encode(), TimeLimit(CALL_TIMEOUT))
            except (EtcdUnavailable, OutcomeUnknown):
                continue

    def leave(self) -> None:
        self.group.close()
        self.session.close()

    def _listen(self, kv: KeyValue | None, roster: KeyValue | None) -> None:
        with self._heard:
            try:
                if kv is not None:
                    self.rolls.append(read(kv))
            except StateError as error:
                self.errors.append(error)
                raise
            finally:
                self._heard.notify_all()

    def sees(self, *nodes: Node | str) -> dict[str, Any]:
        """Wait until the roll has exactly these members, and return it."""
        ids = {node if isinstance(node, str) else node.id for node in nodes}
        return self.hears(lambda roll: set(roll["members"]) == ids)

    def hears(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the last roll is such, and return it."""
        with self._heard:
            assert self._heard.wait_for(lambda: bool(self.rolls) and condition(self.rolls[-1]), 60), self.rolls[-1:]
            return self.rolls[-1]


if __name__ == "__main__":
    endpoint, prefix, *record_ttl = sys.argv[1:]
    own = Node(EtcdClient(EtcdConfig.load(endpoint)), prefix, "", 6, *map(int, record_ttl))  # it may be killed
    print(own.id, flush=True)
    sys.stdin.read()
    own.leave()
