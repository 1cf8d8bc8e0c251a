"""What processes were told by a real etcd that dies meanwhile: a judge that knows nothing of etcd accepts it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import warm
from helpers import DEADLINE
from jobs import SCRIPTS
from judge.history import Operation, read
from judge.linearizability import findings

from ftcoord.embedded.server import EtcdServer

CLIENTS = "abc"
TESTS = SCRIPTS.parents[1]


def test_one_order_explains_what_processes_were_told(fragile: EtcdServer, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    files = [tmp_path / f"{name}.jsonl" for name in CLIENTS]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                warm.python(str(SCRIPTS / "recorded_client.py"), fragile.get_endpoint(), path.stem, str(path), env=env)
            )
            for path in files
        ]
        for said, act in (("ready", fragile.kill), ("unanswered", fragile.restart)):
            assert [one.stdout.readline().strip() for one in clients if one.stdout] == [said] * len(clients)
            act()
        assert [one.wait(DEADLINE) for one in clients] == [0] * len(clients)
    history: list[Operation] = []
    for path in files:
        with path.open(encoding="utf-8") as lines:
            history += read(lines)
    unanswered = [one for one in history if not one.is_answered]
    print(f"{len(history)} operations, {len(unanswered)} not answered")
    assert len(unanswered) >= len(CLIENTS)
    assert not [*findings(history)]
