"""Uses a store that others use too, through the death of its etcd: `recorded_client.py ENDPOINT NAME FILE`.

Says when it has been told enough ("ready") and when it was not answered ("unanswered"), goes on until it is answered
again, and writes what it asked and was told into the file. tests/ is on the path.
"""

from __future__ import annotations

import random
import sys
import time
from datetime import timedelta
from pathlib import Path

from judge.history import written
from recorded import RecordedStore

from ftcoord import EtcdStore

ENOUGH = 40
"""Answers."""
endpoint, name, path = sys.argv[1:]
raw = EtcdStore(endpoint, "/recorded/", timedelta(seconds=1))
store, draw = RecordedStore(raw, name), random.Random(name)


def act() -> None:
    """One operation, on keys that all use at this moment, and nobody later: a long history is many short ones."""
    turn, mark = int(5 * time.monotonic()), f"{name}{len(store.history)};"
    kind = draw.choice(("count", "text", "flag"))
    key = f"{kind}/{turn}"
    if kind == "count":
        store.add(key, draw.choice((1, 2)))
        if store.history[-1].is_answered:  # else it may not be there, and who reads it waits
            store.get(key)
    elif kind == "text":
        draw.choice(
            (
                lambda: store.set(key, mark),
                lambda: store.append(key, mark),
                lambda: store.compare_set(key, store.last_told(key), mark),
            )
        )()
        if store.history[-1].is_answered:
            store.get(key)
    else:
        draw.choice(
            (
                lambda: store.set(key, mark),
                lambda: store.compare_set(key, "", mark),
                lambda: store.check(key),
                lambda: store.delete(key),
            )
        )()


def answered() -> int:
    return sum(one.is_answered for one in store.history)


while answered() < ENOUGH:
    act()
print("ready", flush=True)
while answered() == len(store.history):
    act()
print("unanswered", flush=True)
before = answered()
while answered() < before + ENOUGH:
    act()
Path(path).write_text(written(store.history), encoding="utf-8")
raw.close()
