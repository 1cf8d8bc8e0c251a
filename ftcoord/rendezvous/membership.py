"""One incarnation of a node in a run: a lease, a place in the group, and the latest decided round."""

from __future__ import annotations

import logging
import threading

from ftcoord.core import records
from ftcoord.core.lease import SessionState
from ftcoord.core.records import Ask, Round
from ftcoord.core.rendezvous import Options
from ftcoord.errors import EtcdError, LeaseLost, StateError
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.etcd.group import Group
from ftcoord.etcd.session import Session
from ftcoord.rendezvous.policy import RendezvousPolicy
from ftcoord.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)


class Membership:
    """Takes a lease and begins to watch at once; joins the group with the first `ask()`.

    Args:
        changed: notified whenever `round`, `problem` or `lost` may have changed.

    Raises EtcdError when it can have no lease or no watch.
    """

    def __init__(self, etcd: Etcd, settings: RendezvousSettings, changed: threading.Condition) -> None:
        self.round: Round | None = None
        self.round_lease = 0
        self.problem: StateError | None = None
        self.lost = False
        self._changed = changed
        self._timeout = settings.request_timeout
        self._session = Session(etcd, settings.lease_ttl, self._on_state)
        options = Options(
            settings.min_nodes,
            settings.max_nodes,
            settings.last_call_timeout,
            settings.settle_timeout,
            settings.on_member_loss == "restart",
        )
        policy = RendezvousPolicy(settings.prefix, options)
        self._group = Group(etcd, self._session, settings.prefix, policy, settings.run_ttl, self._on_decided)
        self.id = self._group.id
        try:
            self._group.prepare(self._timeout)
        except EtcdError:
            self.leave(self._timeout)
            raise

    def ask(self, ask: Ask) -> None:
        """Join, or ask for another round. Raises EtcdError; after LeaseLost, make a new membership."""
        try:
            self._group.enter(records.encode(ask), self._timeout)
        except LeaseLost:
            self._lose()
            raise

    def leave(self, timeout: float) -> None:
        """Tell the others at once by giving up the lease; never raises for an etcd that is out of reach."""
        self._group.close()
        try:
            self._session.close(timeout)
        except EtcdError as error:
            log.debug("the lease was not given up, it expires by itself: %s", error)

    def _on_state(self, state: SessionState) -> None:
        log.info("the lease of member %s is %s", self.id, state.value)
        if state is SessionState.LOST:
            self._lose()

    def _lose(self) -> None:
        self._group.close()
        self._session.orphan()
        with self._changed:
            self.lost = True
            self._changed.notify_all()

    def check(self) -> None:
        """Have this member's key put back if it is gone, though its lease is not."""
        self._group.check()

    def _on_decided(self, kv: KeyValue | None) -> None:
        try:
            round_, problem = (records.parse_round(kv.key, kv.value) if kv else self.round), None
        except StateError as error:
            log.warning("%s", error)
            self._note(self.round, error, 0)
            raise
        self._note(round_, problem, kv.lease if kv else 0)

    def _note(self, round_: Round | None, problem: StateError | None, lease: int) -> None:
        with self._changed:
            self.round, self.problem, self.round_lease = round_, problem, lease
            self._changed.notify_all()
