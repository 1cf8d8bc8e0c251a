"""Processes that wait for each other."""

from __future__ import annotations

import uuid
from dataclasses import replace

from ftcoord.config import full_text, whole
from ftcoord.core import barrier
from ftcoord.core.barrier_records import Arrival, Generation, encode, parse_arrival, parse_generation
from ftcoord.core.invariants import check_generation
from ftcoord.core.layout import KEY_PREFIX, barrier_prefix
from ftcoord.core.outlook import Standing
from ftcoord.errors import ConfigError
from ftcoord.primitives.group.pace import UntilDeadline
from ftcoord.primitives.group.plain_policy import PlainRules
from ftcoord.primitives.group.plain_use import PlainUse
from ftcoord.recipes.member import EtcdLike, RecipeMember

_parties = whole(1, 1_000_000)


class BarrierUse(PlainUse[Generation, Arrival]):
    """Barriers as a use of the group."""

    def __init__(self, prefix: str) -> None:
        rules = PlainRules(barrier.decide, barrier.outlook, parse_arrival, parse_generation, encode, check_generation)
        super().__init__(prefix, rules)

    def tell(self, ask: Arrival, highest: int) -> Arrival:
        return replace(ask, known=highest)


class Barrier(RecipeMember[Generation, Arrival]):
    """Lets `parties` processes pass together, again and again, as `threading.Barrier` does for threads.

        with ftcoord.Barrier("job1", "loaded", parties=16) as barrier:
            barrier.wait(timeout=300)

    Promised: nobody passes before as many have arrived; a process that comes back, under whatever lease, passes each
    generation once. Not promised: that all who pass are still alive. One that died counts for up to `lease_ttl` seconds
    after its last sign of life; and one whose time is over may have been counted in the same moment. Nor is anything
    promised of an etcd that loses writes which it had acknowledged.

    Args:
        run: the run's id, as in `--rdzv-id`.
        name: of the barrier.
        parties: how many pass together; the same in all processes.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and friends.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        lease_ttl: seconds after which a silent process counts as dead.

    Raises ConfigError for bad arguments, before any socket is opened. For one thread per process; not for forked
    children.
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
        """Wait until as many have arrived; this one's place among them, 0 to `parties` - 1.

        Raises TimeoutError after `timeout` seconds: this process then has not arrived, and the others wait on.
        ConfigError when others wait for another number of parties. EtcdError when etcd refuses, or does not answer in
        that time. StateError when the record of the barrier cannot be read. FtcoordError after `close()`. This process
        has then left the barrier; it may wait again.
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
