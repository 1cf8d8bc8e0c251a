"""The addresses of etcd's endpoints, looked up as the system does it: by NSS, /etc/hosts and DNS.

gRPC would look names up by itself, and would treat a name with several addresses as one member. So one address that
accepts connections and never answers would cost every call its time. Here each address is a member of its own.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from ftcoord import concurrency
from ftcoord.config import Endpoint
from ftcoord.errors import NO_ETCD, EtcdUnavailable, ThreadNotStarted

NEWS_WITHIN: Final = 0.1
"""Seconds that a call waits for the look-ups of further names, and for news of names that are known."""


class Address(NamedTuple):
    """An address of an endpoint."""

    endpoint: Endpoint
    host: str

    @property
    def is_looked_up(self) -> bool:
        return self.host != self.endpoint.host

    def __str__(self) -> str:
        return f"{self.endpoint} ({self.host})" if self.is_looked_up else str(self.endpoint)


class Addresses:
    """Looks endpoints up. Thread-safe.

    Nothing bounds how long the system takes to look a name up, so a thread does it, one for each name at a time.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints  # never changes
        self._changed = concurrency.condition("Addresses._changed")  # guards all below
        self._known = {one: [one.host] for one in endpoints if _is_address(one.host)}
        self._names = [one for one in endpoints if one not in self._known]  # never changes
        self._due = {*self._names}  # to be looked up by the next call
        self._running: set[Endpoint] = set()  # those that a thread looks up
        self._problem = ""  # of the look-up that failed last

    def look_up_again(self) -> None:
        """Have the next `find` look all names up again."""
        with self._changed:
            self._due = {*self._names}

    def find(self, deadline: float) -> list[Address]:
        """All addresses known by then: the first one of each endpoint, then the second ones. An endpoint that has not
        been found yet is left out. Raises EtcdUnavailable if there is none."""
        with self._changed:
            for endpoint in self._due - self._running:
                self._start(endpoint)
            left = max(deadline - concurrency.now(), 0)
            self._changed.wait_for(lambda: not self._running, min(left, NEWS_WITHIN))
            left = max(deadline - concurrency.now(), 0)
            self._changed.wait_for(lambda: self._known or not self._running, left)
            if not self._known:
                raise EtcdUnavailable(
                    self._problem or f"{NO_ETCD} {self._names[0]}: the look-up of the name takes too long"
                )
            columns = zip_longest(*(self._of(one) for one in self._endpoints))
            return [address for row in columns for address in row if address is not None]

    def _of(self, endpoint: Endpoint) -> list[Address]:
        return [Address(endpoint, host) for host in self._known.get(endpoint, ())]

    def _start(self, endpoint: Endpoint) -> None:
        """With the lock held."""
        try:
            concurrency.thread(self._run, "ftcoord-lookup", endpoint).start()
        except ThreadNotStarted as error:
            self._problem = str(error)
            return
        self._due.discard(endpoint)
        self._running.add(endpoint)

    def _run(self, endpoint: Endpoint) -> None:
        found: list[str] = []
        problem = ""
        try:
            found = _hosts(endpoint)
        except OSError as error:
            problem = (
                f"{NO_ETCD} {endpoint}: the name does not resolve: {error.strerror or error}; correct the endpoints"
            )
        finally:
            failure = sys.exc_info()[1]
            with self._changed:  # whoever waits for the addresses gets the failure, and not that the time is over
                self._running.discard(endpoint)
                if found:
                    self._known[endpoint] = found
                else:
                    self._problem = problem or f"the look-up of {endpoint.host} failed: {failure!r}"
                    self._due.add(endpoint)
                self._changed.notify_all()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _hosts(endpoint: Endpoint) -> list[str]:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    hosts = [str(one[4][0]) for one in found]
    if endpoint.is_loopback:  # etcd listens on 127.0.0.1 if it is to listen on localhost
        hosts.sort(key=lambda host: ":" in host)
    return list(dict.fromkeys(hosts))
