"""Where a manager listens, and the host that its address names."""

from __future__ import annotations

import logging
import socket
from contextlib import closing
from ipaddress import ip_address
from typing import Final

from ftcoord.coordination.address import Job
from ftcoord.etcd.addresses import own_addresses

log = logging.getLogger(__name__)

UNSET: Final = "[::]"
"""What torchft's Manager binds to, whatever its user wants: it stands for no choice."""
_EVERYWHERE: Final = ("0.0.0.0", "::", "[::]")


def own_place(bind: str, hostname: str, job: Job) -> tuple[str, str]:
    """Where to listen, as `host:port`, and the host to publish.

    One address, for whoever reaches the port takes part: that of the job's `bind=`; else that of the argument `bind`;
    else that of `hostname`. A name that is only known as loopback here (as Debian's /etc/hosts has the host's own) may
    be known to others by another address; then it is the address from which this host reaches etcd.
    """
    host, colon, port = bind.rpartition(":")
    if job.bind:
        return f"{in_url(job.bind)}:{port}", hostname if job.bind in _EVERYWHERE else job.bind
    if not colon or host != UNSET:
        return bind, hostname
    name = hostname.removeprefix("[").removesuffix("]")
    known = _addresses(name)
    own = [one for one in known if _is_own(one)]
    outside = [one for one in own if not ip_address(one).is_loopback]
    if outside:
        return f"{in_url(outside[0])}:{port}", hostname
    if own and name not in own and name != "localhost" and (towards := _address_towards_etcd(job)):
        return f"{in_url(towards)}:{port}", towards
    if own:
        return f"{in_url(own[0])}:{port}", hostname
    log.warning(
        "the manager listens at all addresses of this host: %r is no address of it (%s). Give one with bind=ADDRESS in"
        " the job's address, or as the host name",
        hostname,
        ", ".join(known) or "it does not resolve",
    )
    return bind, hostname


def _addresses(name: str) -> list[str]:
    """In the order in which the system prefers them, as it does for peers."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(one[4][0]).partition("%")[0] for one in found]


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _address_towards_etcd(job: Job) -> str:
    """The address from which this host reaches etcd; empty if that is on loopback."""
    found = own_addresses(job.config())
    return next((one for one in found if not ip_address(one.partition("%")[0]).is_loopback), "")


def in_url(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
