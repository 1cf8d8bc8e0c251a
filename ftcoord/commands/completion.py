"""`ftcoord completion`: a script that makes a shell complete commands and flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final

from ftcoord.commands.flags import add

SHELLS: Final = ("bash", "zsh", "tcsh")


def add_commands(commands: Any, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives, and `parser` makes the whole parser."""
    completion = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description='Print a script that makes a shell complete commands and flags. In bash: eval "$(ftcoord completion'
        ' bash)".',
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    add(completion, ())
    completion.set_defaults(run=lambda options: _completion(options.shell, parser()))


def _completion(shell: str, parser: argparse.ArgumentParser) -> int:
    import shtab

    sys.stdout.write(shtab.complete(parser, shell))
    return 0
