"""A run as its user names it: the prefix of its keys, and a client of its etcd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig, full_text, key_path
from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.shared import SharedClient


@dataclass(frozen=True, slots=True)
class Namespace(Closing):
    """The prefix and the client of a run.

    Args:
        prefix: the prefix of the run's keys.
        etcd: the client of the run's etcd.
        own: the same client, if it is to be closed with this.
    """

    prefix: str
    etcd: Etcd
    own: SharedClient | None = None

    @classmethod
    def open(
        cls, run: object, etcd: Etcd | EtcdConfig | str | Sequence[str] | None, key_prefix: object = KEY_PREFIX
    ) -> Namespace:
        """Check the arguments, then make a client if none is given.

        Args:
            run: the run's id, as in `--rdzv-id`.
            etcd: a client, or endpoints such as "h1:2379,h2:2379"; None takes them from FTCOORD_ENDPOINTS and related
                variables.
            key_prefix: the `key_prefix` of `rdzv_conf`.

        Raises ConfigError before any socket is opened.
        """
        prefix = run_prefix(
            key_path("key_prefix", key_prefix), full_text("run", run, "give the run's id, as in torchrun's --rdzv-id")
        )
        if hasattr(etcd, "txn"):
            return cls(prefix, cast(Etcd, etcd))
        client = SharedClient(EtcdConfig.of(cast(str, etcd)))
        return cls(prefix, client, client)

    def close(self) -> None:
        """Close the client, if it was made here. Idempotent."""
        if self.own is not None:
            self.own.close()
