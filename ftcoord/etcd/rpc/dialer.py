"""Opens connections in bounded time, even if a name lookup is slow or some addresses do not answer."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ftcoord import concurrency
from ftcoord.config import Endpoint
from ftcoord.errors import ThreadNotStarted

NEWS_WITHIN: Final = 0.1
"""Seconds that a lookup may take if the addresses of an earlier one are known."""


class _Address(NamedTuple):
    family: int
    sockaddr: Any


class Dialer:
    """Opens connections to one endpoint. Not thread-safe.

    Nothing bounds how long the system takes to look up a name, so a thread does it, for the first time when this is
    made. Each connection looks the name up again, and uses earlier addresses until there is an answer.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._host, self._port = endpoint.host.encode("ascii"), endpoint.port  # never change; as a str it loads tables
        # Written by the thread that looks it up, in this order; each is replaced as a whole.
        self._known: list[_Address] = []
        self._problem: OSError | None = None
        self._answered: concurrency.Event | None = None  # None for an address, which needs no look-up
        try:
            self._known = self._addresses(socket.AI_NUMERICHOST)
        except OSError:
            self._answered = concurrency.event()
            self._answered.set()
            with suppress(ThreadNotStarted):  # it is tried again when there is something to say
                self._look_up()

    def dial(self, deadline: float) -> socket.socket:
        """Open a connection. Each address gets its share of the time left. Raises OSError."""
        problem: OSError | None = None
        known = self._await_known(deadline)
        for index, address in enumerate(known):
            share = left(deadline) / (len(known) - index)
            opened = socket.socket(address.family, socket.SOCK_STREAM)
            try:
                opened.settimeout(share)
                opened.connect(address.sockaddr)
                return opened
            except OSError as error:
                opened.close()
                problem = error
        raise problem or OSError("it has no address")

    def _await_known(self, deadline: float) -> list[_Address]:
        if self._answered is None:
            return self._known
        try:
            self._look_up()
        except ThreadNotStarted as error:
            if not self._known:
                raise OSError(str(error)) from None
        self._answered.wait(min(left(deadline), NEWS_WITHIN) if self._known else left(deadline))
        if not self._known:
            raise self._problem or TimeoutError("its name was not looked up in time")
        return self._known

    def _look_up(self) -> None:
        """Start a lookup, unless one is in progress."""
        assert self._answered is not None
        if self._answered.is_set():
            thread = concurrency.thread(self._run, "ftcoord-dialer", event := concurrency.event())
            thread.start()
            self._answered = event

    def _run(self, answered: concurrency.Event) -> None:
        try:
            self._known = self._addresses()
        except OSError as error:
            self._problem = error
        finally:
            failure = sys.exc_info()[1]
            if failure is not None:  # whoever waits for the addresses hears of it, and not that the time is over
                self._problem = OSError(f"the look-up of its name failed: {failure!r}")
            answered.set()

    def _addresses(self, flags: int = 0) -> list[_Address]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags)
        return [_Address(family, sockaddr) for family, _, _, _, sockaddr in found]


def left(deadline: float) -> float:
    """Seconds until a monotonic time. Raises TimeoutError when it is over."""
    seconds = deadline - concurrency.now()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds
