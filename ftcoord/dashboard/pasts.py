"""What the page tells of a job's past: the same as `ftcoord history` and `ftcoord why`."""

from __future__ import annotations

from ftcoord.etcd.api import EtcdCalls
from ftcoord.operator.past import explain, tell_history
from ftcoord.operator.reading import read_events, read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import Explanation, JobHistory


def read_past(etcd: EtcdCalls, key_prefix: str, rules: Rules, job: str) -> tuple[JobHistory, Explanation]:
    """The history of a job, and why it is as it is. Raises EtcdError."""
    status = tell_job(read_job(etcd, key_prefix, job), rules)
    events = read_events(etcd, key_prefix, job)
    return tell_history(job, *events), explain(status, *events)
