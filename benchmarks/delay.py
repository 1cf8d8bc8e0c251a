"""A network that takes its time: a TCP proxy, in a process of its own, that delays each byte by half a round trip."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection


@contextlib.contextmanager
def delayed(endpoint: str, round_trip: float) -> Iterator[str]:
    """`host:port` of a proxy before `endpoint`, which adds `round_trip` seconds to each round trip; 0: no proxy."""
    if not round_trip:
        yield endpoint
        return
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, endpoint, round_trip / 2), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"127.0.0.1:{mine.recv()}"
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, endpoint: str, delay: float) -> None:
    asyncio.run(_serve(pipe, endpoint, delay))


async def _serve(pipe: Connection, endpoint: str, delay: float) -> None:
    host, port = endpoint.rsplit(":", 1)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pass_on(reader, there_writer, delay), _pass_on(there_reader, writer, delay))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(1 << 16):
        loop.call_later(delay, writer.write, data)
    loop.call_later(delay, writer.close)
