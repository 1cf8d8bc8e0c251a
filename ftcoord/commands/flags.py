"""What commands share: arguments and flags, each of which has an environment variable too, and the etcd they lead to.

It is loaded with each command, so what only some of them need is imported where it is used.
"""

from __future__ import annotations

import argparse
import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.commands.output import COLOURS, FORMATS
from ftcoord.config import EtcdConfig, choice, exposure, full_text, key_path, seconds, text, variable, whole
from ftcoord.core.layout import KEY_PREFIX

if TYPE_CHECKING:
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.operator.status import Rules

SIGNAL_INTERVAL: Final = 1.0
"""Seconds that a wait lasts at most. Python runs signal handlers between waits; one may come just before a wait."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command, or an argument by position.

    Args:
        spec: as `--name VALUE`, with the placeholder for its value in the help, or `--name` for a flag without a value;
            without dashes the name of an argument.
        variable: its environment variable, which is used when the flag is omitted; empty for an argument.
        help: what it is, without the variable and the default, which `add_command` appends.
        parse: from its name, or the variable's, and the text; raises ConfigError.
        default: used when neither is given; not parsed.
        choices: the allowed values, for shell completion; empty if any value may be given.
        short: another name, as `-n`.
    """

    spec: str
    variable: str
    help: str
    parse: Callable[[str, object], Any] = text
    default: object = None
    choices: Sequence[str] = ()
    short: str = ""

    @property
    def name(self) -> str:
        return self.spec.partition(" ")[0]

    @property
    def metavar(self) -> str:
        return self.spec.partition(" ")[2]

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_").lower()


_ENDPOINTS: Final = "etcd's endpoints, such as h1:2379,h2:2379 or srv://domain"
ETCD_FLAGS: Final = (
    Flag("--endpoints LIST", "FTCOORD_ENDPOINTS", _ENDPOINTS, default="127.0.0.1:2379"),
    Flag("--ca-cert FILE", "FTCOORD_CA_CERT", "the CA that signed etcd's certificate"),
    Flag("--cert FILE", "FTCOORD_CERT", "the client's certificate"),
    Flag("--key FILE", "FTCOORD_KEY", "the client's private key"),
    Flag("--server-name NAME", "FTCOORD_SERVER_NAME", "the host name to expect in etcd's certificate"),
    Flag("--user NAME", "FTCOORD_USER", "the etcd user; its password is read from FTCOORD_PASSWORD"),
    Flag("--request-timeout SECONDS", "FTCOORD_REQUEST_TIMEOUT", "timeout of a call to etcd", seconds, 5),
)
"""The flags that `EtcdConfig.load` takes. It reads their variables, and then etcdctl's, and applies the defaults: those
here are only for the help."""
ETCD_KEYS: Final = (
    *ETCD_FLAGS,
    Flag("--key-prefix PATH", "FTCOORD_KEY_PREFIX", "the prefix of all keys", key_path, KEY_PREFIX),
)
OUTPUT_FLAGS: Final = (
    Flag(
        "--output FORMAT", "FTCOORD_OUTPUT", "the output format", choice(*FORMATS), "table", choices=FORMATS, short="-o"
    ),
    Flag("--color WHEN", "FTCOORD_COLOR", "whether to use colours", choice(*COLOURS), "auto", choices=COLOURS),
)
_ON_LOSS, _LOSS = ("restart", "ignore"), "on_member_loss of the run's rdzv_conf"
RULE_FLAGS: Final = (
    Flag("--min-replicas N", "FTCOORD_MIN_REPLICAS", "the least min_replicas to assume", whole(1, 2**31 - 1), 1),
    Flag("--on-member-loss WHAT", "FTCOORD_ON_MEMBER_LOSS", _LOSS, choice(*_ON_LOSS), "restart", choices=_ON_LOSS),
)
"""Settings of a job that the next decision depends on and that etcd may not have."""
JOB: Final = Flag("JOB", "", "the job's id: torchrun's --rdzv-id, or the last part of a job's address", full_text)


def add_command(commands: Any, run: Callable[[argparse.Namespace], int], *flags: Flag) -> None:
    """Add a command of the name of `run`, which carries it out and returns its exit code. The docstring of `run` is its
    help: the first line for the list of commands, and the rest.

    `commands` is what `ArgumentParser.add_subparsers` returns.
    """
    first, _, rest = (run.__doc__ or "").partition("\n")
    parser = commands.add_parser(run.__name__, help=first.rstrip("."), description=" ".join(f"{first} {rest}".split()))
    for flag in flags:
        default = "" if flag.default in (None, 0, "") or not flag.metavar else f"; default: {flag.default}"
        shown = f"{flag.help} [{flag.variable}{default}]"
        names = [name for name in (flag.short, flag.name) if name]
        if not flag.variable:
            parser.add_argument(flag.dest, metavar=flag.name, choices=flag.choices or None, help=flag.help)
        elif flag.metavar:
            parser.add_argument(*names, metavar=flag.metavar, choices=flag.choices or None, help=shown)
        else:
            parser.add_argument(*names, action="store_const", const="1", help=shown)
    parser.set_defaults(flags=flags, run=run)


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


def client_of(options: argparse.Namespace) -> EtcdClient:
    """A client of that etcd, for one command. Raises ConfigError."""
    from ftcoord.etcd.client import EtcdClient

    return EtcdClient(etcd_config(options))


def rules_of(options: argparse.Namespace) -> Rules:
    """The settings of a job that the flags give."""
    from ftcoord.core.quorum import QuorumOptions
    from ftcoord.core.round_situation import RoundOptions
    from ftcoord.operator.status import Rules

    defaults, restarts = Rules(), options.on_member_loss == "restart"
    rounds = RoundOptions(recall_on_loss=restarts, return_to_seat=defaults.rounds.return_to_seat)
    return Rules(rounds, QuorumOptions(options.min_replicas, defaults.quorum.join_timeout))


def who() -> str:
    """The user and host that run this command, as others read it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no entry in its passwd; OSError from Python 3.13 on
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def warn_of(host: str, what: str) -> None:
    """Print what anyone who reaches an address can do, unless that is this machine's own."""
    if warning := exposure(host, what):
        print(f"ftcoord: {warning}", file=sys.stderr)


def until_interrupted() -> Callable[[], bool]:
    """From now on SIGTERM and Ctrl-C only end the wait of what is returned: it waits for a second, and returns whether
    there was such a signal."""
    ended = concurrency.event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return lambda: ended.wait(SIGNAL_INTERVAL)
