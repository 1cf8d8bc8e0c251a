"""The `ftcoord` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, TextIO

from ftcoord import __version__
from ftcoord.commands import completion
from ftcoord.commands.codes import HEALTHY, INTERRUPTED, NOT_DONE, UNREACHABLE, WRONG_USE
from ftcoord.commands.flags import resolve
from ftcoord.errors import NO_ETCD, ConfigError, EtcdUnavailable, FtcoordError, OutcomeUnknown

FAMILIES: Final = {
    "listing": ("ls",),
    "looking": ("status",),
    "watching": ("watch",),
    "explaining": ("history", "why"),
    "doctor": ("doctor",),
    "acting": ("evict", "drain", "close", "kill"),
    "paging": ("dashboard",),
    "serving": ("demo", "server", "gateway", "metrics"),
}
"""The modules of `ftcoord.commands`, and the commands of each. Only the given command's module is loaded: loading all
would take longer than most commands do."""

EXIT_CODES: Final = (
    f"Exit codes: {HEALTHY} done or healthy; {NOT_DONE} failed, not done or not healthy; {WRONG_USE} wrong usage;"
    f" {UNREACHABLE} etcd cannot be reached, or did not answer a write; {INTERRUPTED} interrupted."
    " `ftcoord COMMAND --help` describes a command."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    _replace_what_lacks(sys.stdout, sys.stderr)
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        _parser().print_help()
        return HEALTHY
    options = _parser(given[0]).parse_args(given)
    try:
        resolve(options)
        return int(options.run(options))
    except ConfigError as error:
        return _complain(error, WRONG_USE)
    except (EtcdUnavailable, OutcomeUnknown) as error:
        code = _complain(error, UNREACHABLE)
        if not str(error).startswith(NO_ETCD):
            print("ftcoord: is etcd there? --endpoints or FTCOORD_ENDPOINTS says where it is", file=sys.stderr)
        return code
    except FtcoordError as error:
        return _complain(error, NOT_DONE)
    except BrokenPipeError:  # whoever read it has heard enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_DONE
    except KeyboardInterrupt:
        print("ftcoord: interrupted; everything it started has ended", file=sys.stderr)
        return INTERRUPTED


def _replace_what_lacks(*streams: TextIO) -> None:
    """Have these streams write an escape for each character that their encoding lacks, as that of an ASCII terminal
    does, and not raise."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(error: FtcoordError, code: int) -> int:
    print(f"ftcoord: {error}", file=sys.stderr)
    return code


def _parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of this command, or of all if there is none of that name."""
    parser = argparse.ArgumentParser(
        prog="ftcoord", description="Fault-tolerant PyTorch coordination on etcd.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"ftcoord {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in [name for name, has in FAMILIES.items() if command in has] or FAMILIES:
        import_module(f"ftcoord.commands.{family}").add_commands(commands)
    completion.add_commands(commands, _parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
