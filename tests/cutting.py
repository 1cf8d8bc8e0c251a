"""TCP lines between clients and servers that can be cut, and the process that carries them.

What is sent while a line is held arrives when it is released, as TCP does it after an outage. `reset` breaks the
connections instead, and what was held is lost.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any


class Lines:
    """Lines to `targets` (``host:port`` each), in a process of their own; `endpoints` leads through them."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *targets], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addresses: list[str] = self._answer()

    @property
    def endpoints(self) -> str:
        return ",".join(self.addresses)

    def hold(self, *numbers: int, requests: bool = True, answers: bool = True) -> None:
        """Carry nothing in these directions on these lines (all, if none are named), until `release` or `reset`."""
        self._tell("hold", numbers, requests=requests, answers=answers)

    def release(self, *numbers: int) -> None:
        """Deliver what was held."""
        self._tell("release", numbers)

    def reset(self, *numbers: int) -> None:
        """Break all connections, and lose what was held; new ones work."""
        self._tell("reset", numbers)

    def freeze(self) -> None:
        """Carry nothing more on the connections that are open, and leave them open; new ones work."""
        self._tell("freeze", ())

    @property
    def taken(self) -> int:
        """How many connections there were so far."""
        return sum(self._tell("count", ()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, order: str, numbers: Sequence[int], **given: object) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            print(json.dumps([order, list(numbers), given]), file=self._process.stdin, flush=True)
            return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that carries the lines has ended"
        return json.loads(line)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cutter(Lines):
    """A line to a port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        super().__init__([f"127.0.0.1:{port}"])
        self.port = int(self.addresses[0].rpartition(":")[2])


class _Line:
    """One listening port, the connections that came to it, and a gate in each direction."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._taken = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._open()

    async def listen(self) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return f"{host}:{port}"

    def hold(self, requests: bool, answers: bool) -> None:
        for gate, held in ((self._requests, requests), (self._answers, answers)):
            if held:
                gate.clear()

    def _open(self) -> None:
        self._requests, self._answers = asyncio.Event(), asyncio.Event()
        self.release()

    def release(self) -> None:
        self._requests.set()
        self._answers.set()

    def freeze(self) -> None:
        self.hold(requests=True, answers=True)
        self._open()

    def count(self) -> int:
        return self._taken

    def reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()  # type: ignore[attr-defined]
        self.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._taken += 1
        self._writers.add(writer)
        ends = [writer]
        try:
            there, back = await asyncio.open_connection(*self.target.rsplit(":", 1))
            self._writers.add(back)
            ends.append(back)
            ways = [_carry(reader, back, self._requests), _carry(there, writer, self._answers)]
            await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)
        except OSError:  # nobody listens there: the caller sees its connection end
            pass
        finally:
            for end in ends:
                self._writers.discard(end)
                end.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Until either end closes."""
    try:
        while data := await reader.read(65536):
            await gate.wait()
            if writer.is_closing():
                return
            writer.write(data)
            await writer.drain()
        await gate.wait()
    except OSError:
        return


async def _main(targets: Sequence[str]) -> None:
    lines = [_Line(target) for target in targets]
    print(json.dumps([await line.listen() for line in lines]), flush=True)
    loop = asyncio.get_running_loop()
    while order := await loop.run_in_executor(None, sys.stdin.readline):
        name, numbers, given = json.loads(order)
        told = [getattr(line, name)(**given) for line in [lines[number] for number in numbers] or lines]
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
