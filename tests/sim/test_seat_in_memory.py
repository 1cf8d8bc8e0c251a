"""Who says that a node holds its seat, beside a participant that does what the test wants."""

from __future__ import annotations

from typing import Any, cast

from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.rendezvous.node import SeatHolder

HOLDS = JoinRequest("node", "host", 1, 3, "host", "", 1, 2, seated=3, holds="one")


class LosesTwice:
    """Its second lease is lost too: after etcd has taken what was said through it, and before that is known."""

    def __init__(self) -> None:
        self.said: list[JoinRequest] = []
        self.joined = False
        self.holder: SeatHolder | None = None

    def say(self, ask: JoinRequest, _deadline: float, _gone: concurrency.Event) -> JoinRequest:
        self.said.append(ask)
        concurrency.sleep(0.1)
        self.joined = len(self.said) > 1
        if not self.joined:
            assert self.holder is not None
            self.holder.begin(HOLDS)  # as the thread does that renews leases
        return ask


@simulated
def test_a_lease_that_is_lost_while_it_is_taken_is_replaced(world: World) -> None:
    """An agent may look for itself only twice a minute."""
    participant = LosesTwice()
    participant.holder = holder = SeatHolder(cast(Any, participant), timeout=5.0)
    holder.allow()
    holder.begin(HOLDS)
    world.until(lambda: participant.joined, "it holds its seat again")
    world.sleep(1)
    assert participant.said == [HOLDS, HOLDS]
    holder.end()
