"""`ftcoord doctor`: checks whether an etcd cluster is fit for jobs, and says what to do if it is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ftcoord.commands.codes import HEALTHY, UNHEALTHY, UNREACHABLE
from ftcoord.commands.flags import ETCD_FLAGS, KEYS_FLAG, OUTPUT_FLAGS, add, etcd_config
from ftcoord.commands.jobs import terminal_of
from ftcoord.commands.output import Terminal
from ftcoord.escaping import neutral
from ftcoord.operator.told import Examination


def add_commands(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` gives."""
    doctor = commands.add_parser(
        "doctor",
        help="check whether an etcd cluster is fit for jobs",
        description="Check an etcd cluster: endpoints, version, leader, alarms, space, latency, clocks, TLS, rights"
        " below the key prefix, a lease and a watch. For each problem, say what to do. Writes no keys: it"
        " measures write latency by granting and revoking a lease. Exits with status 0 if there is no problem.",
    )
    add(doctor, (*ETCD_FLAGS, KEYS_FLAG, *OUTPUT_FLAGS))
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ftcoord.etcd.addresses import discovered
    from ftcoord.operator.examining import examine
    from ftcoord.operator.findings import findings

    terminal = terminal_of(options)
    facts = examine(discovered(etcd_config(options)), options.key_prefix)
    found = findings(facts)
    terminal.tell(found, _lines(found, terminal))
    if all(one.status is None for one in facts.endpoints):
        return UNREACHABLE
    return HEALTHY if found.healthy else UNHEALTHY


def _lines(found: Examination, terminal: Terminal) -> Iterator[str]:
    for one in found.findings:
        yield f"{terminal.word(f'{one.level:<8}')} {neutral(one.about)}: {neutral(one.found)}"
        if one.do:
            yield f"{'':<8} -> {neutral(one.do)}"
