"""Who decides (G2): the member that holds the office, which is the key `decider` under a lease of its own.

The thread that decides renews that lease itself, between two of its steps; no other thread and no sentinel does. So
whoever cannot decide, for whatever reason, loses the office within a TTL, though its membership goes on. The sentinel
only revokes the lease when the process dies.
"""

from __future__ import annotations

import logging
import math
import random
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ftcoord import concurrency
from ftcoord.core.layout import decider_key
from ftcoord.core.lease import LeaseTimes
from ftcoord.core.office import OfficeRecord, encode_office, first_try, is_vacant, next_try
from ftcoord.errors import EtcdError, LeaseLost
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Lease, Put
from ftcoord.primitives.group.policy import Desk
from ftcoord.primitives.mirror import Mirror
from ftcoord.primitives.sentinel import SentinelFor
from ftcoord.primitives.session import INTRODUCED_AFTER
from ftcoord.primitives.write_once import write_once

log = logging.getLogger(__name__)

GIVE_UP_TIMEOUT: Final = 0.5
"""Seconds that giving the office up may take; after that its lease expires."""


class Office:
    """The office as one member sees it, or holds it. Only for the group's thread, once that runs.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        member: this member's id.
        ttl: of the office's lease, in seconds.
        record: the mirror that has `decided` and `decider`.
        rank: returns this member's place in the last record; None without one.
        desk: where members ask who holds the office.
        wake: called on any thread when somebody has asked there.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        member: str,
        *,
        ttl: int,
        record: Mirror,
        rank: Callable[[], int | None],
        desk: Desk,
        wake: Callable[[], None],
    ) -> None:
        self._etcd, self._member, self._ttl, self._record, self._rank = etcd, member, ttl, record, rank
        self._key, self._desk, self._wake = decider_key(prefix), desk, wake
        self._sentinel = SentinelFor.of(etcd.config, "", ())
        self._lease: Lease | None = None
        """Granted for the office; it may not be taken yet."""
        self._value = b""
        """What to write under that lease. Nobody else writes the same."""
        self.took_at = -math.inf
        """When this member took the office last."""
        self._times = LeaseTimes(0.0, 0.0)
        self._held: KeyValue | None = None
        """The key, while this member holds the office as far as it knows."""
        self._began = concurrency.now()
        self._introduce_at = math.inf
        self._renew_at = math.inf
        self._was_filled = False
        self._tries_at = -math.inf  # who joins tries at once

    @property
    def is_held(self) -> bool:
        """Whether this member decides, as far as it knows. Only a transaction with `guard` shows that it does."""
        return self._held is not None

    @property
    def guard(self) -> Compare:
        """Holds in etcd as long as this member has the office that it took. By its value, which no other taking has."""
        assert self._held is not None
        return Compare(self._key, "value", "=", self._held.value)

    def step(self, *, tries: bool) -> float:
        """Renew the office, or take it if nobody has it; when to call this again, unless something comes in.

        Args:
            tries: whether this member may take it.

        Raises OtherLayout for a decider of another release, and EtcdError; it may then be repeated.
        """
        now, found = concurrency.now(), self._record.kvs.get(self._key)
        if self._held is not None and found != self._held:
            self._lose("another member decides" if found else "its lease ended")
        if self._held is None and found is not None and self._lease is not None and found.lease == self._lease.id:
            self._hold(found)  # the answer to T2 was lost
        if self._held is not None:
            return self._keep(now)
        if found is not None and not is_vacant(found.lease, self._key, found.value):
            self._was_filled = True
            return math.inf
        if self._was_filled:
            self._was_filled = False
            self._tries_at = now + first_try(self._rank(), random.random())
        if not tries:
            return math.inf
        if now < self._tries_at:
            return self._tries_at
        try:
            self._take(found)
        except EtcdError:  # nobody else was faster
            self._tries_at = now + first_try(self._rank(), random.random())
            raise
        self._tries_at = now + next_try(self._rank(), random.random())
        return now  # and decide, or look who does

    def introduce(self) -> None:
        """Have the sentinel know of the office now, instead of half a second after this member's lease was granted."""
        self._introduce_at = -math.inf

    def give_up(self) -> None:
        """Have others decide from now on. Idempotent; does not raise if etcd is unreachable: the lease expires."""
        self._held = None
        self._desk.close()  # first: who asked here asks the next one then
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(EtcdError):
                self._etcd.revoke(lease.id, timeout=GIVE_UP_TIMEOUT)
            self._drop(lease)

    def _take(self, found: KeyValue | None) -> None:
        """T2. What it reads is the last word of all deciders before."""
        if self._lease is None:
            sent_at = concurrency.now()
            self._lease = self._etcd.grant(self._ttl)
            self._times = LeaseTimes(sent_at, self._lease.ttl)
            key = uuid.uuid4().hex
            self._value = encode_office(OfficeRecord(self._member, self._desk.open(key), key))
        try:
            outcome = write_once(
                self._etcd, Put(self._key, self._value, self._lease.id), found, reads=(Get(self._record.span),)
            )
        except LeaseLost:
            self._lose("its lease ended")
            raise
        self._record.adopt(outcome.reads[0])
        if not outcome.done:  # another one was faster
            self.give_up()
            return
        self._hold(self._record.kvs[self._key])

    def _hold(self, kv: KeyValue) -> None:
        self._held, self._renew_at, self._was_filled = kv, self._times.renew_at(), True
        self.took_at = concurrency.now()
        self._desk.serve(self._wake)
        self._introduce_at = self._began + INTRODUCED_AFTER  # with the member's lease, or now

    def _keep(self, now: float) -> float:
        assert self._lease is not None
        if now >= self._renew_at:
            self._renew(now, self._lease)
        if now >= self._introduce_at:
            self._introduce_at = math.inf
            if self._sentinel is not None:
                self._sentinel.keep(self._lease.id, self._times.ttl, self._times.sent_at)
                self._sentinel.rest(self._lease.id)  # it gives the lease up, and never renews it
        return min(self._renew_at, self._introduce_at)

    def _renew(self, now: float, lease: Lease) -> None:
        """An etcd that does not answer ends no lease, so the next step repeats it."""
        self._renew_at = self._times.renew_at(now)
        try:
            ttl = self._etcd.renew(lease.id, timeout=self._times.renewal_timeout(now))
        except LeaseLost:
            self._lose("its lease ended")
            self._record.forget()  # a watch that lost the deletion will not bring it
            raise
        self._times = LeaseTimes(now, ttl)
        self._renew_at = self._times.renew_at()
        self._introduce_at = now  # for its time

    def _lose(self, why: str) -> None:
        log.debug("member %s decides no longer: %s", self._member, why)
        self._held = None
        self._desk.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        if self._sentinel is not None:
            self._sentinel.drop(lease.id)
