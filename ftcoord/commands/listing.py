"""`ftcoord ls`: the runs and jobs on an etcd cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ftcoord.commands.codes import HEALTHY
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, add
from ftcoord.commands.jobs import client_of, terminal_of
from ftcoord.commands.output import Terminal
from ftcoord.escaping import neutral
from ftcoord.operator.summary import read_jobs
from ftcoord.operator.told import JobLine, JobList


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    ls = commands.add_parser(
        "ls",
        help="list the runs and jobs on an etcd cluster",
        description="List the runs and jobs that have keys below the key prefix: state, last round and quorum, number"
        " of live members.",
    )
    add(ls, (*ETCD_FLAGS, KEYS_FLAG, *OUTPUT_FLAGS))
    ls.set_defaults(run=_ls)


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
    return line.job, line.state, line.round, line.nodes, line.quorum, line.replicas, line.members, line.note
