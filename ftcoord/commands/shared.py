"""What commands share: arguments and flags, each of which has an environment variable too, the etcd they lead to, how
they show reports (tables for people, JSON and YAML for programs), and their exit codes.

It is loaded with each command, so what only some of them need is imported where it is used. Names come from anybody who
may write to etcd. A terminal is shown printable characters only: what could move its cursor, set its title or turn the
writing direction is shown as an escape. JSON and YAML are ASCII.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import socket
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from ftcoord import concurrency
from ftcoord.config import EtcdConfig, choice, exposure, full_text, key_path, seconds, text, variable, whole
from ftcoord.core.layout import KEY_PREFIX
from ftcoord.escaping import neutral

if TYPE_CHECKING:
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.operator.status import Rules

HEALTHY: Final = 0
"""Exit codes; docs/cli.md has them too. This one is also that of a command that has done what it was asked to do."""
NOT_DONE: Final = 1
"""It also means that a job or an etcd is not healthy."""
WRONG_USE: Final = 2
UNREACHABLE: Final = 3
"""etcd cannot be reached, or did not answer what was written."""
INTERRUPTED: Final = 130

FORMATS: Final = ("table", "json", "yaml")
COLOURS: Final = ("auto", "always", "never")
WIDEST: Final = 60
"""Columns of a cell that a table shows; JSON has all of it."""
_LAST_TIME: Final = 1e11
"""Seconds since 1970 that a time of day is made of at most."""

_CODES: Final = {"good": "32", "bad": "31", "busy": "33", "going": "35", "bold": "1"}
_BUSY: Final = "forming seating seated waiting asking called_back spare idle hint"
_BAD: Final = "failed degraded unreadable away refused problem missing died lost expired"
_WORDS: Final = {"good": "running training finished ok", "busy": _BUSY, "bad": _BAD, "going": "draining"}
_MOODS: Final = {word.replace("_", " "): mood for mood, words in _WORDS.items() for word in words.split()}
"""Words that tables show in colours."""

Columns = Mapping[str, "str | Callable[[Any], object]"]
"""What a table shows of each value, by the head of its column: a field, or what is made of the value."""


def columns(spec: str) -> Columns:
    """The columns of fields, as `RANK=rank HOST=host`."""
    return dict(one.split("=") for one in spec.split())


SIGNAL_INTERVAL: Final = 1.0
"""Seconds that a wait lasts at most. Python runs signal handlers between waits; one may come just before a wait."""


# -- flags ------------------------------------------------------------------------------------------------------------


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
        choices: the allowed values, in place of a parser; empty if any value may be given.
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
    Flag("--output FORMAT", "FTCOORD_OUTPUT", "the output format", default="table", choices=FORMATS, short="-o"),
    Flag("--color WHEN", "FTCOORD_COLOR", "whether to use colours", default="auto", choices=COLOURS),
)
_ON_LOSS, _LOSS = ("restart", "ignore"), "on_member_loss of the run's rdzv_conf"
RULE_FLAGS: Final = (
    Flag("--min-replicas N", "FTCOORD_MIN_REPLICAS", "the least min_replicas to assume", whole(1, 2**31 - 1), 1),
    Flag("--on-member-loss WHAT", "FTCOORD_ON_MEMBER_LOSS", _LOSS, default="restart", choices=_ON_LOSS),
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
        name, value = (flag.name, given) if given is not None else (flag.variable, variable(variables, flag.variable))
        parse = choice(*flag.choices) if flag.choices else flag.parse
        setattr(options, flag.dest, parse(name, value) if given is not None or value else flag.default)


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
    from ftcoord.operator.status import Rules

    usual = Rules()
    rounds = replace(usual.rounds, recall_on_loss=options.on_member_loss == "restart")
    return Rules(rounds, replace(usual.quorum, min_replicas=options.min_replicas))


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


def until_interrupted() -> Callable[..., int]:
    """From now on SIGTERM and Ctrl-C only end the wait of what is returned, which returns the exit code. It also ends
    when the given function returns true; then it prints the given problem."""
    ended = concurrency.event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def wait(problem: str = "", has_failed: Callable[[], bool] = lambda: False) -> int:
        while not ended.wait(SIGNAL_INTERVAL):
            if has_failed():
                print(f"ftcoord: {problem}; start it again", file=sys.stderr)
                return NOT_DONE
        return HEALTHY

    return wait


# -- output -----------------------------------------------------------------------------------------------------------


class Terminal:
    """Where a command prints.

    Args:
        format: one of FORMATS.
        colours: one of COLOURS; `auto` is for terminals only, and heeds NO_COLOR.
        out: where to.
    """

    def __init__(self, format: str = "table", colours: str = "auto", out: TextIO | None = None) -> None:
        self.format, self._out = format, out or sys.stdout
        wanted = self._out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.has_colours = colours == "always" or (colours == "auto" and wanted)
        self.is_live = format == "table" and self._out.isatty()
        """Whether what was shown may be replaced."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Terminal:
        """Where the flags say that a command prints."""
        return cls(options.output, options.color)

    def show(self, report: Any, lines: Iterable[str], is_well: bool = True) -> int:
        """Show a report: as the user asked, or as these lines. Returns the command's exit code."""
        if self.format == "table":
            self.write("".join(f"{line}\n" for line in lines))
        else:
            self.write(to_json(report) if self.format == "json" else to_yaml(report))
        return HEALTHY if is_well else NOT_DONE

    def write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def colour(self, text: str, mood: str) -> str:
        """A text in the colour for `mood`, which must be neutral already."""
        return f"\x1b[{_CODES[mood]}m{text}\x1b[0m" if self.has_colours else text

    def word(self, word: str) -> str:
        """A word of ours, in the colour that it has in all tables."""
        mood = _MOODS.get(word.strip())
        return self.colour(word, mood) if mood else word

    def table(self, what: str | Columns, values: Sequence[Any], widest: int | None = WIDEST) -> Iterator[str]:
        """The lines of a table with a row for each value, with cells cut to the `widest`. None is shown as a dash;
        whole numbers stand at the right."""
        heads = columns(what) if isinstance(what, str) else what
        padded = [_column(head, of, values, widest) for head, of in heads.items()]
        yield self.colour("  ".join(column[0] for column in padded).rstrip(), "bold")
        for row in zip(*(column[1:] for column in padded), strict=True):
            yield "  ".join(map(self.word, row)).rstrip()


def _column(head: str, of: str | Callable[[Any], object], values: Sequence[Any], widest: int | None) -> list[str]:
    """The head of a column and its cells, all of one width."""
    found = [value[of] if isinstance(of, str) else of(value) for value in values]
    texts = [head, *(_cell(value, widest) for value in found)]
    width = max(map(_width, texts))
    is_right = bool(found) and all(value is None or type(value) is int for value in found)
    spaces = [" " * (width - _width(text)) for text in texts]
    return [f"{space}{text}" if is_right else f"{text}{space}" for space, text in zip(spaces, texts, strict=True)]


def _cell(value: object, widest: int | None) -> str:
    text = "-" if value is None or value == "" else neutral(str(value))
    return text if widest is None or len(text) <= widest else f"{text[: widest - 3]}..."


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def clock(at: float, form: str = "%H:%M:%S") -> str:
    """A time, in seconds since 1970, on this host's clock; empty for what no clock of a host shows: it may be
    anybody's."""
    return datetime.fromtimestamp(at).strftime(form) if 0 < at < _LAST_TIME else ""


def to_json(report: Any) -> str:
    """One document, with a line end."""
    return json.dumps(report, default=asdict, indent=2) + "\n"


def to_line(report: Any, format: str) -> str:
    """One of several documents: JSON on a line of its own, or YAML with a mark before it."""
    if format == "json":
        return json.dumps(report, default=asdict, separators=(",", ":")) + "\n"
    return f"---\n{to_yaml(report)}"


def to_yaml(report: Any) -> str:
    """One document of YAML 1.2 in block style. Its scalars are JSON's, so nothing in it is taken for something else."""
    return "\n".join(_yaml(json.loads(json.dumps(report, default=asdict)))) + "\n"


def _yaml(value: Any) -> list[str]:
    """The lines of a JSON value, from the first column on."""
    if isinstance(value, list) and value:
        marks = (("- ", one) if not at else ("  ", one) for item in value for at, one in enumerate(_yaml(item)))
        return [f"{mark}{line}" for mark, line in marks]
    if not isinstance(value, dict) or not value:
        return [json.dumps(value)]
    lines = []
    for name, inner in value.items():
        below = _yaml(inner)
        nested = isinstance(inner, (dict, list)) and inner
        lines += [f"{name}:", *(f"  {line}" for line in below)] if nested else [f"{name}: {below[0]}"]
    return lines
