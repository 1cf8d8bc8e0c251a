"""Nodes whose --nnodes differ from the run's: such a node ends once it is certain that a live node has the run's
limits."""

from __future__ import annotations

import logging
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest
from ftcoord.core.round_situation import spelled
from ftcoord.errors import EtcdError
from ftcoord.escaping import neutral
from ftcoord.rendezvous.run_record import RunRecord
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

MEMBERS_LOOKED_AT: Final = 100
"""How many members a node with other limits checks for one that has the run's limits."""
LEASES_OUTLIVED: Final = 2.0
"""How many lease TTLs must pass before a member that is still there is certain to be alive: etcd may grant more than it
was asked for, as 8 s for 5 where its election timeout is 5 s."""


class OtherLimits:
    """What one node knows about the members with other limits. Not thread-safe.

    The delay is for a run that was killed and is restarted with other limits: the killed nodes seem alive until their
    leases expire.
    """

    def __init__(self, settings: RendezvousSettings, run: RunRecord) -> None:
        self._settings, self._run = settings, run
        self._since: float | None = None
        self.refusal = ""
        """Why this node is refused; empty while it may not be."""

    def judge(self, now: AnyRound, ask: JoinRequest, timeout: float) -> None:
        """Raises RendezvousStateError when others have had the limits of the run `now` for longer than a lease
        lasts."""
        try:
            asks, _ = self._run.members(MEMBERS_LOOKED_AT, timeout)
        except EtcdError as error:
            log.debug("who shares the run's limits cannot be told: %s", error)
            return
        other = next((one for one in asks if one.limits == now.limits), None)
        if other is None:
            self._since, self.refusal = None, ""
            return
        moment = concurrency.now()
        self.refusal = (
            f"run {self._settings.run_id!r} has --nnodes={spelled(now.limits)}, as {neutral(other.host)} wants, and"
            f" this node has --nnodes={spelled(ask.limits)}: give all nodes the same, or this one another --rdzv-id"
        )
        if self._since is None:
            self._since = moment
            log.warning("%s; waiting until it is certain that the other one lives", self.refusal)
        if moment > self._since + self._settings.lease_ttl * LEASES_OUTLIVED:
            raise RendezvousStateError(self.refusal)
