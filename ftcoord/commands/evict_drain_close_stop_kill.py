"""`ftcoord evict`, `drain`, `close`, `stop` and `kill`. Each asks for confirmation, and reports what it did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from ftcoord.commands import shared
from ftcoord.commands.shared import Flag, Terminal, add_command
from ftcoord.config import full_text, seconds, switch
from ftcoord.errors import ConfigError
from ftcoord.escaping import neutral
from ftcoord.operator import orders

_REASON: Final = Flag("--reason TEXT", "FTCOORD_REASON", "the reason, recorded for others to read", full_text, None)
_FORCE: Final = Flag("--force", "FTCOORD_DRAIN_FORCE", "drain even if too few nodes stay for a round", switch, 0)
_WAIT: Final = Flag("--wait SECONDS", "FTCOORD_KILL_WAIT", "seconds to wait until it is gone", seconds, 10.0)
_YES: Final = Flag("--yes", "FTCOORD_YES", "do not ask for confirmation", switch, 0, short="-y")
_MEMBER: Final = "the member's host, node id, replica id (its uuid may be left out) or member id"


def add_commands(commands: Any) -> None:
    flags = (*shared.ETCD_KEYS, _YES, *shared.OUTPUT_FLAGS)
    add_command(commands, evict, shared.JOB, Flag("NODE", "", _MEMBER, full_text), _REASON, *flags)
    node = Flag("NODE", "", "the node's host, node id or member id", full_text)
    add_command(commands, drain, shared.JOB, node, _REASON, _FORCE, *flags)
    add_command(commands, close, shared.JOB, _REASON, *flags)
    add_command(commands, stop, shared.JOB, _REASON, *flags)
    replica = Flag("REPLICA", "", "the replica's id; its uuid may be left out", full_text)
    add_command(commands, kill, shared.JOB, replica, _REASON, _WAIT, *flags)


def evict(options: argparse.Namespace) -> int:
    """End a member's lease now, so that the others go on without it.

    The others read the cause. If the member's process is still alive, it rejoins as a new member: stop the process or
    the host to keep it out.
    """
    return _give(options, options.node)


def drain(options: argparse.Namespace) -> int:
    """Make a node leave a run without an error or a timeout.

    Recalls the current round. The other nodes form a new round, and the node's agent exits with status 0. Processes
    that joined through init_method never return for a new round, so drain does not stop them.
    """
    return _give(options, options.node, force=bool(options.force))


def close(options: argparse.Namespace) -> int:
    """End a run for all of its nodes.

    Each node exits with an error that names the user shared.who closed the run.
    """
    return _give(options)


def stop(options: argparse.Namespace) -> int:
    """Have all ranks of a run leave their loops at one agreed step.

    For workers that ask `ftcoord.AgreedStop` in each step; others train on. The run may be started again under its id.
    """
    return _give(options)


def kill(options: argparse.Namespace) -> int:
    """End the process of a replica's manager.

    Orders the manager to exit, and waits until it is gone. This also works for replicas behind `ftcoord gateway`.
    """
    return _give(options, options.replica, wait=options.wait)


def _give(options: argparse.Namespace, name: str = "", **more: Any) -> int:
    """Give the order of the command's name, and show what was done; the exit code."""
    with shared.client_of(options) as etcd:
        order = orders.Order(options.run.__name__, options.job, name, shared.who(), options.reason or "", **more)
        about, carry_out = orders.planned(etcd, options.key_prefix, order, etcd.config.request_timeout)
        if not options.yes:
            _ask(about)
        done = carry_out()
    lines = [*map(neutral, done["did"]), *(f"left alone: {neutral(one)}" for one in done["left"])]
    return Terminal.of(options).show(done, lines or ["there was nothing to do"], bool(done["did"]))


def _ask(what: Sequence[str]) -> None:
    """Ask for confirmation. Raises ConfigError without a terminal, and NothingThere for a no."""
    if not sys.stdin.isatty():
        raise ConfigError("--yes", None, "there is no terminal to ask at, so give it to do this")
    for line in what:
        print(neutral(line), file=sys.stderr)
    print("do it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise orders.NothingThere("nothing was done")
