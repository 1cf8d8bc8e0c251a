"""`etcd-v3-dynamic`: torch's own rendezvous state machine, on etcd v3.

torch keeps the whole state of a run in one key, in Python's own object format. Reading that format runs code, so anyone
who can write the key controls every node. torch also keeps the bootstrap address of the first round
(docs/architecture.md). Use `etcd-v3` unless you need torch's state machine.
"""

from __future__ import annotations

import atexit
from typing import Final

from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler as create_torchs_handler,
)

from ftcoord import concurrency
from ftcoord.core.layout import backend_state_key, backend_store_prefix
from ftcoord.errors import ConfigError, EtcdError, LeaseLost
from ftcoord.escaping import redacted
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, Span
from ftcoord.primitives.write_once import WriteOutcome, write_once
from ftcoord.rendezvous.handler import open_run
from ftcoord.store import EtcdStore

NAME: Final = "etcd-v3-dynamic"
STATE_TTL: Final = 7200
"""Seconds that a state lives after its last write, as in torch's etcd-v2."""
_TORCH_KEYS: Final = ("cas_backoff_max_seconds",)


class EtcdRendezvousBackend(RendezvousBackend):
    """Stores the state of a run for `torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler`.

    A state is bytes. It is written only if it has not changed since it was read; the fencing token is the key's mod
    revision. Not thread-safe.

    Args:
        etcd: the client.
        key: the key that holds the state.
        ttl: seconds that the state lives after its last write, at least two thirds of it: writes renew the lease only
            when a third of `ttl` has passed.
    """

    def __init__(self, etcd: Etcd, key: str, ttl: int = STATE_TTL) -> None:
        self._etcd, self._key, self._ttl = etcd, key, ttl
        self._lease, self._renewed_at = 0, 0.0

    @property
    def name(self) -> str:
        """``etcd-v3-dynamic``."""
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None if there is none. Raises RendezvousConnectionError."""
        try:
            kv = self._etcd.range(Get(Span(self._key))).one
        except EtcdError as error:
            raise api.RendezvousConnectionError(f"the state of the run cannot be read: {error}") from None
        return (kv.value, kv.mod_revision) if kv else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write the state if it still has this token; without a token, if there is no state yet.

        Returns the state in etcd afterwards, its token, and whether this call wrote it. Raises
        RendezvousConnectionError.
        """
        expected = token if token else 0
        if not isinstance(expected, int):
            found = self.get_state()
            return (*found, False) if found else None
        try:
            written = self._write(state, expected)
        except EtcdError as error:
            raise api.RendezvousConnectionError(f"the state of the run cannot be written: {error}") from None
        return (written.kv.value, written.kv.mod_revision, written.done) if written.kv else None

    def _write(self, state: bytes, revision: int) -> WriteOutcome:
        expected = None
        if revision:  # of what is expected, this alone counts here
            expected = KeyValue(self._key, b"", create_revision=0, mod_revision=revision, version=0, lease=0)
        try:
            return write_once(self._etcd, Put(self._key, state, self._kept_lease()), expected)
        except LeaseLost:
            self._lease = 0
            return write_once(self._etcd, Put(self._key, state, self._kept_lease()), expected)

    def _kept_lease(self) -> int:
        now = concurrency.now()
        if not self._lease:
            self._lease, self._renewed_at = self._etcd.grant(self._ttl).id, now
        elif now - self._renewed_at > self._ttl / 3:
            self._etcd.renew(self._lease)
            self._renewed_at = now
        return self._lease


def create_backend(params: api.RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Make the backend and the store of torch's handler from torchrun's parameters.

    Takes the endpoint, TLS and login settings of `etcd-v3`. Raises ConfigError (a ValueError) for bad settings, and
    RendezvousConnectionError when etcd does not answer.
    """
    conf = {key: value for key, value in params.config.items() if key not in _TORCH_KEYS}
    if conf.get("timers") is not None:
        raise ConfigError("timers", redacted(conf["timers"]), "leave it out: only etcd-v3 serves timers")
    settings, etcd, server = open_run(params, conf)
    if server is not None:
        atexit.register(server.stop)
    backend = EtcdRendezvousBackend(etcd, backend_state_key(settings.prefix))
    return backend, EtcdStore(etcd, backend_store_prefix(settings.prefix))


def create_dynamic_handler(params: api.RendezvousParameters) -> api.RendezvousHandler:
    """Make the handler that `torchrun --rdzv-backend=etcd-v3-dynamic` uses: torch's own, on etcd v3.

    Raises what `create_backend` raises.
    """
    backend, store = create_backend(params)
    return create_torchs_handler(store, backend, params)
