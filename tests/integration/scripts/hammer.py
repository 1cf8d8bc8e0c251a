"""Changes a store until it is told to stop, with two threads: `hammer.py ENDPOINT NAME`. Says what it was told.

Each thread waits, round for round, for what the other has set.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from ftcoord import EtcdStore

store = EtcdStore(sys.argv[1], "/hammer/")


me = sys.argv[2]


def increment(owner: str) -> None:
    """Add 1 with compare_set alone: whose bytes are held has won."""
    held, mine = b"", b""
    while not mine or held != mine:
        mine = b"%d %s" % (int(held.split()[0]) + 1 if held else 1, owner.encode())
        held = store.compare_set("compared", held, mine)


def work(thread: int) -> list[tuple[int, str]]:
    """The sums and the queue's items that this thread was given, in each of its rounds."""
    told = []
    while True:
        count = len(told)
        total = store.add("sum", 1)
        store.append("text", "x")
        increment(f"{me}/{thread}/{count}")
        store.queue_push("queue", f"{me}/{thread}/{count}")
        told.append((total, store.queue_pop("queue").decode()))
        store.set(f"{me}/{thread}/{count}", "stop" if store.check(["stop"]) else "go on")
        if b"stop" in store.multi_get([f"{me}/{other}/{count}" for other in range(2)]):
            return told


with ThreadPoolExecutor(2) as pool:
    print(json.dumps([one for told in pool.map(work, range(2)) for one in told]))
store.close()
