"""`ftcoord ls` and `ftcoord status`: what is told of jobs, once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, Flag, add, etcd_config
from ftcoord.commands.output import Terminal, neutral
from ftcoord.config import choice, full_text, whole
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.rendezvous import RoundOptions
from ftcoord.etcd.rpc.lean import LeanClient
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.naming import no_such_job
from ftcoord.operator.reading import ReadsLeases, read_job, read_jobs, read_leases
from ftcoord.operator.status import Rules, members_of, tell_job, with_leases
from ftcoord.operator.told import JobLine, JobList, JobStatus, NextDecision, QuorumStatus, RoundsStatus, TimerStatus

HEALTHY, UNHEALTHY = 0, 1
"""Exit codes."""
ROWS: Final = 50
"""Rows of a table where the user does not ask for all."""
LAST_TIME: Final = 1e11
"""Seconds since 1970 that a time of day is made of at most: what etcd holds may be anybody's."""
LEASES: Final = 50
"""Members whose leases are asked for, where the user does not ask for all: each takes a request."""

RULE_FLAGS: Final = (
    Flag("--min-replicas", "FTCOORD_MIN_REPLICAS", "as in the job's address", whole(1, 2**31 - 1), 1, "N"),
    Flag(
        "--on-member-loss",
        "FTCOORD_ON_MEMBER_LOSS",
        "as in the run's rdzv_conf",
        choice("restart", "ignore"),
        "restart",
        "WHAT",
        ("restart", "ignore"),
    ),
)
"""What etcd does not have of a job, and the next decision depends on."""
ALL_FLAG: Final = Flag("--all", "FTCOORD_ALL", "show all members, and all leases", whole(0, 1), 0)

_NEXT: Final = {"wait": "waits", "publish": "is due", "withheld": "is withheld"}


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    ls = commands.add_parser("ls", help="list the runs and jobs on an etcd")
    add(ls, (*ETCD_FLAGS, KEYS_FLAG, *OUTPUT_FLAGS))
    ls.set_defaults(run=_ls)

    status = commands.add_parser("status", help="who is in, who is missing, and why there is no next round or quorum")
    add_job(status)
    add(status, (*ETCD_FLAGS, KEYS_FLAG, *RULE_FLAGS, ALL_FLAG, *OUTPUT_FLAGS))
    status.set_defaults(run=_status)


def add_job(parser: argparse.ArgumentParser) -> None:
    """Give a command its JOB."""
    parser.add_argument("job", metavar="JOB", help="its id: torchrun's --rdzv-id, or the last part of a job's address")


def terminal_of(options: argparse.Namespace) -> Terminal:
    """Where the flags say that a command prints."""
    return Terminal(options.output, options.color)


def client_of(options: argparse.Namespace) -> closing[LeanClient]:
    """A client of the etcd that the flags name, for one command. Raises ConfigError."""
    return closing(LeanClient(etcd_config(options)))


def rules_of(options: argparse.Namespace) -> Rules:
    """What the flags say of a job."""
    defaults = Rules()
    rounds = RoundOptions(
        recall_on_loss=options.on_member_loss == "restart", return_to_seat=defaults.rounds.return_to_seat
    )
    return Rules(rounds, QuorumOptions(options.min_replicas, defaults.quorum.join_timeout))


def _ls(options: argparse.Namespace) -> int:
    terminal = terminal_of(options)
    with client_of(options) as etcd:
        found = read_jobs(etcd, options.key_prefix)
    terminal.tell(found, _list_lines(found, terminal))
    return HEALTHY


def _list_lines(found: JobList, terminal: Terminal) -> Iterable[str]:
    if not found.jobs:
        return [f"no job has keys below {neutral(found.key_prefix)}"]
    heads = ("JOB", "STATE", "ROUND", "NODES", "QUORUM", "REPLICAS", "MEMBERS", "NOTE")
    return terminal.table(heads, [_list_row(line) for line in found.jobs])


def _list_row(line: JobLine) -> tuple[object, ...]:
    counts = line.round, line.nodes, line.quorum, line.replicas, line.members
    return line.job, line.state, *counts, line.note


def _status(options: argparse.Namespace) -> int:
    job = full_text("JOB", options.job)
    terminal, rules = terminal_of(options), rules_of(options)
    with client_of(options) as etcd:
        keys = read_job(etcd, options.key_prefix, job, with_timers=True)
        status = told_of(etcd, keys, rules, with_all=bool(options.all))
    terminal.tell(status, status_lines(status, terminal, None if options.all else ROWS))
    return HEALTHY if status.healthy else UNHEALTHY


def told_of(etcd: ReadsLeases, keys: JobKeys, rules: Rules, *, with_all: bool) -> JobStatus:
    """The status of a job, with the leases of its first members, or of all. Raises EtcdError."""
    status = tell_job(keys, rules)
    members = members_of(status)
    return with_leases(status, read_leases(etcd, members if with_all else members[:LEASES]))


def status_lines(status: JobStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    """The status of a job for people, with so many rows in each table."""
    if not status.exists:
        yield no_such_job(status.job)
        return
    health = "healthy" if status.healthy else "needs a look"
    name = terminal.colour(neutral(status.job), "bold")
    yield f"{name}: {terminal.colour(health, 'good' if status.healthy else 'bad')} (revision {status.revision})"
    if status.rounds is not None:
        yield from _rounds_lines(status.rounds, terminal, rows)
    if status.quorum is not None:
        yield from _quorum_lines(status.quorum, terminal, rows)
    yield from _timer_lines(status.timers, terminal, rows)
    if status.rounds is None and status.quorum is None:
        yield "it has neither a rendezvous nor quorums: only a store, timers, heartbeats, elections or barriers"
    for bad in status.unreadable:
        yield f"{terminal.word('unreadable')}: {neutral(bad.key)}: {neutral(bad.problem)}"


def _rounds_lines(rounds: RoundsStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    limits = f"{rounds.min_nodes} to {rounds.max_nodes} nodes" if rounds.max_nodes else "no limits are known"
    yield ""
    yield f"rendezvous  {terminal.word(rounds.state)}, round {rounds.number} with {rounds.size} nodes ({limits})"
    if rounds.size and not rounds.closed:
        yield f"bootstrap   {neutral(rounds.address)}:{rounds.port}"
    for title, text in (("closed", rounds.closed), ("recalled", rounds.recalled), ("before", rounds.before)):
        if text:
            yield f"{title:<12}{neutral(text)}"
    yield _next_line("round", rounds.next)
    heads = ("RANK", "HOST", "NODE", "STANDING", "LEASE", "OF", "MEMBER", "SAID")
    found = [
        (one.rank, one.host, one.node, one.standing, one.lease_left, one.lease_ttl, one.member, one.said)
        for one in rounds.members[:rows]
    ]
    yield from _table(terminal, "members", heads, found, len(rounds.members))
    gone = [(one.rank, one.host, one.node, "missing", one.member, one.cause) for one in rounds.missing[:rows]]
    yield from _table(
        terminal, "missing", ("RANK", "HOST", "NODE", "STANDING", "MEMBER", "CAUSE"), gone, len(rounds.missing)
    )


def _quorum_lines(quorum: QuorumStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    yield ""
    which = f"quorum {quorum.id} with {quorum.size} replicas at step {quorum.max_step}"
    yield f"quorums     {terminal.word(quorum.state)}, {which} (min_replicas {quorum.min_replicas})"
    yield _next_line("quorum", quorum.next)
    heads = ("RANK", "REPLICA", "STANDING", "STEP", "BEHIND", "FAILED", "LEASE", "OF", "MEMBER", "ADDRESS")
    found = [
        (
            one.rank,
            one.replica_id,
            one.standing,
            one.step,
            one.behind,
            one.commit_failures,
            one.lease_left,
            one.lease_ttl,
            one.member,
            one.address,
        )
        for one in quorum.replicas[:rows]
    ]
    yield from _table(terminal, "replicas", heads, found, len(quorum.replicas))
    gone = [(one.rank, one.replica_id, "missing", one.member, one.cause) for one in quorum.missing[:rows]]
    yield from _table(
        terminal, "missing", ("RANK", "REPLICA", "STANDING", "MEMBER", "CAUSE"), gone, len(quorum.missing)
    )


def _timer_lines(timers: Sequence[TimerStatus], terminal: Terminal, rows: int | None) -> Iterator[str]:
    """What is left of them is by this host's clock and theirs."""
    if not timers:
        return
    yield ""
    now = concurrency.wall()
    heads = ("RANK", "HOST", "PID", "SCOPE", "STANDING", "EXPIRES", "LEFT", "OF")
    found = [
        (one.rank, one.host, one.pid, one.scope, one.standing, _clock(one.until), round(one.until - now), one.after)
        for one in timers[:rows]
    ]
    yield from _table(terminal, "timers", heads, found, len(timers))


def _clock(at: float) -> str:
    """A time of day; empty for what no clock of a host says."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S") if 0 < at < LAST_TIME else ""


def _next_line(what: str, decision: NextDecision) -> str:
    rule = f" [{decision.rule}]" if decision.rule else ""
    return f"next {what:<7}{_NEXT[decision.decision]}: {neutral(decision.reason)}{rule}"


def _table(
    terminal: Terminal, title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], count: int
) -> Iterator[str]:
    if not count:
        return
    yield f"{title} ({count}):"
    yield from (f"  {line}" for line in terminal.table(heads, rows))
    if count > len(rows):
        yield f"  ... and {count - len(rows)} more: --all shows them"
