"""A run's decided record, read and closed by whoever is no member."""

from __future__ import annotations

import uuid
from dataclasses import replace

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from ftcoord.core import records
from ftcoord.core.records import Round
from ftcoord.errors import EtcdError, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue, Span
from ftcoord.etcd.settle import amend
from ftcoord.rendezvous.settings import RendezvousSettings


class Decided:
    """The record of one run. Its calls raise RendezvousConnectionError and RendezvousStateError."""

    def __init__(self, etcd: Etcd, settings: RendezvousSettings) -> None:
        self._etcd, self._settings = etcd, settings
        self._key = f"{settings.prefix}/decided"

    def read(self) -> Round | None:
        """What was decided last."""
        try:
            kv = self._etcd.range(Get(Span(self._key))).one
            return records.parse_round(kv.key, kv.value) if kv else None
        except StateError as error:
            raise RendezvousStateError(str(error)) from error
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from error

    def close(self, reason: str) -> None:
        """End the run, within `close_timeout` seconds."""

        def closed(kv: KeyValue | None) -> bytes | None:
            now = records.parse_round(kv.key, kv.value) if kv else records.NO_ROUND
            return None if now.closed else records.encode(replace(now, closed=reason, by=uuid.uuid4().hex))

        settings = self._settings
        try:
            amend(self._etcd, self._key, settings.run_ttl, closed, settings.close_timeout)
        except StateError as error:
            raise RendezvousStateError(str(error)) from error
        except EtcdError as error:
            raise RendezvousConnectionError(f"run {settings.run_id!r} could not be closed: {error}") from error
