"""`ftcoord evict`, `drain`, `close` and `kill`. Each asks for confirmation, and reports what it did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from ftcoord.commands.flags import ETCD_KEYS, JOB, OUTPUT_FLAGS, Flag, add_command, client_of, who
from ftcoord.commands.output import HEALTHY, NOT_DONE, Terminal
from ftcoord.config import full_text, seconds, switch
from ftcoord.errors import ConfigError
from ftcoord.escaping import neutral
from ftcoord.operator import orders
from ftcoord.operator.report import Done

_REASON: Final = Flag("--reason TEXT", "FTCOORD_REASON", "the reason, recorded for others to read", full_text, None)
_FORCE: Final = Flag("--force", "FTCOORD_DRAIN_FORCE", "drain even if too few nodes stay for a round", switch, 0)
_WAIT: Final = Flag("--wait SECONDS", "FTCOORD_KILL_WAIT", "seconds to wait until it is gone", seconds, 10.0)
_YES: Final = Flag("--yes", "FTCOORD_YES", "do not ask for confirmation", switch, 0, short="-y")
_MEMBER: Final = "the member's host, node id, replica id (its uuid may be left out) or member id"


def add_commands(commands: Any) -> None:
    flags = (*ETCD_KEYS, _YES, *OUTPUT_FLAGS)
    add_command(commands, evict, JOB, Flag("NODE", "", _MEMBER, full_text), _REASON, *flags)
    node = Flag("NODE", "", "the node's host, node id or member id", full_text)
    add_command(commands, drain, JOB, node, _REASON, _FORCE, *flags)
    add_command(commands, close, JOB, _REASON, *flags)
    replica = Flag("REPLICA", "", "the replica's id; its uuid may be left out", full_text)
    add_command(commands, kill, JOB, replica, _REASON, _WAIT, *flags)


def evict(options: argparse.Namespace) -> int:
    """End a member's lease now, so that the others go on without it.

    The others read the cause. If the member's process is still alive, it rejoins as a new member: stop the process or
    the host to keep it out.
    """
    cause, job = orders.because(f"evicted by {who()}", options.reason), options.job
    with client_of(options) as etcd:
        members = orders.find_members(etcd, options.key_prefix, job, options.node)
        _ask(options, [f"evict {one} from {job!r}" for one in members])
        return _report(options, orders.evict_members(etcd, job, members, cause=cause, by=who()))


def drain(options: argparse.Namespace) -> int:
    """Make a node leave a run without an error or a timeout.

    Recalls the current round. The other nodes form a new round, and the node's agent exits with status 0. Processes
    that joined through init_method never return for a new round, so drain does not stop them.
    """
    reason, job = orders.because(f"was drained by {who()}", options.reason), options.job
    with client_of(options) as etcd:
        of, force, timeout = (etcd, options.key_prefix, job), options.force, etcd.config.request_timeout
        leaver = orders.find_leavers(*of, options.node, force=force)[0]
        _ask(options, [f"have {leaver.node} on {leaver.host} leave {job!r}"])
        # By its node: others may have gone, and a round may have begun, while the user thought about it.
        done = orders.drain(*of, leaver.node, reason=reason, by=who(), timeout=timeout, force=force)
        return _report(options, done)


def close(options: argparse.Namespace) -> int:
    """End a run for all of its nodes.

    Each node exits with an error that names the user who closed the run.
    """
    reason, job = orders.because(f"closed by {who()}", options.reason), options.job
    with client_of(options) as etcd:
        of, timeout = (etcd, options.key_prefix, job), etcd.config.request_timeout
        _ask(options, [f"close {job!r} for its {orders.nodes_of_run(*of)} nodes: each ends with an error"])
        return _report(options, orders.close_job(*of, reason=reason, by=who(), timeout=timeout))


def kill(options: argparse.Namespace) -> int:
    """End the process of a replica's manager.

    Orders the manager to exit, and waits until it is gone. This also works for replicas behind `ftcoord gateway`.
    """
    message, job = orders.because(f"killed by {who()}", options.reason), options.job
    with client_of(options) as etcd:
        of = etcd, options.key_prefix, job
        replica = orders.replica_called(*of, options.replica)
        _ask(options, [f"end the process of the manager of {replica!r} of {job!r}"])
        done = orders.kill_replica(*of, replica, message=message, wait=options.wait, by=who())
        return _report(options, done)


def _ask(options: argparse.Namespace, what: Sequence[str]) -> None:
    """Ask for confirmation. Raises ConfigError without a terminal, and NothingThere for a no."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("--yes", None, "there is no terminal to ask at, so give it to do this")
    for line in what:
        print(neutral(line), file=sys.stderr)
    print("do it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise orders.NothingThere("nothing was done")


def _report(options: argparse.Namespace, done: Done) -> int:
    """Show what was done; the exit code."""
    lines = [*map(neutral, done.did), *(f"left alone: {neutral(one)}" for one in done.left)]
    Terminal.of(options).show(done, lines or ["there was nothing to do"])
    return HEALTHY if done.did else NOT_DONE
