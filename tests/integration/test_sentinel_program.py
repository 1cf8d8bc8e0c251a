"""The sentinel's program beside the process of the tests, with a socket for an etcd that only notes who comes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from helpers import DEADLINE

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.primitives.sentinel import PROGRAM, Order, SentinelPipe, config_raw, line_of
from ftcoord.proc import own_pidfd

TTL = 12
"""Seconds: the sentinel would renew the lease after half of it, if it took so long to start."""


@pytest.fixture
def etcd_socket() -> Iterator[socket.socket]:
    """Whoever connects waits in its queue."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@contextmanager
def standing_by(etcd_socket: socket.socket) -> Iterator[tuple[subprocess.Popen[bytes], SentinelPipe]]:
    """A sentinel that was told of a lease, and the pipe to it."""
    config = EtcdConfig.load(f"127.0.0.1:{etcd_socket.getsockname()[1]}", env={})
    pipe, pidfd = SentinelPipe(), own_pidfd()
    with ExitStack() as ends:
        ends.callback(pipe.close)
        descriptors = () if pidfd is None else (pidfd,)
        for descriptor in descriptors:
            ends.callback(os.close, descriptor)
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(os.getpid()), *map(str, descriptors)],
            stdin=pipe.reader,
            pass_fds=descriptors,
        )
        pipe.close_reader()
        ends.callback(process.wait)
        ends.callback(process.kill)
        pipe.tell(line_of(Order(etcd=0, config=config_raw(config))))
        pipe.tell(line_of(Order(etcd=0, keep=1, at=concurrency.now(), ttl=TTL, deaths="/d", was=(), rests=False)))
        yield process, pipe


def test_a_process_that_closes_its_files_is_not_buried(etcd_socket: socket.socket) -> None:
    """As a daemon does when it starts. It lives, and starts another sentinel. This one renews nothing, and does not
    outlive the lease."""
    with standing_by(etcd_socket) as (process, pipe):
        pipe.close()
        assert process.wait(DEADLINE) == 0
        with pytest.raises(BlockingIOError):
            etcd_socket.accept()
