"""A node whose --nnodes are not the run's: it ends, once it is certain that somebody who lives wants the run's."""

from __future__ import annotations

import logging
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from ftcoord import concurrency
from ftcoord.core.rendezvous import spelled
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest
from ftcoord.errors import EtcdError
from ftcoord.rendezvous.run_record import RunRecord
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

MEMBERS_LOOKED_AT: Final = 100
"""Members among which a node with other limits looks for one that shares the run's."""
LEASES_OUTLIVED: Final = 1.5
"""How many times the TTL of a lease must pass until whoever is still there does live."""


class OtherLimits:
    """What one node knows of the members whose limits are not its own. For one thread.

    The delay is for a run that was killed and is started again with other limits: the leases of the killed nodes seem
    to live for a while.
    """

    def __init__(self, settings: RendezvousSettings, run: RunRecord) -> None:
        self._settings, self._run = settings, run
        self._since: float | None = None
        self.refusal = ""
        """Why this node is not wanted; empty while it may be."""

    def judge(self, now: AnyRound, ask: JoinRequest, timeout: float) -> None:
        """Raises RendezvousStateError when others share the limits of the run `now`, for longer than a lease lasts."""
        try:
            asks, _ = self._run.members(MEMBERS_LOOKED_AT, timeout)
        except EtcdError as error:
            log.debug("who shares the run's limits cannot be told: %s", error)
            return
        other = next((one for one in asks if one.limits == now.limits and not one.leaving), None)
        if other is None:
            self._since, self.refusal = None, ""
            return
        moment = concurrency.now()
        self.refusal = (
            f"run {self._settings.run_id!r} has --nnodes={spelled(now.limits)}, as {other.host} wants, and this node"
            f" has --nnodes={spelled(ask.limits)}: give all nodes the same, or this one another --rdzv-id"
        )
        if self._since is None:
            self._since = moment
            log.warning("%s; waiting until it is certain that the other one lives", self.refusal)
        if moment > self._since + self._settings.lease_ttl * LEASES_OUTLIVED:
            raise RendezvousStateError(self.refusal)
