"""A process with replicas of a job in it, told what to do line by line on its standard input; see tests/replicas.py."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from ftcoord.coordination import LighthouseClient, ManagerClient, ManagerServer
from ftcoord.coordination.ranks import RankGroup
from ftcoord.primitives.sentinel import Sentinel

CONNECT = timedelta(seconds=60)


class Process:
    """What is in this process. Every order is carried out on a thread of its own."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lighthouse = LighthouseClient(job, CONNECT)
        self._servers: list[ManagerServer] = []
        self._ranks: dict[tuple[str, int], ManagerClient] = {}
        self._speaking = threading.Lock()

    def carry_out(self, order: dict[str, Any]) -> None:
        number, name = order.pop("number"), order.pop("do")
        try:
            answer = {"result": getattr(self, name)(**order)}
        except (RuntimeError, TimeoutError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        with self._speaking:
            print(json.dumps({"number": number, **answer}), flush=True)

    def ask(self, replica: str, timeout: float, step: int = 0) -> tuple[int, list[str]]:
        quorum = self._lighthouse.quorum(replica, timedelta(seconds=timeout), step=step)
        return quorum.quorum_id, [member.replica_id for member in quorum.participants]

    def manage(self, replica: str, world_size: int, bind: str) -> str:
        interval = timedelta(milliseconds=100)
        server = ManagerServer(replica, self._job, "localhost", bind, "store", world_size, interval, CONNECT, 0)
        self._servers.append(server)
        return server.address()

    def quorum(self, manager: str, rank: int, timeout: float, step: int, failures: int) -> tuple[int, list[str]]:
        client, limit = self._rank(manager, rank), timedelta(seconds=timeout)
        result = client._quorum(rank, step, f"weights {rank}", False, True, failures, limit)
        return result.quorum_id, result.replica_ids

    def commit(self, manager: str, rank: int, step: int, yes: bool, timeout: float) -> bool:
        return self._rank(manager, rank).should_commit(rank, step, yes, timedelta(seconds=timeout))

    def guarded(self, timeout: float) -> int:
        """Wait until a sentinel stands beside this process and has read its orders; its pid. One that has just been
        started may need longer than a short lease lives before it can write a cause."""
        sentinel, tick, deadline = Sentinel.of_process(), threading.Event(), time.monotonic() + timeout
        assert sentinel is not None
        while (process := sentinel._process) is None or process._pipe._unread():
            if time.monotonic() > deadline:
                raise TimeoutError("no sentinel")
            tick.wait(0.02)
        return process.pid

    def metadata(self, manager: str, rank: int) -> str:
        return self._rank(manager, 0)._checkpoint_metadata(rank, CONNECT)

    def waiting(self, manager: str) -> int:
        """How many ranks of a manager in this process wait for the others."""
        group = RankGroup.at(manager.partition("#")[0])
        assert group is not None
        return len({rank for rank, _ in group._requests._waiting.copy().values()})

    def _rank(self, manager: str, rank: int) -> ManagerClient:
        if (manager, rank) not in self._ranks:
            self._ranks[manager, rank] = ManagerClient(manager, CONNECT)
        return self._ranks[manager, rank]


if __name__ == "__main__":
    process = Process(sys.argv[1])
    for line in sys.stdin:
        threading.Thread(target=process.carry_out, args=(json.loads(line),), daemon=True).start()
