"""Keys beside a decided record that is too large for one key: written in transactions of their own.

They mean something only through the record that names them. So it does not matter in which order they are written, nor
how many there are at a time, as long as all exist when the record does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ftcoord.etcd.api import Put

MOST_OPERATIONS: Final = 128
"""Operations per transaction: etcd's default limit (`--max-txn-ops`)."""
MOST_BYTES: Final = 1 << 20
"""Bytes of the keys and values of one transaction: etcd takes 1.5 MiB (`--max-request-bytes`)."""


def fits(operations: int, puts: Sequence[Put]) -> bool:
    """Whether etcd takes a transaction of so many operations, with these puts among them."""
    return operations <= MOST_OPERATIONS and _size(puts) <= MOST_BYTES


def batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The puts in order, in parts that each fit into one transaction."""
    batch: list[Put] = []
    for put in puts:
        if batch and not fits(len(batch) + 1, [*batch, put]):
            yield batch
            batch = []
        batch.append(put)
    if batch:
        yield batch


def _size(puts: Sequence[Put]) -> int:
    return sum(len(put.key) + len(put.value) for put in puts)
