"""`ftcoord evict`, `close`, `kill` and `gc`: what acts on jobs. Each asks first, and says what it did."""

from __future__ import annotations

import argparse
import getpass
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, YES_FLAG, Flag, add, etcd_config
from ftcoord.commands.looking import add_job, client_of, no_such_job, terminal_of
from ftcoord.commands.output import Terminal, neutral
from ftcoord.config import full_text, seconds, whole
from ftcoord.core.layout import quorum_prefix, run_prefix
from ftcoord.errors import ConfigError, FtcoordError, NotInQuorum
from ftcoord.etcd.rpc.lean import LeanClient
from ftcoord.operator.told import FORMAT, Done

if TYPE_CHECKING:
    from ftcoord.operator.naming import NamedMember

DONE, NOT_DONE = 0, 1
"""Exit codes."""
COMMON: Final = (*ETCD_FLAGS, KEYS_FLAG, YES_FLAG, *OUTPUT_FLAGS)

_REASON: Final = Flag("--reason", "FTCOORD_REASON", "why, for those who read it later", full_text, None, "TEXT")
_IDLE: Final = Flag("--idle", "FTCOORD_GC_IDLE", "also jobs that are not over but have nobody left", whole(0, 1), 0)
_WAIT: Final = Flag(
    "--wait", "FTCOORD_KILL_WAIT", "seconds until the manager must have obeyed", seconds, 10.0, "SECONDS"
)


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    evict = commands.add_parser("evict", help="end a member's lease now, so that the others go on without it")
    add_job(evict)
    evict.add_argument("node", metavar="NODE", help="its host, node id, replica id or member id")
    add(evict, (_REASON, *COMMON))
    evict.set_defaults(run=_evict)

    close = commands.add_parser("close", help="end a run for all of its nodes")
    add_job(close)
    add(close, (_REASON, *COMMON))
    close.set_defaults(run=_close)

    kill = commands.add_parser("kill", help="end the process of a replica's manager")
    add_job(kill)
    kill.add_argument("replica", metavar="REPLICA", help="its replica id")
    add(kill, (_REASON, _WAIT, *COMMON))
    kill.set_defaults(run=_kill)

    gc = commands.add_parser("gc", help="delete what jobs that are over left behind")
    add(gc, (_IDLE, *COMMON))
    gc.set_defaults(run=_gc)


class _NotThere(FtcoordError):
    """There is nothing to do it to."""


def _evict(options: argparse.Namespace) -> int:
    from ftcoord.operator.acting import evict

    job, name = full_text("JOB", options.job), full_text("NODE", options.node)
    terminal, cause = terminal_of(options), _because(f"evicted by {_who()}", options.reason)
    did, left = list[str](), list[str]()
    with client_of(options) as etcd:
        members = _members_called(etcd, options.key_prefix, job, name)
        _ask(options, [f"evict {one} from {job!r}" for one in members])
        for one in members:
            if evict(etcd, one, cause):
                did.append(f"evicted {one}: the others go on; a process that lives comes back as a new member")
            else:
                left.append(f"{one} was gone already")
    return _say(terminal, Done(FORMAT, job, tuple(did), tuple(left)))


def _members_called(etcd: LeanClient, key_prefix: str, job: str, name: str) -> list[NamedMember]:
    """Those that a name means. Raises _NotThere, and ConfigError for a name of several."""
    from ftcoord.operator.naming import members_called, owners
    from ftcoord.operator.reading import read_job

    keys = read_job(etcd, key_prefix, job)
    if not keys.exists:
        raise _NotThere(no_such_job(job))
    members = members_called(keys, name)
    if not members:
        raise _NotThere(f"no live member of {job!r} is called {name!r}: `ftcoord status` shows who is there")
    if len(owners(members)) > 1:
        raise ConfigError("NODE", name, f"it is the name of several: give the member id of {_list(members)}")
    return members


def _close(options: argparse.Namespace) -> int:
    from ftcoord.operator.acting import close_run
    from ftcoord.operator.reading import read_job

    job, terminal = full_text("JOB", options.job), terminal_of(options)
    reason = _because(f"closed by {_who()}", options.reason)
    with client_of(options) as etcd:
        keys = read_job(etcd, options.key_prefix, job)
        if not keys.exists:
            raise _NotThere(no_such_job(job))
        if keys.rounds.is_empty:
            raise _NotThere(f"{job!r} has no rendezvous to close: replicas of quorums end one by one: `ftcoord kill`")
        _ask(options, [f"close {job!r} for its {len(keys.rounds.members())} nodes: each ends with an error"])
        over = close_run(etcd, run_prefix(options.key_prefix, job), reason, _who(), etcd.config.request_timeout)
    if over:
        return _say(terminal, Done(FORMAT, job, (), (f"it was over already: {over}",)))
    return _say(terminal, Done(FORMAT, job, (f"closed {job!r}: {reason}",)))


def _kill(options: argparse.Namespace) -> int:
    from ftcoord.coordination.kills import order_kill
    from ftcoord.etcd.client import EtcdClient

    job, replica = full_text("JOB", options.job), full_text("REPLICA", options.replica)
    config, terminal = etcd_config(options), terminal_of(options)
    _ask(options, [f"end the process of the manager of {replica!r} of {job!r}"])
    message = _because(f"killed by {_who()}", options.reason)
    with EtcdClient(config) as etcd:
        try:
            prefix = quorum_prefix(options.key_prefix, job)
            order_kill(etcd, prefix, replica, message, concurrency.now() + options.wait)
        except NotInQuorum:
            raise _NotThere(f"no live replica of {job!r} is called {replica!r}: `ftcoord status` shows them") from None
        except TimeoutError as error:
            raise _NotThere(f"{replica!r} was not killed: {error}") from None
    return _say(terminal, Done(FORMAT, job, (f"killed the manager of {replica!r}: {message}",)))


def _gc(options: argparse.Namespace) -> int:
    from ftcoord.operator.acting import remains_of_all, remove
    from ftcoord.operator.leftovers import why_kept

    terminal, did = terminal_of(options), list[str]()
    with client_of(options) as etcd:
        found = [(one, why_kept(one, idle=bool(options.idle))) for one in remains_of_all(etcd, options.key_prefix)]
        going = [one for one, why in found if not why]
        left = [f"{one.job!r}: {why}" for one, why in found if why]
        if going:
            _ask(options, [f"delete the {one.keys} keys of {one.job!r}" for one in going])
        for one in going:
            if remove(etcd, options.key_prefix, one):
                did.append(f"deleted the {one.keys} keys of {one.job!r}")
            else:
                left.append(f"{one.job!r}: somebody has written there since")
    return _say(terminal, Done(FORMAT, "", tuple(did), tuple(left)), nothing=DONE)


def _ask(options: argparse.Namespace, what: Sequence[str]) -> None:
    """Raises ConfigError if nobody can answer, and _NotThere for a no."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("--yes", "0", "nobody is there to be asked: give --yes to do it")
    for line in what:
        print(neutral(line), file=sys.stderr)
    print("do it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise _NotThere("nothing was done")


def _say(terminal: Terminal, done: Done, nothing: int = NOT_DONE) -> int:
    """Show what was done; the exit code."""
    lines = [*map(neutral, done.did), *(f"left alone: {neutral(one)}" for one in done.left)]
    terminal.tell(done, lines or ["there was nothing to do"])
    return DONE if done.did else nothing


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _because(what: str, reason: str | None) -> str:
    return f"{what}: {reason}" if reason else what


def _list(members: Sequence[NamedMember]) -> str:
    return " or ".join(f"{one.id} ({one.owner})" for one in members[:5])
