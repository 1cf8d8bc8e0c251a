"""`ftcoord ls`, `status`, `watch`, `history`, `why` and `doctor`: the jobs on an etcd cluster, one's state, once or
whenever it changes, and its past, and whether the cluster is fit for jobs."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.commands import shared
from ftcoord.commands.shared import Columns, Flag, Terminal, add_command, client_of, clock, columns
from ftcoord.config import switch
from ftcoord.core.rendezvous_records import FAILED
from ftcoord.escaping import counted, neutral, spanned
from ftcoord.operator import report
from ftcoord.operator.history import explain, history_of
from ftcoord.operator.reading import JobWatch, read_job, read_jobs, with_leases
from ftcoord.operator.status import foremost, status_of

ROWS: Final = 50
"""Rows of a table unless the user asks for all. Only the leases of these members are read, since each takes a
request."""
SCREEN: Final = 20
"""Rows of each table of a watch."""
NAMED: Final = 10
"""Members, timers and keys that a line names."""
LINE_WIDTH: Final = 100
"""Columns of a paragraph."""
ALL_FLAG: Final = Flag("--all", "FTCOORD_ALL", "show all members and leases; takes a request per lease", switch, 0)
_CLEAR: Final = "\x1b[H\x1b[2J"
_NEXT: Final = {"wait": "waits", "publish": "is due", "withheld": "is withheld"}


def add_commands(commands: Any) -> None:
    add_command(commands, ls, *shared.ETCD_KEYS, *shared.OUTPUT_FLAGS)
    add_command(commands, status, shared.JOB, *shared.ETCD_KEYS, *shared.RULE_FLAGS, ALL_FLAG, *shared.OUTPUT_FLAGS)
    add_command(commands, watch, shared.JOB, *shared.ETCD_KEYS, *shared.RULE_FLAGS, *shared.OUTPUT_FLAGS)
    add_command(commands, history, shared.JOB, *shared.ETCD_KEYS, *shared.OUTPUT_FLAGS)
    add_command(commands, why, shared.JOB, *shared.ETCD_KEYS, *shared.RULE_FLAGS, *shared.OUTPUT_FLAGS)
    add_command(commands, doctor, *shared.ETCD_KEYS, *shared.OUTPUT_FLAGS)


# -- ls ---------------------------------------------------------------------------------------------------------------


def ls(options: argparse.Namespace) -> int:
    """List the runs and jobs on an etcd cluster.

    Lists those that have keys below the key prefix: state, last round and quorum, number of live members.
    """
    terminal = Terminal.of(options)
    with client_of(options) as etcd:
        found = read_jobs(etcd, options.key_prefix)
    fields = "JOB=job STATE=state ROUND=round NODES=nodes QUORUM=quorum REPLICAS=replicas MEMBERS=members NOTE=note"
    lines = terminal.table(fields, found["jobs"])
    return terminal.show(found, lines if found["jobs"] else [f"no job has keys below {neutral(found['key_prefix'])}"])


# -- status ---------------------------------------------------------------------------------------------------------


def status(options: argparse.Namespace) -> int:
    """Show a job's members, and why there is no next round or quorum.

    Shows which members are in its round or quorum, missing or waiting, why there is no next one, and which worker holds
    which expiration timer. Exits with status 0 if the job is healthy.
    """
    terminal, rules, rows = Terminal.of(options), shared.rules_of(options), None if options.all else ROWS
    with client_of(options) as etcd:
        keys = read_job(etcd, options.key_prefix, options.job, with_timers=True)
        found = with_leases(etcd.time_left, status_of(keys, rules), rows)
    return terminal.show(found, status_lines(found, terminal, rows), found["healthy"])


def status_lines(found: report.JobStatus, terminal: Terminal, rows: int | None) -> Iterator[str]:
    """The status of a job for people, with so many rows in each table."""
    if not found["exists"]:
        yield report.no_such_job(found["job"])
        return
    health = terminal.colour(_health(found), "good" if found["healthy"] else "bad")
    yield f"{terminal.colour(neutral(found['job']), 'bold')}: {health} (revision {found['revision']})"
    rounds, quorum, timers, unreadable = found["rounds"], found["quorum"], found["timers"], found["unreadable"]
    if rounds is not None:
        yield from ("", *_fact_lines(_rounds_facts(rounds), terminal))
        yield from _table(terminal, "members", _NODES, foremost(rounds["members"], rows), rows, of=rounds["members"])
        yield from _table(terminal, "missing", _MISSING_NODES, rounds["missing"], rows)
    if quorum is not None:
        yield from ("", *_fact_lines(_quorum_facts(quorum), terminal))
        of = quorum["replicas"]
        yield from _table(terminal, "replicas", _REPLICAS, foremost(of, rows), rows, of=of)
        yield from _table(terminal, "missing", _MISSING_REPLICAS, quorum["missing"], rows)
    if timers:
        yield ""
        now = concurrency.wall()  # they are on their hosts' clocks
        ends = {"EXPIRES": lambda one: clock(one["until"]), "LEFT": lambda one: round(one["until"] - now)}
        yield from _table(terminal, "timers", {**columns(_TIMERS), **ends, "OF": "after"}, timers, rows)
    if rounds is None and quorum is None:
        yield "it has neither a rendezvous nor quorums: only a store, timers or heartbeats"
    for bad in unreadable[:rows]:
        yield f"{terminal.word('unreadable')}: {neutral(bad['key'])}: {neutral(bad['problem'])}"
    yield from _more(len(unreadable), rows)


def _health(found: report.JobStatus) -> str:
    """In a word or two."""
    is_failed = found["rounds"] is not None and found["rounds"]["state"] == FAILED
    return "healthy" if found["healthy"] else "FAILED" if is_failed else "needs a look"


_LEASE: Final = "LEASE=lease_left OF=lease_ttl MEMBER=member"
_NODES: Final = f"RANK=rank HOST=host NODE=node STANDING=standing {_LEASE} REASON=said"
_MISSING_NODES: Final = "RANK=rank HOST=host NODE=node MEMBER=member CAUSE=cause"
_STEPS: Final = "STEP=step BEHIND=behind FAILED=commit_failures"
_REPLICAS: Final = f"RANK=rank REPLICA=replica_id STANDING=standing {_STEPS} {_LEASE} ADDRESS=address"
_MISSING_REPLICAS: Final = "RANK=rank REPLICA=replica_id MEMBER=member CAUSE=cause"
_TIMERS: Final = "RANK=rank HOST=host PID=pid SCOPE=scope STANDING=standing"


def _rounds_facts(rounds: report.RoundsStatus) -> Iterator[tuple[str, str, str]]:
    """Each with its title, a word that has a colour, and the rest."""
    most, size, number = rounds["max_nodes"], rounds["size"], rounds["number"]
    limits = spanned((rounds["min_nodes"], most), "node") if most else "no limits are known"
    last = f"round {number} with {counted(size, 'node')}" if number else "no round yet"
    yield "rendezvous", rounds["state"], f", {last} ({limits})"
    if size and not rounds["closed"]:
        yield "bootstrap", "", f"{rounds['address']}:{rounds['port']}"
    ends = (
        ("stop", rounds["stop"]),
        ("closed", rounds["closed"]),
        ("recalled", rounds["recalled"]),
        ("before", rounds["before"]),
    )
    yield from ((title, "", why) for title, why in ends if why)
    yield "next round", "", _next(rounds["next"])


def _quorum_facts(quorum: report.QuorumStatus) -> Iterator[tuple[str, str, str]]:
    which = f"quorum {quorum['id']} with {counted(quorum['size'], 'replica')} at step {quorum['max_step']}"
    yield "quorums", quorum["state"], f", {which} (min_replicas {quorum['min_replicas']})"
    yield from [("stop", "", quorum["stop"])] if quorum["stop"] else []
    yield "next quorum", "", _next(quorum["next"])


def _next(decision: report.NextDecision) -> str:
    rule = decision["rule"] and f" [{decision['rule']}]"
    return f"{_NEXT[decision['decision']]}: {decision['reason']}{rule}"


def _fact_lines(facts: Iterable[tuple[str, str, str]], terminal: Terminal) -> Iterator[str]:
    yield from (f"{title:<12}{terminal.word(word)}{neutral(text)}" for title, word, text in facts)


def _table(
    terminal: Terminal, title: str, what: str | Columns, shown: Sequence[Any], rows: int | None, of: Sequence[Any] = ()
) -> Iterator[str]:
    """A table of the first rows; if they are some of the members in `of`, with the counts of all standings."""
    count = len(of or shown)
    if not count:
        return
    standings = Counter(one["standing"] for one in of).most_common() if len(shown) < len(of) else ()
    counts = ", ".join(f"{number} {standing}" for standing, number in standings)
    yield f"{title} ({count}{counts and ': '}{counts}):"
    yield from (f"  {line}" for line in terminal.table(what, shown[:rows]))
    yield from _more(count, rows, "  ")


def _more(count: int, rows: int | None, indent: str = "") -> Iterator[str]:
    """Where not all are shown: how many are not."""
    if rows is not None and count > rows:
        yield f"{indent}... and {count - rows} more: --all shows them"


# -- watch ----------------------------------------------------------------------------------------------------------


def watch(options: argparse.Namespace) -> int:
    """Show the status of a job whenever it changes, until Ctrl-C.

    On a terminal it is one screen, otherwise a line for each change. Reports lost contact with etcd within a few
    seconds. The exit status is that of the last state shown.
    """
    terminal, rules = Terminal.of(options), shared.rules_of(options)
    with (
        _no_warnings(),
        client_of(options) as etcd,
        JobWatch(etcd, options.key_prefix, options.job, rules, every_timer=terminal.is_live) as following,
    ):
        try:
            while True:
                if (now := following.next()) is not None:
                    show_change(now, terminal)
        except KeyboardInterrupt:
            last = following.last
        if last is None or not last["connected"]:
            return shared.UNREACHABLE
        return shared.HEALTHY if last["status"]["healthy"] else shared.NOT_DONE


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep ftcoord's warnings off the screen, which shows the same facts itself."""
    package = logging.getLogger("ftcoord")
    before = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(before)


def show_change(now: report.Watched, terminal: Terminal) -> None:
    """Show what a watch reports: as a document, on a screen that is drawn again, or in a line."""
    time = clock(concurrency.wall())
    if terminal.format != "table":
        terminal.write(shared.to_line(now, terminal.format))
        return
    if not terminal.is_live:
        terminal.write(f"{time} {neutral(_summary(now))}\n")
        return
    lines = [f"{time}  watching; Ctrl-C ends it"]
    if not now["connected"]:
        lost = f"etcd does not answer, and what is below is old: {neutral(now['error'])}"
        lines.append(terminal.colour(lost, "bad"))
    lines += status_lines(now["status"], terminal, SCREEN)
    terminal.write(_CLEAR + "".join(f"{line}\n" for line in lines))


def _summary(now: report.Watched) -> str:
    """One line."""
    found = now["status"]
    if not now["connected"]:
        return f"etcd does not answer: {now['error']}"
    if not found["exists"]:
        return f"revision {found['revision']}; etcd has no key of this job"
    return "; ".join((f"revision {found['revision']}", *_parts(found)))


def _parts(found: report.JobStatus) -> Iterator[str]:
    yield _health(found)
    facts, named = list[tuple[str, str, str]](), list[tuple[str, str]]()
    if (rounds := found["rounds"]) is not None:
        facts += _rounds_facts(rounds)
        named += [("missing", one["host"]) for one in rounds["missing"]]
        named += [("draining", one["host"]) for one in rounds["members"] if one["standing"] == "draining"]
    if (quorum := found["quorum"]) is not None:
        facts += _quorum_facts(quorum)
        named += [("missing", one["replica_id"]) for one in quorum["missing"]]
    expired = [one for one in found["timers"] if one["standing"] == "expired"]
    named += [("timer expired", f"{one['scope']!r} of {one['host']} (pid {one['pid']})") for one in expired]
    named += [("unreadable", one["key"]) for one in found["unreadable"]]
    yield from (f"{title} {word}{text}" for title, word, text in facts)
    yield from (f"{what}: {name}" for what, name in named[:NAMED])


# -- history and why ------------------------------------------------------------------------------------------------


def history(options: argparse.Namespace) -> int:
    """Show what happened to a job, in etcd's order.

    Shows rounds and quorums, which members came and went, what failed and why. Exits with status 0 if there is a
    history.
    """
    terminal = Terminal.of(options)
    with client_of(options) as etcd:
        found = history_of(read_job(etcd, options.key_prefix, options.job, with_history=True))
    return terminal.show(found, history_lines(found, terminal), bool(found["events"]))


def history_lines(found: report.JobHistory, terminal: Terminal) -> Iterable[str]:
    """A history for people."""
    if not found["events"]:
        return [f"etcd has no history of a job {neutral(repr(found['job']))}: it never began, or its run_ttl is over"]
    made: Columns = {
        "REVISION": "revision",
        "TIME": lambda one: clock(one["at"], "%m-%d %H:%M:%S"),
        **columns("GROUP=group NUMBER=number EVENT=kind"),
        "REASON": lambda one: f"{one['who']}: {one['reason']}" if one["worker"] is not None else one["reason"],
    }
    return terminal.table(made, found["events"], widest=None)


def why(options: argparse.Namespace) -> int:
    """Explain a job's last interruption: the first cause, what was lost, what to do.

    Explains, in one paragraph, what ended a job's last round or changed its quorum. Exits with status 0 if the job is
    healthy now, or has finished.
    """
    terminal, rules = Terminal.of(options), shared.rules_of(options)
    with client_of(options) as etcd:
        keys = read_job(etcd, options.key_prefix, options.job, with_history=True)
        past = explain(status_of(keys, rules), keys)
    lines = why_lines(past, terminal) if keys.exists else [report.no_such_job(options.job)]
    return terminal.show(past, lines, past["healthy"])


def why_lines(found: report.Explanation, terminal: Terminal) -> Iterable[str]:
    """The explanation for people."""
    health = terminal.colour("healthy", "good") if found["healthy"] else terminal.colour("needs a look", "bad")
    yield f"{terminal.colour(neutral(found['job']), 'bold')}: {health}"
    yield from wrap(neutral(report.paragraph(found)), LINE_WIDTH, break_on_hyphens=False)


# -- doctor -----------------------------------------------------------------------------------------------------------


def doctor(options: argparse.Namespace) -> int:
    """Check whether an etcd cluster is fit for jobs.

    Checks endpoints, version, leader, alarms, space, latency, TLS, rights below the key prefix, a lease and a
    watch, and prints what to do about each problem. Writes no keys: it measures write latency by granting and revoking
    a lease. Exits with status 0 if there is no problem.
    """
    from ftcoord.etcd.addresses import discovered
    from ftcoord.operator.doctor import examine

    terminal = Terminal.of(options)
    found, is_there = examine(discovered(shared.etcd_config(options)), options.key_prefix)
    code = terminal.show(found, _finding_lines(found, terminal), found["healthy"])
    return code if is_there else shared.UNREACHABLE


def _finding_lines(found: report.Examination, terminal: Terminal) -> Iterator[str]:
    for one in found["findings"]:
        level = f"{one['level']:<8}"
        yield f"{terminal.word(level)} {neutral(one['about'])}: {neutral(one['found'])}"
        if one["do"]:
            yield f"{'':<8} -> {neutral(one['do'])}"
