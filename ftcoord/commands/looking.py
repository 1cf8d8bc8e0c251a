"""`ftcoord status`: the state of a job, once."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.commands.codes import HEALTHY, UNHEALTHY
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, Flag, add
from ftcoord.commands.jobs import RULE_FLAGS, add_job, client_of, rules_of, terminal_of
from ftcoord.commands.output import Terminal, clock
from ftcoord.config import full_text, switch
from ftcoord.core.rendezvous_records import FAILED
from ftcoord.escaping import counted, neutral, spanned
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.reading import ReadsLeases, read_job, read_leases
from ftcoord.operator.status import Member, Rules, foremost, members_of, tell_job, with_leases
from ftcoord.operator.told import JobStatus, NextDecision, QuorumStatus, RoundsStatus, TimerStatus, no_such_job

ROWS: Final = 50
"""Rows of a table unless the user asks for all. Only the leases of these members are read, since each takes a
request."""

ALL_FLAG: Final = Flag(
    "--all", "FTCOORD_ALL", "show all members and their leases; takes a request for each lease", switch, 0
)

_NEXT: Final = {"wait": "waits", "publish": "is due", "withheld": "is withheld"}


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    status = commands.add_parser(
        "status",
        help="show a job's members, and why there is no next round or quorum",
        description="Show a job's round or quorum: which members are in it, missing or waiting, why there is no next"
        " one, and which worker holds which expiration timer. Exits with status 0 if the job is healthy.",
    )
    add_job(status)
    add(status, (*ETCD_FLAGS, KEYS_FLAG, *RULE_FLAGS, ALL_FLAG, *OUTPUT_FLAGS))
    status.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> int:
    job = full_text("JOB", options.job)
    terminal, rules, rows = terminal_of(options), rules_of(options), None if options.all else ROWS
    with client_of(options) as etcd:
        keys = read_job(etcd, options.key_prefix, job, with_timers=True)
        status = told_of(etcd, keys, rules, rows)
    terminal.tell(status, status_lines(status, terminal, rows))
    return HEALTHY if status.healthy else UNHEALTHY


def told_of(etcd: ReadsLeases, keys: JobKeys, rules: Rules, rows: int | None) -> JobStatus:
    """The status of a job, with the leases of the members in so many rows of each table. Raises EtcdError."""
    status = tell_job(keys, rules)
    return with_leases(status, read_leases(etcd, members_of(status, rows)))


def status_lines(status: JobStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    """The status of a job for people, with so many rows in each table."""
    if not status.exists:
        yield no_such_job(status.job)
        return
    health = health_of(status)
    name = terminal.colour(neutral(status.job), "bold")
    yield f"{name}: {terminal.colour(health, 'good' if status.healthy else 'bad')} (revision {status.revision})"
    if status.rounds is not None:
        yield from _rounds_lines(status.rounds, terminal, rows)
    if status.quorum is not None:
        yield from _quorum_lines(status.quorum, terminal, rows)
    yield from _timer_lines(status.timers, terminal, rows)
    if status.rounds is None and status.quorum is None:
        yield "it has neither a rendezvous nor quorums: only a store, timers or heartbeats"
    for bad in status.unreadable[:rows]:
        yield f"{terminal.word('unreadable')}: {neutral(bad.key)}: {neutral(bad.problem)}"
    yield from _more(len(status.unreadable), rows)


def health_of(status: JobStatus) -> str:
    """The health of a job in a word or two."""
    is_failed = status.rounds is not None and status.rounds.state == FAILED
    return "healthy" if status.healthy else "FAILED" if is_failed else "needs a look"


def _rounds_lines(rounds: RoundsStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    limits = spanned((rounds.min_nodes, rounds.max_nodes), "node") if rounds.max_nodes else "no limits are known"
    last = f"round {rounds.number} with {counted(rounds.size, 'node')}" if rounds.number else "no round yet"
    yield ""
    yield f"rendezvous  {terminal.word(rounds.state)}, {last} ({limits})"
    if rounds.size and not rounds.closed:
        yield f"bootstrap   {neutral(rounds.address)}:{rounds.port}"
    for title, text in (("closed", rounds.closed), ("recalled", rounds.recalled), ("before", rounds.before)):
        if text:
            yield f"{title:<12}{neutral(text)}"
    yield _next_line("round", rounds.next)
    heads = ("RANK", "HOST", "NODE", "STANDING", "LEASE", "OF", "MEMBER", "SAID")
    found = [
        (one.rank, one.host, one.node, one.standing, one.lease_left, one.lease_ttl, one.member, one.said)
        for one in foremost(rounds.members, rows)
    ]
    yield from _table(terminal, _title("members", rounds.members, rows), heads, found, len(rounds.members))
    gone = [(one.rank, one.host, one.node, "missing", one.member, one.cause) for one in rounds.missing[:rows]]
    of_gone = ("RANK", "HOST", "NODE", "STANDING", "MEMBER", "CAUSE")
    yield from _table(terminal, f"missing ({len(rounds.missing)})", of_gone, gone, len(rounds.missing))


def _quorum_lines(quorum: QuorumStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    yield ""
    which = f"quorum {quorum.id} with {counted(quorum.size, 'replica')} at step {quorum.max_step}"
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
        for one in foremost(quorum.replicas, rows)
    ]
    yield from _table(terminal, _title("replicas", quorum.replicas, rows), heads, found, len(quorum.replicas))
    gone = [(one.rank, one.replica_id, "missing", one.member, one.cause) for one in quorum.missing[:rows]]
    of_gone = ("RANK", "REPLICA", "STANDING", "MEMBER", "CAUSE")
    yield from _table(terminal, f"missing ({len(quorum.missing)})", of_gone, gone, len(quorum.missing))


def _timer_lines(timers: Sequence[TimerStatus], terminal: Terminal, rows: int | None) -> Iterator[str]:
    """What is left of them is by this host's clock and theirs."""
    if not timers:
        return
    yield ""
    now = concurrency.wall()
    heads = ("RANK", "HOST", "PID", "SCOPE", "STANDING", "EXPIRES", "LEFT", "OF")
    found = [
        (one.rank, one.host, one.pid, one.scope, one.standing, clock(one.until), round(one.until - now), one.after)
        for one in timers[:rows]
    ]
    yield from _table(terminal, f"timers ({len(timers)})", heads, found, len(timers))


def _next_line(what: str, decision: NextDecision) -> str:
    rule = f" [{decision.rule}]" if decision.rule else ""
    return f"next {what:<7}{_NEXT[decision.decision]}: {neutral(decision.reason)}{rule}"


def _title(what: str, members: Sequence[Member], rows: int | None) -> str:
    """Of a table: how many there are, and how many of them stand how, where not all are shown."""
    if rows is None or len(members) <= rows:
        return f"{what} ({len(members)})"
    counts = Counter(one.standing for one in members).most_common()
    return f"{what} ({len(members)}: {', '.join(f'{count} {standing}' for standing, count in counts)})"


def _table(
    terminal: Terminal, title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], count: int
) -> Iterator[str]:
    if not count:
        return
    yield f"{title}:"
    yield from (f"  {line}" for line in terminal.table(heads, rows))
    yield from _more(count, len(rows), "  ")


def _more(count: int, rows: int | None, indent: str = "") -> Iterator[str]:
    """Where not all are shown: how many are not."""
    if rows is not None and count > rows:
        yield f"{indent}... and {count - rows} more: --all shows them"
