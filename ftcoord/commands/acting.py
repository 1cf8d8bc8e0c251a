"""`ftcoord evict`, `drain`, `close`, `kill` and `gc`. Each asks for confirmation, and reports what it did."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

from ftcoord.commands.codes import DONE, NOT_DONE
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, YES_FLAG, Flag, add, etcd_config
from ftcoord.commands.jobs import add_job, client_of, terminal_of
from ftcoord.commands.output import Terminal
from ftcoord.config import full_text, seconds, whole
from ftcoord.errors import ConfigError
from ftcoord.escaping import neutral
from ftcoord.operator.told import FORMAT, Done

COMMON: Final = (*ETCD_FLAGS, KEYS_FLAG, YES_FLAG, *OUTPUT_FLAGS)

_REASON: Final = Flag(
    "--reason", "FTCOORD_REASON", "the reason, recorded for those who read about it later", full_text, None, "TEXT"
)
_FORCE: Final = Flag("--force", "FTCOORD_DRAIN_FORCE", "drain even if too few nodes stay for a round", whole(0, 1), 0)
_IDLE: Final = Flag(
    "--idle", "FTCOORD_GC_IDLE", "also delete jobs that are not over but have no members", whole(0, 1), 0
)
_WAIT: Final = Flag("--wait", "FTCOORD_KILL_WAIT", "seconds to wait until it is gone", seconds, 10.0, "SECONDS")


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    evict = commands.add_parser(
        "evict",
        help="end a member's lease now, so that the others go on without it",
        description="End a member's lease now, with a cause that the others read, so that they go on without it. If its"
        " process is still alive, it rejoins as a new member: stop the process or the host to keep it out.",
    )
    add_job(evict)
    evict.add_argument(
        "node", metavar="NODE", help="the member's host, node id, replica id (its uuid may be left out) or member id"
    )
    add(evict, (_REASON, *COMMON))
    evict.set_defaults(run=_evict)

    drain = commands.add_parser(
        "drain",
        help="make a node leave a run without an error or a timeout",
        description="Recall the current round and make a node leave the run. The other nodes form a new round, and the"
        " node's agent exits with status 0. Processes that joined through init_method never return for a new round, so"
        " drain does not stop them.",
    )
    add_job(drain)
    drain.add_argument("node", metavar="NODE", help="the node's host, node id or member id")
    add(drain, (_REASON, _FORCE, *COMMON))
    drain.set_defaults(run=_drain)

    close = commands.add_parser(
        "close",
        help="end a run for all of its nodes",
        description="End a run for all of its nodes. Each node exits with an error that says who closed the run.",
    )
    add_job(close)
    add(close, (_REASON, *COMMON))
    close.set_defaults(run=_close)

    kill = commands.add_parser(
        "kill",
        help="end the process of a replica's manager",
        description="Order a replica's manager to end its process, and wait until it is gone. This also works for"
        " replicas behind `ftcoord gateway`.",
    )
    add_job(kill)
    kill.add_argument("replica", metavar="REPLICA", help="the replica's id; its uuid may be left out")
    add(kill, (_REASON, _WAIT, *COMMON))
    kill.set_defaults(run=_kill)

    gc = commands.add_parser(
        "gc",
        help="delete the keys of jobs that are over",
        description="Delete the keys of jobs that are over and have no members left. Those keys would also expire"
        " automatically. Histories are kept.",
    )
    add(gc, (_IDLE, *COMMON))
    gc.set_defaults(run=_gc)


def _evict(options: argparse.Namespace) -> int:
    from ftcoord.operator.orders import because, evict_members, find_members

    job, name = full_text("JOB", options.job), full_text("NODE", options.node)
    terminal, cause = terminal_of(options), because(f"evicted by {who()}", options.reason)
    with client_of(options) as etcd:
        members = find_members(etcd, options.key_prefix, job, name)
        _ask(options, [f"evict {one} from {job!r}" for one in members])
        return _say(terminal, evict_members(etcd, job, members, cause, who()))


def _drain(options: argparse.Namespace) -> int:
    from ftcoord.operator.orders import because, drain, find_leavers

    job, name = full_text("JOB", options.job), full_text("NODE", options.node)
    terminal, reason = terminal_of(options), because(f"was drained by {who()}", options.reason)
    with client_of(options) as etcd:
        force, timeout = bool(options.force), etcd.config.request_timeout
        leaver = find_leavers(etcd, options.key_prefix, job, name, force=force)[0]
        _ask(options, [f"have {leaver.node} on {leaver.host} leave {job!r}"])
        # By its node: others may have gone, and a round may have begun, while somebody thought about it.
        done = drain(etcd, options.key_prefix, job, leaver.node, reason, who(), timeout, force=force)
        return _say(terminal, done)


def _close(options: argparse.Namespace) -> int:
    from ftcoord.operator.orders import because, close_job, nodes_of_run

    job, terminal = full_text("JOB", options.job), terminal_of(options)
    reason = because(f"closed by {who()}", options.reason)
    with client_of(options) as etcd:
        nodes = nodes_of_run(etcd, options.key_prefix, job)
        _ask(options, [f"close {job!r} for its {nodes} nodes: each ends with an error"])
        return _say(terminal, close_job(etcd, options.key_prefix, job, reason, who(), etcd.config.request_timeout))


def _kill(options: argparse.Namespace) -> int:
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.operator.orders import because, kill_replica, replica_called

    job, name = full_text("JOB", options.job), full_text("REPLICA", options.replica)
    config, terminal = etcd_config(options), terminal_of(options)
    message = because(f"killed by {who()}", options.reason)
    with EtcdClient(config) as etcd:
        replica = replica_called(etcd, options.key_prefix, job, name)
        _ask(options, [f"end the process of the manager of {replica!r} of {job!r}"])
        return _say(terminal, kill_replica(etcd, options.key_prefix, job, replica, message, options.wait, who()))


def _gc(options: argparse.Namespace) -> int:
    from ftcoord.operator.leftovers import why_kept
    from ftcoord.operator.remains import remains_of_all, remove

    terminal, did = terminal_of(options), list[str]()
    with client_of(options) as etcd:
        found = [(one, why_kept(one, idle=bool(options.idle))) for one in remains_of_all(etcd, options.key_prefix)]
        going = [one for one, why in found if not why]
        left = [f"{one.job!r}: {why}" for one, why in found if why]
        if going:
            _ask(options, [f"delete the {one.keys} keys of {one.job!r}" for one in going])
        for one in going:
            if remove(etcd, options.key_prefix, one, who()):
                did.append(f"deleted the {one.keys} keys of {one.job!r}")
            else:
                left.append(f"{one.job!r}: somebody has written there since")
    return _say(terminal, Done(FORMAT, "", tuple(did), tuple(left)), nothing=DONE)


def _ask(options: argparse.Namespace, what: Sequence[str]) -> None:
    """Ask for confirmation. Raises ConfigError without a terminal, and NothingThere for a no."""
    from ftcoord.operator.orders import NothingThere

    if options.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("--yes", None, "nobody is there to be asked, so give it to do this")
    for line in what:
        print(neutral(line), file=sys.stderr)
    print("do it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NothingThere("nothing was done")


def _say(terminal: Terminal, done: Done, nothing: int = NOT_DONE) -> int:
    """Show what was done; the exit code."""
    lines = [*map(neutral, done.did), *(f"left alone: {neutral(one)}" for one in done.left)]
    terminal.tell(done, lines or ["there was nothing to do"])
    return DONE if done.did else nothing


def who() -> str:
    """The user and host that run this command, as others read it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no entry in its passwd; OSError from Python 3.13 on
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
