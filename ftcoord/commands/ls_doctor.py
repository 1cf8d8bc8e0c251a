"""`ftcoord ls` and `ftcoord doctor`: the jobs on an etcd cluster, and whether it is fit for them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ftcoord.commands.flags import ETCD_KEYS, OUTPUT_FLAGS, add_command, client_of, etcd_config
from ftcoord.commands.output import HEALTHY, NOT_DONE, UNREACHABLE, Terminal
from ftcoord.escaping import neutral
from ftcoord.operator.report import Examination


def add_commands(commands: Any) -> None:
    add_command(commands, ls, *ETCD_KEYS, *OUTPUT_FLAGS)
    add_command(commands, doctor, *ETCD_KEYS, *OUTPUT_FLAGS)


def ls(options: argparse.Namespace) -> int:
    """List the runs and jobs on an etcd cluster.

    Lists those that have keys below the key prefix: state, last round and quorum, number of live members.
    """
    from ftcoord.operator.reading import read_jobs

    terminal = Terminal.of(options)
    with client_of(options) as etcd:
        found = read_jobs(etcd, options.key_prefix)
    fields = "JOB=job STATE=state ROUND=round NODES=nodes QUORUM=quorum REPLICAS=replicas MEMBERS=members NOTE=note"
    lines = terminal.table(fields, found.jobs)
    terminal.show(found, lines if found.jobs else [f"no job has keys below {neutral(found.key_prefix)}"])
    return HEALTHY


def doctor(options: argparse.Namespace) -> int:
    """Check whether an etcd cluster is fit for jobs.

    Checks endpoints, version, leader, alarms, space, latency, clocks, TLS, rights below the key prefix, a lease and a
    watch, and prints what to do about each problem. Writes no keys: it measures write latency by granting and revoking
    a lease. Exits with status 0 if there is no problem.
    """
    from ftcoord.etcd.addresses import discovered
    from ftcoord.operator.doctor import examine, findings

    terminal = Terminal.of(options)
    facts = examine(discovered(etcd_config(options)), options.key_prefix)
    found = findings(facts)
    terminal.show(found, _finding_lines(found, terminal))
    return UNREACHABLE if not facts.answering else HEALTHY if found.healthy else NOT_DONE


def _finding_lines(found: Examination, terminal: Terminal) -> Iterator[str]:
    for one in found.findings:
        yield f"{terminal.word(f'{one.level:<8}')} {neutral(one.about)}: {neutral(one.found)}"
        if one.do:
            yield f"{'':<8} -> {neutral(one.do)}"
