"""What lies beside a decided record that is too large for one key: written in transactions.

It says something only through the record that names it. So the order in which it is written does not matter, nor how
much of it, as long as all of it is there when the record is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ftcoord.etcd.api import Put

MOST_OPERATIONS: Final = 128
"""Of one transaction: etcd's default limit (`--max-txn-ops`)."""
MOST_BYTES: Final = 1 << 20
"""Of the keys and values of one transaction: etcd takes 1.5 MiB (`--max-request-bytes`)."""


def fits(operations: int, puts: Sequence[Put]) -> bool:
    """Whether a transaction of so many operations, with these puts among them, is one that etcd takes."""
    return operations <= MOST_OPERATIONS and _size(puts) <= MOST_BYTES


def batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The puts in order, in parts that are a transaction each."""
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
