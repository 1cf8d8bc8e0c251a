"""A store that remembers what it was asked and what it told, as a judge reads it (tests/judge)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from judge.history import Operation
from torch.distributed import DistError

from ftcoord.store import EtcdStore


class RecordedStore:
    """One client's store: one operation at a time. Histories of several, also in several processes of one host, are one
    history: they have one clock.

    What raises DistError may have been done or not.

    Args:
        client: its name in the history.
    """

    def __init__(self, store: EtcdStore, client: str) -> None:
        self.history: list[Operation] = []
        self._store, self._client = store, client

    def get(self, key: str) -> None:
        self._record("get", key, (), lambda: self._store.get(key).decode("latin-1"))

    def set(self, key: str, value: str) -> None:
        self._record("set", key, (value,), lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> None:
        self._record("add", key, (str(amount),), lambda: str(self._store.add(key, amount)))

    def append(self, key: str, value: str) -> None:
        self._record("append", key, (value,), lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self._record(
            "compare_set",
            key,
            (expected, desired),
            lambda: self._store.compare_set(key, expected, desired).decode("latin-1"),
        )

    def delete(self, key: str) -> None:
        self._record("delete", key, (), lambda: self._store.delete_key(key))

    def check(self, key: str) -> None:
        self._record("check", key, (), lambda: self._store.check([key]))

    def last_told(self, key: str) -> str:
        """What it was told last of a key's value; empty if nothing."""
        told = (one.result for one in reversed(self.history) if one.key == key and isinstance(one.result, str))
        return next(told, "")

    def _record(self, op: str, key: str, arguments: tuple[str, ...], call: Callable[[], Any]) -> None:
        asked = Operation(self._client, "store", key, op, arguments, None, time.monotonic_ns(), None)
        try:
            told = call()
        except DistError:
            self.history.append(asked)
        else:
            self.history.append(replace(asked, result=told, returned=time.monotonic_ns()))
