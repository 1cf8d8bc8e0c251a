"""Processes that wait for each other."""

from __future__ import annotations

import uuid
from dataclasses import replace

from ftcoord.config import full_text, whole
from ftcoord.core import barrier
from ftcoord.core.barrier_records import Arrival, Generation, encode, parse_arrival, parse_generation
from ftcoord.core.layout import KEY_PREFIX, barrier_prefix
from ftcoord.core.outlook import Standing
from ftcoord.errors import ConfigError
from ftcoord.primitives.group.pace import UntilDeadline
from ftcoord.primitives.group.plain_policy import PlainRules
from ftcoord.primitives.group.plain_use import PlainUse
from ftcoord.recipes.member import EtcdLike, RecipeMember

_parties = whole(1, 1_000_000)


class BarrierUse(PlainUse[Generation, Arrival]):
    """Barriers as a use of the group mechanism."""

    def __init__(self, prefix: str) -> None:
        rules = PlainRules(barrier.decide, barrier.outlook, parse_arrival, parse_generation, encode)
        super().__init__(prefix, rules)

    def tell(self, ask: Arrival, highest: int) -> Arrival:
        return replace(ask, known=highest)


class Barrier(RecipeMember[Generation, Arrival]):
    """Lets `parties` processes pass together, again and again, as `threading.Barrier` does for threads.

        with ftcoord.Barrier("job1", "loaded", parties=16) as barrier:
            barrier.wait(timeout=300)

    Promised: nobody passes before `parties` processes have arrived. A process passes each generation once, even if it
    loses its lease and comes back under another one.

    Not promised: that all processes that pass are still alive. A process that dies no longer counts as soon as its
    sentinel has revoked its lease; if its host is lost, or it has no sentinel, it counts until the lease expires. A
    process that times out may still have been counted. Nothing is promised if etcd loses acknowledged writes.

    Args:
        run: the run's id, as in `--rdzv-id`.
        name: the barrier's name.
        parties: how many processes pass together, from 1 to 1,000,000; the same in all processes.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        lease_ttl: whole seconds, from 1 to 86400, after which a silent process counts as dead. etcd grants at least
            2 s on default settings.

    Raises ConfigError for bad arguments, before any socket is opened. Call it from one thread per process. In a forked
    child, calls raise ForkedProcessError.
    """

    def __init__(
        self,
        run: str,
        name: str,
        parties: int,
        *,
        etcd: EtcdLike = None,
        key_prefix: str = KEY_PREFIX,
        lease_ttl: int = 10,
    ) -> None:
        self._name, self._parties = full_text("name", name), _parties("parties", parties)
        self._party = uuid.uuid4().hex  # through all of its leases: a lost one must not make it count twice
        self._after = 0  # the last generation that it passed; for the one thread that waits
        super().__init__(lambda of: BarrierUse(barrier_prefix(of, name)), run, etcd, key_prefix, lease_ttl)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until `parties` processes have arrived; returns this one's place among them, 0 to `parties` - 1.

        Waits `timeout` seconds; None waits forever. After an error this process has left the barrier, which takes up
        to 0.5 s, and the others wait on. It may wait again, except after `close()`.

        Raises:
            TimeoutError: the time is over.
            ConfigError: others wait at this barrier for another number of parties.
            EtcdError: etcd refuses, or does not answer in that time.
            StateError: the barrier's record cannot be read.
            FtcoordError: the barrier was closed, before or during the call.
            ForkedProcessError: this is a forked child.
        """
        self._check_process()
        pace: UntilDeadline[Generation, Arrival] = UntilDeadline(timeout, f"barrier {self._name!r}")
        with self._or_leave():  # who does not wait any longer has not arrived
            look = self.participant.ask(Arrival(self._party, self._parties, self._after), pace)
            now = look.record
            assert now is not None
            if look.standing is Standing.REFUSED:
                allowed = f"others wait at this barrier for {now.parties}: give all the same number, or another name"
                raise ConfigError("parties", self._parties, allowed)
        mine = next(one for one in now.passed if one.party == self._party)
        self._after = mine.number
        return mine.index
