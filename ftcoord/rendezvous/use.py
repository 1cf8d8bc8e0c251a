"""Rounds as a use of the group."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from ftcoord.core import rendezvous, rendezvous_records
from ftcoord.core.outlook import Outlook
from ftcoord.core.rendezvous import RoundOptions
from ftcoord.core.rendezvous_records import JoinRequest, Round
from ftcoord.primitives.group.use import Use
from ftcoord.rendezvous.policy import RendezvousPolicy


class RoundUse(Use[Round, JoinRequest]):
    """The rounds of one run."""

    def __init__(self, prefix: str, options: RoundOptions) -> None:
        self._prefix, self._options = prefix, options

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> RendezvousPolicy:
        return RendezvousPolicy(self._prefix, self._options)

    def parse(self, key: str, value: bytes) -> Round:
        return rendezvous_records.parse_round(key, value)

    def stamp(self, ask: JoinRequest) -> JoinRequest:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: JoinRequest) -> bytes:
        return rendezvous_records.encode(ask)

    def outlook(self, record: Round | None, me: Sequence[str], ask: JoinRequest) -> Outlook[JoinRequest]:
        return rendezvous.outlook(record, me[-1], ask)
