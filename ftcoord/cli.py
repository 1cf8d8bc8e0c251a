"""The `ftcoord` command.

Exit codes: 0 done, or healthy; 1 failed, or unhealthy; 2 wrong use; 3 etcd cannot be reached; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ftcoord import __version__
from ftcoord.commands import acting, completion, doctor, explaining, looking, paging, serving, watching
from ftcoord.commands.doctor import UNREACHABLE
from ftcoord.commands.flags import resolve
from ftcoord.commands.output import neutral
from ftcoord.errors import ConfigError, EtcdUnavailable, FtcoordError, OutcomeUnknown

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
"""Exit codes."""
FAMILIES = (looking, watching, explaining, doctor, acting, paging, serving)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(arguments)
    try:
        resolve(options)
        return int(options.run(options))
    except ConfigError as error:
        return _complain(error, WRONG_USE)
    except (EtcdUnavailable, OutcomeUnknown) as error:
        code = _complain(error, UNREACHABLE)
        print("ftcoord: is etcd there? --endpoints or FTCOORD_ENDPOINTS says where it is", file=sys.stderr)
        return code
    except FtcoordError as error:
        return _complain(error, FAILED)
    except BrokenPipeError:  # whoever read it has heard enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("ftcoord: interrupted; everything it started has ended", file=sys.stderr)
        return INTERRUPTED


def _complain(error: FtcoordError, code: int) -> int:
    print(f"ftcoord: {neutral(str(error))}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftcoord", description="Fault-tolerant PyTorch coordination on etcd.")
    parser.add_argument("--version", action="version", version=f"ftcoord {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in FAMILIES:
        family.add_commands(commands)
    completion.add_commands(commands, _parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
