"""Flags of commands. Each has an environment variable too, which is used when the flag is omitted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ftcoord.commands.output import COLOURS, FORMATS
from ftcoord.config import EtcdConfig, choice, key_path, seconds, switch, text, variable
from ftcoord.core.layout import KEY_PREFIX

Parse = Callable[[str, object], Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: as `--name`.
        variable: its environment variable.
        help: what it is, without the variable and the default, which `add` appends.
        parse: from its name, or the variable's, and the text; raises ConfigError.
        default: used when neither is given; not parsed.
        metavar: the placeholder for its value in the help; empty for a flag without a value.
        choices: the allowed values, for shell completion; empty if any value may be given.
        short: another name, as `-n`.
    """

    name: str
    variable: str
    help: str
    parse: Parse = text
    default: object = None
    metavar: str = ""
    choices: Sequence[str] = ()
    short: str = ""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


ETCD_FLAGS: Final = (
    Flag(
        "--endpoints",
        "FTCOORD_ENDPOINTS",
        "etcd's endpoints, such as h1:2379,h2:2379 or srv://domain",
        text,
        "127.0.0.1:2379",
        "LIST",
    ),
    Flag("--ca-cert", "FTCOORD_CA_CERT", "the CA that signed etcd's certificate", metavar="FILE"),
    Flag("--cert", "FTCOORD_CERT", "the client's certificate", metavar="FILE"),
    Flag("--key", "FTCOORD_KEY", "the client's private key", metavar="FILE"),
    Flag("--server-name", "FTCOORD_SERVER_NAME", "the host name to expect in etcd's certificate", metavar="NAME"),
    Flag("--user", "FTCOORD_USER", "the etcd user; its password is read from FTCOORD_PASSWORD", metavar="NAME"),
    Flag("--request-timeout", "FTCOORD_REQUEST_TIMEOUT", "timeout of a call to etcd", seconds, 5, "SECONDS"),
)
"""The flags that `EtcdConfig.load` takes. It reads their variables, and then etcdctl's, and applies the defaults: those
here are only for the help."""
KEYS_FLAG: Final = Flag("--key-prefix", "FTCOORD_KEY_PREFIX", "the prefix of all keys", key_path, KEY_PREFIX, "PATH")
OUTPUT_FLAGS: Final = (
    Flag("--output", "FTCOORD_OUTPUT", "the output format", choice(*FORMATS), "table", "FORMAT", FORMATS, "-o"),
    Flag("--color", "FTCOORD_COLOR", "whether to use colours", choice(*COLOURS), "auto", "WHEN", COLOURS),
)
YES_FLAG: Final = Flag("--yes", "FTCOORD_YES", "do not ask for confirmation", switch, 0, short="-y")


def add(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> None:
    """Give a command these flags."""
    for flag in flags:
        names = [name for name in (flag.short, flag.name) if name]
        default = "" if flag.default in (None, 0, "") or not flag.metavar else f"; default: {flag.default}"
        shown = f"{flag.help} [{flag.variable}{default}]"
        if flag.metavar:
            parser.add_argument(*names, metavar=flag.metavar, choices=flag.choices or None, help=shown)
        else:
            parser.add_argument(*names, action="store_const", const="1", help=shown)
    parser.set_defaults(flags=(*(parser.get_default("flags") or ()), *flags))


def resolve(options: argparse.Namespace, env: Mapping[str, str] | None = None) -> None:
    """Give each flag its value: the given one, else its variable's, else the default. Raises ConfigError."""
    variables = os.environ if env is None else env
    for flag in options.flags:
        given = getattr(options, flag.dest)
        if flag in ETCD_FLAGS:
            continue
        if given is not None:
            setattr(options, flag.dest, flag.parse(flag.name, given))
        elif variable(variables, flag.variable):
            setattr(options, flag.dest, flag.parse(flag.variable, variables[flag.variable]))
        else:
            setattr(options, flag.dest, flag.default)


def etcd_config(options: argparse.Namespace) -> EtcdConfig:
    """How to reach the etcd that the flags, and the variables, name. Raises ConfigError."""
    given = {flag.dest: getattr(options, flag.dest) for flag in ETCD_FLAGS}
    return EtcdConfig.load(**given, names={flag.dest: flag.name for flag in ETCD_FLAGS})
