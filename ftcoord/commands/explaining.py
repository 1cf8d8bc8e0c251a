"""`ftcoord history` and `ftcoord why`: what happened to a job, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from textwrap import wrap
from typing import Any, Final

from ftcoord.commands.codes import HEALTHY, UNHEALTHY
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, add
from ftcoord.commands.jobs import RULE_FLAGS, add_job, client_of, rules_of, terminal_of
from ftcoord.commands.output import Terminal, clock
from ftcoord.config import full_text
from ftcoord.escaping import neutral
from ftcoord.operator.history import explain, tell_history
from ftcoord.operator.reading import read_events, read_job
from ftcoord.operator.told import Explanation, JobHistory, ToldEvent, no_such_job

LINE_WIDTH: Final = 100
"""Columns of a paragraph."""


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    history = commands.add_parser(
        "history",
        help="show what happened to a job, in etcd's order",
        description="Show what happened to a job, in etcd's order: rounds and quorums, which members came and went,"
        " what failed and why. Exits with status 0 if there is a history.",
    )
    add_job(history)
    add(history, (*ETCD_FLAGS, KEYS_FLAG, *OUTPUT_FLAGS))
    history.set_defaults(run=_history)

    why = commands.add_parser(
        "why",
        help="explain a job's last interruption: the first cause, what was lost, what to do",
        description="Explain, in one paragraph, what ended a job's last round or changed its quorum, the first cause,"
        " what was lost, and what to do. Exits with status 0 if the job is healthy now, or has finished.",
    )
    add_job(why)
    add(why, (*ETCD_FLAGS, KEYS_FLAG, *RULE_FLAGS, *OUTPUT_FLAGS))
    why.set_defaults(run=_why)


def _history(options: argparse.Namespace) -> int:
    job = full_text("JOB", options.job)
    terminal = terminal_of(options)
    with client_of(options) as etcd:
        found = tell_history(job, *read_events(etcd, options.key_prefix, job))
    terminal.tell(found, _history_lines(found, terminal))
    return HEALTHY if found.events else UNHEALTHY


def _history_lines(found: JobHistory, terminal: Terminal) -> Iterable[str]:
    if not found.events:
        return [f"etcd has no history of a job {neutral(repr(found.job))}: it never began, or its run_ttl is over"]
    heads = ("REVISION", "TIME", "GROUP", "NUMBER", "EVENT", "REASON")
    return terminal.table(heads, [_row(one) for one in found.events], widest=None)


def _row(event: ToldEvent) -> tuple[object, ...]:
    when = clock(event.at, "%m-%d %H:%M:%S")
    who = f"{event.who}: " if event.worker is not None else ""
    return event.revision, when, event.group, event.number, event.kind, f"{who}{event.reason}"


def _why(options: argparse.Namespace) -> int:
    from ftcoord.operator.status import tell_job  # a history needs no decisions

    job = full_text("JOB", options.job)
    terminal, rules = terminal_of(options), rules_of(options)
    with client_of(options) as etcd:
        keys = read_job(etcd, options.key_prefix, job)
        status = tell_job(keys, rules)
        found = explain(status, *read_events(etcd, options.key_prefix, job), keys.quorum.deaths)
    terminal.tell(found, why_lines(found, terminal) if status.exists else [no_such_job(job)])
    return HEALTHY if found.healthy else UNHEALTHY


def why_lines(found: Explanation, terminal: Terminal) -> Iterable[str]:
    """The explanation for people."""
    health = terminal.colour("healthy", "good") if found.healthy else terminal.colour("needs a look", "bad")
    yield f"{terminal.colour(neutral(found.job), 'bold')}: {health}"
    yield from wrap(neutral(found.text), LINE_WIDTH, break_on_hyphens=False)
