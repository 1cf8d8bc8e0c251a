"""What the keys of a store hold, with torch's errors."""

from __future__ import annotations

from torch.distributed import DistStoreError

from ftcoord.core.store_values import plain
from ftcoord.etcd.api import KeyValue


def value_of(kv: KeyValue) -> bytes:
    """The value. Raises DistStoreError for a broken counter."""
    try:
        return plain(kv.value, kv.version)
    except ValueError:
        raise DistStoreError(f"etcd key {kv.key!r} holds a broken counter: delete it") from None


def number_of(key: str, kv: KeyValue) -> int:
    """The number that the user's `key` holds. Raises DistStoreError if it holds none."""
    try:
        return int(value_of(kv))
    except ValueError:
        raise DistStoreError(f"{key!r} holds no decimal number to add to; use only add() on such a key") from None
