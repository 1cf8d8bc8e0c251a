"""The `ftcoord` command."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final

from ftcoord import __version__
from ftcoord.commands.shared import HEALTHY, INTERRUPTED, NOT_DONE, UNREACHABLE, WRONG_USE, Flag, add_command, resolve
from ftcoord.errors import NO_ETCD, ConfigError, EtcdUnavailable, FtcoordError, OutcomeUnknown

FILES: Final = (
    "ls_status_watch_history_why_doctor",
    "evict_drain_close_stop_kill",
    "demo_server_dashboard_gateway_metrics",
    "run",
)
"""The modules of `ftcoord.commands`, each named after its commands. Only the given command's module is loaded: loading
all would take longer than most commands do."""
SHELLS: Final = ("bash", "zsh", "tcsh")

EXIT_CODES: Final = (
    f"Exit codes: {HEALTHY} done or healthy; {NOT_DONE} failed, not done or not healthy; {WRONG_USE} wrong usage;"
    f" {UNREACHABLE} etcd cannot be reached, or did not answer a write; {INTERRUPTED} interrupted."
    " `ftcoord COMMAND --help` describes a command."
)


_NO_MORE: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
"""The errors of an output that takes nothing more: its reader has ended, as `head` does, or a disk is full."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    _make_usable()
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # here, since Python itself would show a traceback
    except OSError as error:
        if error.errno not in _NO_MORE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            _complain(f"the output cannot be written: {error.strerror}")
        return NOT_DONE


def _run(given: Sequence[str]) -> int:
    if not given:
        _parser().print_help()
        return HEALTHY
    options = _parser(given[0]).parse_args(given)
    try:
        resolve(options)
        return int(options.run(options))
    except ConfigError as error:
        _complain(error)
        return WRONG_USE
    except (EtcdUnavailable, OutcomeUnknown) as error:
        _complain(error)
        if not str(error).startswith(NO_ETCD):
            _complain("check that etcd runs there: --endpoints or FTCOORD_ENDPOINTS gives its address")
        return UNREACHABLE
    except FtcoordError as error:
        _complain(error)
        return NOT_DONE
    except KeyboardInterrupt:
        _complain("interrupted; everything it started has ended")
        return INTERRUPTED


def _make_usable() -> None:
    """A command does its work though nobody can read its output, or ask for it. What is printed has an escape for each
    character that its encoding lacks, as that of an ASCII terminal does."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(problem: object) -> None:
    with suppress(OSError):  # the exit code shows it, too
        print(f"ftcoord: {problem}", file=sys.stderr)


def _parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of this command, or of all if there is none of that name."""
    parser = argparse.ArgumentParser(
        prog="ftcoord", description="Fault-tolerant PyTorch coordination on etcd.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"ftcoord {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in [name for name in FILES if command in name.split("_")] or FILES:
        import_module(f"ftcoord.commands.{name}").add_commands(commands)
    add_command(commands, completion, Flag("SHELL", "", "the shell", choices=SHELLS))
    return parser


def completion(options: argparse.Namespace) -> int:
    """Print a shell completion script.

    It makes a shell complete commands and flags. In bash: eval "$(ftcoord completion bash)".
    """
    import shtab

    sys.stdout.write(shtab.complete(_parser(), options.shell))
    return HEALTHY


if __name__ == "__main__":
    sys.exit(main())
