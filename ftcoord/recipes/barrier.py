"""Processes that wait for each other."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from ftcoord.config import full_text, whole
from ftcoord.core import barrier
from ftcoord.core.barrier_records import Arrival, Generation, encode, parse_arrival, parse_generation
from ftcoord.core.layout import KEY_PREFIX, barrier_prefix
from ftcoord.core.outlook import Outlook, Standing
from ftcoord.errors import ConfigError
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.group.participant import UntilDeadline
from ftcoord.primitives.group.plain_policy import Heard, PlainPolicy
from ftcoord.primitives.group.use import Use
from ftcoord.recipes.member import EtcdLike, RecipeMember

_parties = whole(1, 1_000_000)
_lease_ttl = whole(1, 86_400, " (seconds); etcd on default settings grants 2 s at the least")


class BarrierUse(Use[Generation, Arrival]):
    """Barriers as a use of the group."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._heard = prefix, Heard(parse_generation)

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> PlainPolicy[Generation, Arrival]:
        return PlainPolicy(barrier.decide, parse_arrival, self._heard, encode)

    def parse(self, key: str, value: bytes) -> Generation:
        return self._heard.read(key, value)

    def stamp(self, ask: Arrival) -> Arrival:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: Arrival) -> bytes:
        return encode(replace(ask, known=self._heard.highest))

    def outlook(self, record: Generation | None, me: Sequence[str], ask: Arrival) -> Outlook[Arrival]:
        return barrier.outlook(record, me, ask)


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
        ttl, text = _lease_ttl("lease_ttl", lease_ttl), full_text("name", name)
        self._name, self._parties = text, _parties("parties", parties)
        self._party = uuid.uuid4().hex  # through all of its leases: a lost one must not make it count twice
        self._after = 0  # the last generation that it passed; for the one thread that waits
        namespace = Namespace.open(run, etcd, key_prefix)
        super().__init__(namespace, BarrierUse(barrier_prefix(namespace.prefix, text)), ttl)

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
