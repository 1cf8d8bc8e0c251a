"""Endpoints of etcd as users write them: members, or a domain whose DNS SRV records name them.

They are parsed here, before any socket is opened; names are not looked up.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from ftcoord.errors import ConfigError
from ftcoord.escaping import HIDDEN, redacted

DEFAULT_PORT = 2379
EMBEDDED = "embedded"
SRV: Final = "srv://"
"""What stands in front of a domain, also after a scheme: ``https+srv://``."""

ENDPOINT_FORM = (
    "host, host:port or http(s)://host:port, separated by commas; IPv6 with a port as [::1]:2379;"
    " or srv://domain for the members that DNS names"
)
_SECURE: Final = {None: None, "http": False, "https": True, "srv": None, "http+srv": False, "https+srv": True}
"""The schemes, and whether they ask for TLS; None: neither for nor against it."""
_URL = re.compile(r"(?:(?P<scheme>[^:/?#]*)://)?(?P<address>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^][]*:[^][]*)\]|(?P<name>[^][:]*))(?::(?P<port>[^:]*))?|(?P<bare_v6>[^][]*)")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd member: `host` is a DNS name or an IP address (IPv6 without brackets), `port` 1 to 65535.

    With `is_srv` it is all members that DNS names for the domain `host`, and has no port of its own.
    """

    host: str
    port: int = DEFAULT_PORT
    is_srv: bool = False

    @property
    def target(self) -> str:
        """``host:port`` as gRPC takes it, IPv6 in brackets; a domain alone."""
        if self.is_srv:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine's loopback: 127.0.0.0/8, ::1, localhost. Names are not resolved."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            name = self.host.rstrip(".").lower()
            return not self.is_srv and (name == "localhost" or name.endswith(".localhost"))
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    def url(self, secure: bool) -> str:
        """As `parse_endpoints` takes it."""
        return f"{'https' if secure else 'http'}{'+srv' if self.is_srv else ''}://{self.target}"

    def __str__(self) -> str:
        return f"{SRV}{self.host}" if self.is_srv else self.target


def parse_host(host: str) -> str | None:
    """A DNS name (ASCII) or IP address in its canonical spelling; None when it is neither, or has an IPv6 zone."""
    if "%" in host:
        return None
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        last_label = host.rstrip(".").rpartition(".")[2]
        if last_label.isdigit() or len(host) > 253 or not _DNS_NAME.fullmatch(host):
            return None  # no domain ends in digits only: this is a mistyped IPv4 address, or a port
        return host.lower()


def parse_endpoints(name: str, value: str) -> tuple[tuple[Endpoint, ...], bool | None]:
    """The endpoints in the order given, each once; and whether their schemes ask for TLS (None: neither for nor against
    it). `name` is the setting's. Raises ConfigError."""
    if "@" in value:  # looked for in the whole list: a password may hold the comma that separates endpoints
        login = "user and FTCOORD_PASSWORD or FTCOORD_PASSWORD_FILE"
        raise ConfigError(name, redacted(value), f"no user or password in an endpoint; give them as {login}")
    parsed = [_parse(name, item.strip()) for item in value.split(",")]
    endpoints = tuple(dict.fromkeys(endpoint for endpoint, _ in parsed))
    if len(endpoints) > 1 and any(endpoint.is_srv for endpoint in endpoints):
        raise ConfigError(name, redacted(value), "srv:// stands for all members: give it alone")
    wanted = {secure for _, secure in parsed} - {None}
    if len(wanted) > 1:
        raise ConfigError(name, redacted(value), "http:// and https:// cannot be mixed; use one for all endpoints")
    return endpoints, wanted.pop() if wanted else None


def _parse(name: str, item: str) -> tuple[Endpoint, bool | None]:
    def refused(why: str) -> ConfigError:
        return ConfigError(name, redacted(_without_odd_port(item)), f"{why}; expected {ENDPOINT_FORM}")

    url = _URL.fullmatch(item)
    if not item or url is None:
        raise refused("an endpoint is empty")
    if re.search(r"[\s;|]", item):
        raise refused("endpoints are separated by commas")
    if item[0] in "\"'":
        raise refused("it has quotes, which no shell has removed: leave them out")
    scheme = url["scheme"] and url["scheme"].lower()
    if scheme not in _SECURE:
        raise refused("the scheme is none of http, https and srv")
    if url["rest"] and (url["rest"] != "/" or scheme is None):
        raise refused("an endpoint has no path and no query")
    if item.lower() == EMBEDDED:
        raise refused("'embedded' starts an etcd, and only as the whole of torchrun's --rdzv-endpoint")
    address = _ADDRESS.fullmatch(url["address"])
    host = parse_host(address["v6"] or address["name"] or address["bare_v6"] or "") if address else None
    if address is None or host is None:
        raise refused("the host is neither a DNS name nor an IP address")
    if scheme is not None and scheme.endswith("srv"):
        return _domain(host, address["port"], refused), _SECURE[scheme]
    if address["bare_v6"] and parse_host(host.rpartition(":")[0]) and host.rpartition(":")[2].isdigit():
        raise refused(f"its end may be a port: write [{host}]:{DEFAULT_PORT} if all of it is the address")
    return Endpoint(host, _port(address["port"], refused)), _SECURE[scheme]


def _domain(host: str, port: str | None, refused: Callable[[str], ConfigError]) -> Endpoint:
    if port is not None or ":" in host or host.replace(".", "").isdigit():
        raise refused("srv:// takes a domain without a port: its records have the ports")
    if find_spec("dns") is None:
        raise refused("to look up SRV records takes dnspython: pip install 'ftcoord[srv]'")
    return Endpoint(host, is_srv=True)


def _without_odd_port(item: str) -> str:
    """An endpoint as an error may show it: what follows the host may be a password, unless it is a number."""
    scheme, slashes, rest = item.rpartition("://")
    host, colon, port = rest.partition("]:") if rest.startswith("[") else rest.partition(":")
    is_harmless = re.fullmatch("[0-9]{0,5}", port) or re.fullmatch("[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", port)
    return item if is_harmless else f"{scheme}{slashes}{host}{colon}{HIDDEN}"


def _port(port: str | None, refused: Callable[[str], ConfigError]) -> int:
    if port is None:
        return DEFAULT_PORT
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise refused("the port is not a number from 1 to 65535")
    return int(port)
