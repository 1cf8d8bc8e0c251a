"""URLs of jobs: `etcd://h1:2379,h2:2379/job?option=value`, or `etcd+srv://domain/job` for members that DNS names.

Who writes the same job in another way means the same job; what may mean another one is refused. Nothing is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from ftcoord.config import SRV
from ftcoord.errors import ConfigError
from ftcoord.escaping import HIDDEN, redacted

SCHEMES: Final[dict[str, bool | None]] = {"etcd": None, "etcds": True, "etcd+srv": None, "etcds+srv": True}
"""The schemes, and whether they ask for TLS; None: neither for nor against it."""
_BLANK: Final = " \t\r\n\v\f"


class JobUrl(NamedTuple):
    """The parts of a URL. `place` is between the slashes: endpoints, or the domain."""

    scheme: str
    place: str
    name: str
    query: dict[str, str]


def endpoints_of(scheme: str, place: str) -> str:
    """The endpoints as `EtcdConfig.load` takes them; empty for those of the environment."""
    return f"{SRV}{place}" if scheme.endswith("+srv") else place


def parse_job_url(key: str, url: str, form: str) -> JobUrl:
    """The parts of a URL. White space around it, and slashes around the name, mean nothing.

    Args:
        key: the setting, for errors.
        form: what to write, for errors.

    Raises ConfigError.
    """

    text = url.strip(_BLANK)

    def refused(why: str) -> ConfigError:
        return ConfigError(key, _shown(text), why)

    try:
        parts = urlsplit(text)
        name = unquote(parts.path.strip(f"/{_BLANK}"), errors="strict")
    except UnicodeDecodeError:
        raise refused("its name is not UTF-8, percent-encoded") from None
    except ValueError:
        raise refused("write an IPv6 address as [::1]:2379, and names of hosts in ASCII") from None
    if parts.scheme not in SCHEMES:
        raise refused(f"it begins with none of {', '.join(f'{one}://' for one in SCHEMES)}; {form}")
    # torch writes etcd:/name for etcd:///name
    if not parts.netloc and not re.fullmatch(r"/+[^/]*/*", parts.path):
        raise refused(f"the host stands after '//', and a / in the name is written as %2F; {form}")
    if parts.fragment:
        raise refused("write a # in the name as %23")
    if "=" in parts.path:
        raise refused(f"a '?' is missing before its options, or a = in the name is to be written as %3D; {form}")
    return JobUrl(parts.scheme, parts.netloc, name, _query(refused, parts.query))


def _shown(text: str) -> object:
    """A URL as an error may show it: what follows a = may be a password, and so may what follows a colon alone."""
    head, equals, _ = text.partition("=")
    scheme, colon, rest = head.partition(":")
    if colon and not rest.startswith("//"):
        return f"{scheme}:{HIDDEN}"
    return redacted(f"{head}={HIDDEN}" if equals else head)


def _query(refused: Callable[[str], ConfigError], text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise refused("write its query as key=value&key=value") from None
    given = dict(pairs)
    for key, value in pairs:
        if value != given[key]:
            raise ConfigError(key, HIDDEN, "it is given twice; give it once")
    return given
