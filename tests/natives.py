"""torchft's native classes in a child process, as the tests call them."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("native_child.py")
DEADLINE = 90.0
TIMED_OUT = r"status: Cancelled, message.*Timeout expired|status: DeadlineExceeded"
"""What a native call raises when its time is over. The second is gRPC's own text: on a busy machine ftcoord's answer, a
tenth of a second before the deadline, comes too late."""


class Natives:
    """A process with torchft's native managers and clients in it; `do` names a function of `native_child.py`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Any]] = {}

    def do(self, function: str, /, **arguments: Any) -> Future[Any]:
        """Begin a call; its future has the answer or raises what the child raised."""
        future: Future[Any] = Future()
        with self._lock:
            number = len(self._answers)
            self._answers[number] = future
            self._process.stdin.write(json.dumps({"id": number, "do": function, "with": arguments}) + "\n")
            self._process.stdin.flush()
        return future

    def ask(self, *names: str, **arguments: Any) -> list[dict[str, Any]]:
        """All these managers ask for a quorum at once; what they are told."""
        asked = [self.do("quorum", name=name, **arguments) for name in names]
        return [one.result(DEADLINE) for one in asked]

    def manage(self, lighthouse: str, *names: str, **arguments: Any) -> None:
        """Make managers of these names."""
        for name in names:
            self.do("manager", name=name, lighthouse=lighthouse, **arguments).result(DEADLINE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """With -9: nobody says good-bye."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Natives:
        command = [sys.executable, str(CHILD)]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, name="natives", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._reader.join(DEADLINE)
        self._process.communicate()

    def _read(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            future = self._answers[said["id"]]
            if "error" in said:
                kind, text = said["error"]
                future.set_exception(getattr(builtins, kind)(text))
            else:
                future.set_result(said["is"])
