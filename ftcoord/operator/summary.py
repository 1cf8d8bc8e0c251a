"""A line about each job of an etcd cluster."""

from __future__ import annotations

from ftcoord.etcd.api import EtcdCalls
from ftcoord.operator.listing import job_ids
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import FORMAT, UNCOUNTED, JobLine, JobList, JobStatus, QuorumStatus, RoundsStatus


def read_jobs(etcd: EtcdCalls, key_prefix: str) -> JobList:
    """All jobs below a key prefix. Raises EtcdError.

    Costs a few requests for each, and its members; the contents of their stores are skipped.
    """
    return JobList(FORMAT, key_prefix, tuple(_read_line(etcd, key_prefix, job) for job in job_ids(etcd, key_prefix)))


def _read_line(etcd: EtcdCalls, key_prefix: str, job: str) -> JobLine:
    return tell_line(tell_job(read_job(etcd, key_prefix, job), Rules()))


def tell_line(status: JobStatus) -> JobLine:
    """The line about a job."""
    rounds, quorum = status.rounds, status.quorum
    members = [one.standing for part in (rounds and rounds.members, quorum and quorum.replicas) for one in part or ()]
    state, note = _rounds_line(rounds) if rounds else _quorum_line(quorum) if quorum else ("other", "")
    return JobLine(
        status.job,
        state,
        rounds.number if rounds else None,
        rounds.size if rounds else None,
        quorum.id if quorum else None,
        quorum.size if quorum else None,
        sum(standing not in UNCOUNTED for standing in members),
        note,
    )


def _rounds_line(rounds: RoundsStatus) -> tuple[str, str]:
    state = "degraded" if rounds.missing and rounds.state in ("running", "seating") else rounds.state
    return state, rounds.closed or rounds.recalled or rounds.before or _why_not(rounds)


def _quorum_line(quorum: QuorumStatus) -> tuple[str, str]:
    """Between two steps of a job that trains some of its replicas ask: that is no news."""
    trains = quorum.id and quorum.state in ("training", "forming")
    state = quorum.state if not trains else "training" if quorum.healthy else "degraded"
    return state, _why_not(quorum)


def _why_not(part: RoundsStatus | QuorumStatus) -> str:
    return "" if part.healthy else part.next.reason
