"""Processes and threads change one store while etcd is killed: every change has its effect once. They are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import warm
from helpers import DEADLINE, eventually
from jobs import SCRIPTS

from ftcoord import EtcdStore
from ftcoord.embedded.server import EtcdServer

PROCESSES = "abc"


def test_no_change_is_lost_or_made_twice(fragile: EtcdServer) -> None:
    store = EtcdStore(fragile.get_endpoint(), "/hammer/", timedelta(seconds=DEADLINE))
    command = [sys.executable, str(SCRIPTS / "hammer.py"), fragile.get_endpoint()]
    running = [warm.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in PROCESSES]
    try:
        for _ in range(3):
            before = store.add("sum", 0)
            eventually(lambda before=before: store.add("sum", 0) > before + 30, what="they get on")
            fragile.kill()
            fragile.restart()
        store.set("stop", "")
        told = [tuple(one) for process in running for one in json.loads(process.communicate()[0])]
    finally:
        for process in running:
            process.kill()
            process.wait()
    count = len(told)
    assert sorted(total for total, _ in told) == list(range(1, count + 1)), "each sum was told to one"
    assert len({item for _, item in told}) == count, "each item was given to one"
    assert store.queue_len("queue") == 0
    assert store.get("text") == b"x" * count
    assert store.get("compared").split()[0] == b"%d" % count
    store.close()
