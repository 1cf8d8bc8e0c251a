"""Where etcd is and how to log in to it, from arguments, ``FTCOORD_*`` and ``ETCDCTL_*`` variables.

Everything is checked here, before any socket is opened. Bad input raises `ConfigError`, which names the argument or
variable that it came from. Files are opened to check that they can be read; names are not resolved. Secrets (passwords,
``user:password@`` in a URL, a key pasted instead of a path) never appear in a repr, a str or an error.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from ftcoord import files
from ftcoord.errors import ConfigError
from ftcoord.escaping import HIDDEN, redacted

log = logging.getLogger(__name__)

MAX_SECONDS = 1e9  # about 31 years; larger numbers overflow the interpreter's own waits

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_DISCOVERY = "ETCDCTL_DISCOVERY_SRV"

# Setting -> the variables that may hold it, the first that is set wins. An empty variable counts as unset.
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "endpoints": ("FTCOORD_ENDPOINTS", _DISCOVERY, "ETCDCTL_ENDPOINTS"),  # etcdctl prefers that, too
    "ca_cert": ("FTCOORD_CA_CERT", "ETCDCTL_CACERT"),
    "cert": ("FTCOORD_CERT", "ETCDCTL_CERT"),
    "key": ("FTCOORD_KEY", "ETCDCTL_KEY"),
    "server_name": ("FTCOORD_SERVER_NAME",),
    "user": ("FTCOORD_USER", "ETCDCTL_USER"),
    "password": ("FTCOORD_PASSWORD", "FTCOORD_PASSWORD_FILE", "ETCDCTL_PASSWORD"),
    "request_timeout": ("FTCOORD_REQUEST_TIMEOUT",),
}

_SERVICE_LINK = re.compile(r"(?:tcp|udp|sctp)://[^/]+:[0-9]+")
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

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


def without_etcd(env: Mapping[str, str]) -> dict[str, str]:
    """These variables, but for those that name an etcd or a login to it."""
    names = {name for variables in _VARIABLES.values() for name in variables}
    return {name: value for name, value in env.items() if name not in names}


def variable(env: Mapping[str, str], name: str) -> str:
    """A variable's value without surrounding white space, empty if it is not set, or not by a person.

    Kubernetes gives each pod a variable `<SERVICE>_PORT` for each Service: for one named ftcoord-metrics, it has the
    name of a setting of ours.
    """
    value = env.get(name, "").strip()
    if name.endswith("_PORT") and _SERVICE_LINK.fullmatch(value):
        log.warning(
            "%s=%s is ignored: Kubernetes set it for a Service of that name; rename the Service, or set"
            " enableServiceLinks: false for the pod",
            name,
            value,
        )
        return ""
    return value


def key_path(key: str, value: object) -> str:
    """A parser for key prefixes, without a slash at the end. Raises ConfigError."""
    prefix = value.strip().rstrip("/") if isinstance(value, str) else ""
    if not re.fullmatch(r"(/[^/]+)+", prefix) or not prefix.isprintable():
        raise ConfigError(key, redacted(value), "give a path such as /ftcoord/v2: printable, '/' first, no empty part")
    return prefix


def full_text(key: str, value: object, allowed: str = "give a text that is not empty") -> str:
    """A parser for ids and names, which are taken as they are, including white space. Raises ConfigError."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(key, redacted(value), allowed)
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text in this locale
        raise ConfigError(key, redacted(value), "it is not UTF-8; in a locale without it set PYTHONUTF8=1") from None
    return value


def text(key: str, value: object) -> str:
    """`value` (a str or a path) without surrounding white space; ConfigError when nothing is left."""
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(plain, str) and plain.strip():
        return plain.strip()
    raise ConfigError(key, redacted(value), "give a text that is not empty, or leave it out")


def seconds(key: str, value: object) -> float:
    """A finite number of seconds greater than 0, as a number or as text. Raises ConfigError."""
    number = _number(value)
    if number is None or not 0 < number <= MAX_SECONDS:
        raise ConfigError(key, redacted(value), "give seconds as a number greater than 0, such as 30 or 0.5")
    return float(number)


def choice(*names: str) -> Callable[[str, object], str]:
    """A parser for one of these words, in any case."""

    def parse(key: str, value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in names:
            raise ConfigError(key, redacted(value), f"choose {' or '.join(names)}")
        return word

    return parse


def switch(key: str, value: object) -> bool:
    """A parser for what is on or off: 1 or 0, and words for them in any case. Raises ConfigError."""
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word not in (*ON, *OFF):
        raise ConfigError(key, redacted(value), f"choose {' or '.join((*ON, *OFF))}")
    return word in ON


def whole(low: int, high: int, why: str = "") -> Callable[[str, object], int]:
    """A parser for whole numbers from `low` to `high`, as numbers or as text; `why` goes into its error."""

    def parse(key: str, value: object) -> int:
        number = _number(value)
        if number is None or not low <= number <= high or number != int(number):
            raise ConfigError(key, redacted(value), f"give a whole number from {low} to {high}{why}")
        return int(number)

    return parse


lease_seconds = whole(1, 86_400, " (seconds); etcd on default settings grants 2 s at the least")
"""A parser for a lease TTL given by a user."""


def _number(value: object) -> int | float | None:
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value.strip()) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def listen_address(key: str, value: object) -> tuple[str, int]:
    """Where to listen; port 0 takes a free one. Raises ConfigError."""
    host, _, port = text(key, value).rpartition(":")
    name, _, _ = (host[1:-1] if host.startswith("[") and host.endswith("]") else host).partition("%")
    if parse_host(name) is None or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(key, redacted(value), "write it as 127.0.0.1:29510 or [::]:29510")
    return host, int(port)


def exposure(host: str, what: str) -> str:
    """The warning for an address to listen on: what whoever reaches it can do. Empty for this machine's own."""
    return "" if Endpoint(host.strip("[]")).is_loopback else f"whoever reaches {host} {what}"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS by PEM files, given as paths. `ca` None: the authorities that the system trusts. `cert` and `key` come
    together or not at all.

    `server_name` is the name the server's certificate must carry, when it differs from the endpoint's host.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def name_at(self, host: str) -> str:
        """The name that the certificate of a server at this host must carry: none has the dot that ends a DNS name."""
        return (self.server_name or host).rstrip(".")


@dataclass(frozen=True, slots=True)
class Credentials:
    """An etcd user; the password is kept out of the repr."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How to reach one etcd cluster. `load` makes one from arguments and the environment.

    Args:
        endpoints: the members to connect to.
        tls: the TLS settings; None for plaintext.
        credentials: the login; None for none.
        request_timeout: seconds that one call may take by default.
    """

    endpoints: tuple[Endpoint, ...]
    tls: Tls | None = None
    credentials: Credentials | None = None
    request_timeout: float = 5.0

    @classmethod
    def load(
        cls,
        endpoints: str | Sequence[str] | None = None,
        *,
        ca_cert: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        server_name: str | None = None,
        user: str | None = None,
        password: str | None = None,
        request_timeout: float | str | None = None,
        secure: bool | None = None,
        env: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> EtcdConfig:
        """Read each setting separately: from the argument, else ``FTCOORD_*``, else ``ETCDCTL_*``, else the default.

        Args:
            endpoints: a comma-separated list or a sequence of ``host``, ``host:port`` or ``http(s)://host:port``; or
                ``srv://domain``, also as ``http(s)+srv://``, for the members that DNS names. The default port is 2379,
                the default endpoint 127.0.0.1:2379. Empty text counts as not given.
            ca_cert: the path of a PEM file with CA certificates; by default those that the system trusts.
            cert: the path of the client certificate, a PEM file; goes with `key`.
            key: the path of its private key, a PEM file.
            server_name: the name in the server's certificate, if it differs from the endpoint's host.
            user: an etcd user; goes with `password`.
            password: its password, not empty.
            request_timeout: seconds that one call may take by default; 5 if not given.
            secure: True for TLS, False for plaintext. None follows the endpoints' scheme; endpoints without a scheme
                use TLS if a TLS setting is given.
            env: the variables; None reads ``os.environ``.
            names: the user's names of arguments that differ from the names here; for error messages only.

        Raises:
            ConfigError: a setting is malformed, contradicts another, or names a file that cannot be read.
        """
        names, env = names or {}, os.environ if env is None else env
        arguments = {**locals(), "endpoints": _joined(endpoints, names)}
        given = {
            one: Given(names.get(one, one), arguments[one])
            if arguments[one] is not None
            else next((Given(name, env[name]) for name in variables if env.get(name, "").strip()), None)
            for one, variables in _VARIABLES.items()
        }
        addresses, by_scheme = _endpoints(given["endpoints"], env)
        if secure is not None and by_scheme is not None and secure != by_scheme:
            protocol = names.get("secure", "secure")
            allowed = f"the endpoints say {_scheme(by_scheme)}://; leave {protocol} out or change them"
            raise ConfigError(protocol, _scheme(secure), allowed)
        timeout = given["request_timeout"]
        return cls(
            endpoints=addresses,
            tls=_tls(given, by_scheme if secure is None else secure),
            credentials=_credentials(given, env),
            request_timeout=seconds(timeout.name, timeout.value) if timeout else 5.0,
        )

    @classmethod
    def of(cls, etcd: EtcdConfig | str | Sequence[str] | None) -> EtcdConfig:
        """The configuration that a user's argument means: an EtcdConfig, endpoints, or None for the environment's.

        Raises:
            ConfigError: as `load`.
        """
        return etcd if isinstance(etcd, EtcdConfig) else cls.load(etcd)

    def describe(self) -> str:
        """The endpoints as URLs, for messages to people; no secrets, no user."""
        return ", ".join(endpoint.url(self.tls is not None) for endpoint in self.endpoints)

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True, slots=True)
class Given:
    """A setting's raw value and the argument or variable it came from."""

    name: str
    value: Any = field(repr=False)

    @property
    def text(self) -> str:
        return text(self.name, self.value)


def _scheme(secure: bool) -> str:
    return "https" if secure else "http"


def _joined(endpoints: object, names: Mapping[str, str]) -> str | None:
    if endpoints is None or isinstance(endpoints, str):
        return endpoints if endpoints and endpoints.strip() else None
    if isinstance(endpoints, Sequence) and endpoints and all(isinstance(item, str) for item in endpoints):
        return ",".join(endpoints)
    raise ConfigError(names.get("endpoints", "endpoints"), redacted(endpoints), ENDPOINT_FORM)


def _endpoints(given: Given | None, env: Mapping[str, str]) -> tuple[tuple[Endpoint, ...], bool | None]:
    if given is None:
        return (Endpoint("127.0.0.1"),), None
    if given.name != _DISCOVERY:
        return parse_endpoints(given.name, str(given.value))
    if env.get(f"{_DISCOVERY}_NAME", "").strip():
        allowed = "services with a name are not looked up: unset it, or list the members in FTCOORD_ENDPOINTS"
        raise ConfigError(f"{_DISCOVERY}_NAME", redacted(env[f"{_DISCOVERY}_NAME"]), allowed)
    return parse_endpoints(given.name, f"{SRV}{given.text}")


def _tls(given: Mapping[str, Given | None], secure: bool | None) -> Tls | None:
    ca_cert, cert, key, server_name = (given[setting] for setting in ("ca_cert", "cert", "key", "server_name"))
    wanted = [one for one in (ca_cert, cert, key, server_name) if one]
    if not (wanted if secure is None else secure):
        if wanted:
            allowed = "TLS settings need TLS, but http is asked for; use https:// endpoints, or leave this setting out"
            raise ConfigError(wanted[0].name, redacted(wanted[0].value), allowed)
        return None
    for alone, other, missing in ((cert, key, "key (FTCOORD_KEY)"), (key, cert, "cert (FTCOORD_CERT)")):
        if alone and not other:
            allowed = f"a certificate and its key go together; give {missing}"
            raise ConfigError(alone.name, redacted(alone.value), allowed)
    tls = Tls(
        ca=_pem_file(ca_cert, files.CERTIFICATE),
        cert=_pem_file(cert, files.CERTIFICATE),
        key=_pem_file(key, files.PRIVATE_KEY),
        server_name=_server_name(server_name),
    )
    if key and tls.cert and tls.key and files.is_anothers(tls.cert, tls.key):
        raise ConfigError(key.name, tls.key, f"it is not the private key of the certificate {tls.cert}")
    return tls


def _pem_file(given: Given | None, kind: str) -> str | None:
    if given is None:
        return None
    path = given.text
    if "-----BEGIN" in path:
        raise ConfigError(given.name, HIDDEN, "give the path of a PEM file, not its contents")
    files.pem(given.name, path, kind)
    return path


def _server_name(given: Given | None) -> str | None:
    host = parse_host(given.text) if given else None
    if given is not None and host is None:
        raise ConfigError(given.name, redacted(given.value), "give the DNS name or IP address in the certificate")
    return host


def _credentials(given: Mapping[str, Given | None], env: Mapping[str, str]) -> Credentials | None:
    user, password = given["user"], given["password"]
    if user is None:
        if password is None:
            return None
        raise ConfigError(password.name, HIDDEN, "a password needs a user; give user or set FTCOORD_USER")
    etcdctl_user, _, etcdctl_password = files.bare(env.get("ETCDCTL_USER", "")).partition(":")
    name = etcdctl_user.strip() if user.name == "ETCDCTL_USER" else user.text
    if ":" in name or not name:
        raise ConfigError(user.name, HIDDEN, "give a user name without ':'; the password goes in FTCOORD_PASSWORD")
    if password is not None:
        return Credentials(name, _password(password, env))
    if etcdctl_password and etcdctl_user.strip() == name:  # never one user's password for another
        return Credentials(name, etcdctl_password)
    allowed = "a user needs a password; set FTCOORD_PASSWORD or FTCOORD_PASSWORD_FILE"
    raise ConfigError(user.name, redacted(name), allowed)


def _password(given: Given, env: Mapping[str, str]) -> str:
    if given.name == "FTCOORD_PASSWORD" and env.get("FTCOORD_PASSWORD_FILE", "").strip():
        raise ConfigError(given.name, HIDDEN, "FTCOORD_PASSWORD_FILE is set too; unset one of them")
    value = given.value
    if given.name == "FTCOORD_PASSWORD_FILE":
        value = files.secret(given.name, given.text)
    value = files.bare(value) if isinstance(value, str) else ""
    if not value:
        raise ConfigError(given.name, HIDDEN, "the password must be a text that is not empty")
    return value
