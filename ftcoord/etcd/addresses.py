"""The addresses of etcd's endpoints, looked up as the system does it: by NSS, /etc/hosts and DNS.

The members of a domain are looked up in DNS, as etcdctl does it
(https://etcd.io/docs/v3.5/op-guide/clustering/#dns-discovery).

gRPC would look names up by itself, and would treat a name with several addresses as one member. So one address that
accepts connections and never answers would cost every call its time. Here each address is a member of its own.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Final, NamedTuple

from ftcoord import concurrency
from ftcoord.config import Endpoint, EtcdConfig, parse_host
from ftcoord.errors import NO_ETCD, EtcdUnavailable, ThreadNotStarted

NEWS_WITHIN: Final = 0.1
"""Seconds that a call waits for the look-ups of further names, and for news of names that are known."""


class Address(NamedTuple):
    """An address of an endpoint."""

    endpoint: Endpoint
    host: str
    port: int

    @property
    def target(self) -> str:
        """As gRPC takes it."""
        return Endpoint(self.host, self.port).target

    @property
    def is_looked_up(self) -> bool:
        return self.host != self.endpoint.host

    def __str__(self) -> str:
        if self.endpoint.is_srv:
            return f"{self.endpoint} ({self.target})"
        return f"{self.endpoint} ({self.host})" if self.is_looked_up else str(self.endpoint)


class Addresses:
    """Looks endpoints up. Thread-safe.

    Nothing bounds how long the system takes to look a name up, so a thread does it, one for each name at a time.
    """

    def __init__(self, endpoints: Sequence[Endpoint], secure: bool) -> None:
        self._endpoints, self._secure = endpoints, secure  # never change
        self._changed = concurrency.condition("Addresses._changed")  # guards all below
        self._known = {one: [Address(one, one.host, one.port)] for one in endpoints if _is_address(one.host)}
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
            return _in_turn(self._known.get(one, ()) for one in self._endpoints)

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
        found: list[Address] = []
        problem = ""
        try:
            members = members_of(endpoint, self._secure) if endpoint.is_srv else [endpoint]
            found, problem = _found(endpoint, members)
        except EtcdUnavailable as error:
            problem = str(error)
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


def discovered(config: EtcdConfig) -> EtcdConfig:
    """The configuration with the members that DNS names now in place of a domain. Raises EtcdUnavailable."""
    domain = config.endpoints[0]
    if not domain.is_srv:
        return config
    tls = config.tls and replace(config.tls, server_name=config.tls.server_name or domain.host)
    return replace(config, endpoints=tuple(members_of(domain, tls is not None)), tls=tls)


def own_addresses(config: EtcdConfig) -> Iterator[str]:
    """The addresses from which this host reaches the members that are not on its loopback."""
    with suppress(EtcdUnavailable):
        for member in discovered(config).endpoints:
            if not member.is_loopback and (found := address_towards(member.host, member.port)):
                yield found


def address_towards(host: str, port: int) -> str | None:
    """The address from which this host reaches another one; None if there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(address)  # a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def members_of(domain: Endpoint, secure: bool) -> list[Endpoint]:
    """The members that DNS names for a domain, in the order in which to try them.

    DNS does not choose whether TLS is used, nor which name a member's certificate must have: anybody may forge it.

    Raises EtcdUnavailable.
    """
    import dns.exception  # of an extra
    import dns.resolver
    from dns.rdtypes.IN.SRV import SRV

    service, other = ("etcd-client-ssl", "etcd-client") if secure else ("etcd-client", "etcd-client-ssl")
    record = f"_{service}._tcp.{domain.host}"
    try:
        # a new one, since resolv.conf may have changed
        answer = dns.resolver.Resolver().resolve(record, "SRV", search=True)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        way = "leave out the TLS settings" if secure else f"write https+{domain}, or give TLS settings"
        raise EtcdUnavailable(
            f"{NO_ETCD} {domain}: DNS has no SRV record {record}; for those of _{other} {way}"
        ) from None
    except (dns.exception.DNSException, OSError) as error:
        raise EtcdUnavailable(f"{NO_ETCD} {domain}: the look-up of {record} in DNS failed: {error}") from None
    records = answer.rrset.processing_order() if answer.rrset else []
    named = [one for one in records if isinstance(one, SRV)]
    hosts = [(parse_host(one.target.to_text(omit_final_dot=True)), one.port) for one in named]
    members = [Endpoint(host, port) for host, port in hosts if host and port]
    if not members:
        raise EtcdUnavailable(f"{NO_ETCD} {domain}: the SRV records {record} name no host; correct them")
    return members


def _found(endpoint: Endpoint, members: Iterable[Endpoint]) -> tuple[list[Address], str]:
    """The addresses of its members, and why one of them has none."""
    found: list[list[Address]] = []
    problem = ""
    for member in members:
        try:
            found.append([Address(endpoint, host, member.port) for host in _hosts(member)])
        except OSError as error:
            reason = error.strerror or error
            problem = f"{NO_ETCD} {member}: the name does not resolve: {reason}; correct the endpoints"
    return _in_turn(found), problem


def _in_turn(columns: Iterable[Sequence[Address]]) -> list[Address]:
    """The first one of each, then the second ones."""
    rows = zip_longest(*columns)
    return list(dict.fromkeys(address for row in rows for address in row if address is not None))


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
