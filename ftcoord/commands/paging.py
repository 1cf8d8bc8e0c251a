"""`ftcoord dashboard`: serves the dashboard until it is interrupted."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from ftcoord import __version__
from ftcoord.commands.acting import who
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, Flag, add, etcd_config
from ftcoord.commands.jobs import RULE_FLAGS, rules_of
from ftcoord.config import EtcdConfig, exposure, listen_address, text
from ftcoord.errors import ConfigError, FtcoordError
from ftcoord.escaping import HIDDEN
from ftcoord.files import secret
from ftcoord.metrics.exporter import host_names

HOST_NAMES_FLAG: Final = Flag(
    "--host-names",
    "FTCOORD_DASHBOARD_HOST_NAMES",
    "host names accepted in the Host header, such as n1,n2",
    text,
    "",
    "LIST",
)
PAGE_FLAGS: Final = (
    Flag("--listen", "FTCOORD_DASHBOARD_LISTEN", "the address to serve on", text, "127.0.0.1:29512", "ADDRESS"),
    HOST_NAMES_FLAG,
)
TOKEN, TOKEN_FILE = "FTCOORD_DASHBOARD_TOKEN", "FTCOORD_DASHBOARD_TOKEN_FILE"
"""Environment variables, not flags: `ps` shows command lines to everybody."""
SHORTEST_TOKEN: Final = 16
"""Characters."""
PACKAGES: Final = {"anyio", "starlette", "uvicorn"}
"""What the extra brings."""


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    dashboard = commands.add_parser(
        "dashboard",
        help="serve a web page that shows all jobs, live, until Ctrl-C",
        description="Serve a web page that shows all jobs, live, until Ctrl-C. The page is read-only unless"
        " FTCOORD_DASHBOARD_TOKEN or FTCOORD_DASHBOARD_TOKEN_FILE gives a token. Needs the extra `dashboard`.",
    )
    add(dashboard, (*ETCD_FLAGS, KEYS_FLAG, *RULE_FLAGS, *PAGE_FLAGS))
    dashboard.set_defaults(run=_dashboard)


def _dashboard(options: argparse.Namespace) -> int:
    config, rules, listen = etcd_config(options), rules_of(options), listen_address("--listen", options.listen)
    names, token = host_names_of(options), token_of(os.environ)
    serving = page_serving()
    warn_of(listen[0], "can read the page: it has no login")
    about = about_page(config, options.key_prefix)
    page = serving.Page(config, options.key_prefix, rules, listen, about, names, who(), token)
    serving.serve(page, _ready)
    return 0


def page_serving() -> ModuleType:
    """`ftcoord.dashboard.server`. Raises FtcoordError without the extra that it needs."""
    try:
        from ftcoord.dashboard import server
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        raise FtcoordError(f"the page needs {package}: pip install starlette uvicorn") from None
    return server


def about_page(config: EtcdConfig, key_prefix: str) -> dict[str, Any]:
    """What a page says of itself."""
    return {
        "version": __version__,
        "host": socket.gethostname(),
        "key_prefix": key_prefix,
        "endpoints": [str(endpoint) for endpoint in config.endpoints],
    }


def host_names_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The names by which browsers may call the page."""
    return host_names(options.host_names)


def warn_of(host: str, what: str) -> None:
    """Print what whoever reaches an address can do, unless that is this machine's own."""
    if warning := exposure(host, what):
        print(f"ftcoord: {warning}", file=sys.stderr)


def token_of(env: Mapping[str, str]) -> str:
    """What lets the page act; empty for a page that is read-only. Raises ConfigError."""
    token, path = env.get(TOKEN, "").strip(), env.get(TOKEN_FILE, "").strip()
    if token and path:
        raise ConfigError(TOKEN, HIDDEN, f"{TOKEN_FILE} is set too; unset one of them")
    if not path:
        return _checked(TOKEN, token)
    found = secret(TOKEN_FILE, path).strip()
    if not found:
        raise ConfigError(TOKEN_FILE, path, "the file must hold the token")
    return _checked(TOKEN_FILE, found)


def _ready(address: str) -> None:
    print(f"the page is at {address}; Ctrl-C ends it", flush=True)


def _checked(name: str, token: str) -> str:
    """A token that is worth its name; empty for none. Raises ConfigError."""
    if token and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        allowed = f"give {SHORTEST_TOKEN} or more printable ASCII characters without spaces"
        raise ConfigError(name, HIDDEN, allowed)
    return token
