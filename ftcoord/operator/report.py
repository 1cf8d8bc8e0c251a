"""The reports for operators, which are the commands' JSON as it is. docs/cli.md describes each field.

Fields are only added; removing one, or changing its meaning, needs another `FORMAT`. A report is not changed once it is
made.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar

from ftcoord.core.rendezvous_records import WorkerFailure

FORMAT: Final = 1
"""The version of the format, in each document."""

UNCOUNTED: Final = frozenset({"refused", "replaced", "draining"})
"""The standings of members that live, and that no decider counts for the next round or quorum."""

R = TypeVar("R")


def made_of(record: object, kind: type[R], **others: Any) -> R:
    """A report of this kind: the fields in `others`, and all others from a record, which has them under the same
    names."""
    made: Any = {name: others[name] if name in others else getattr(record, name) for name in kind.__annotations__}
    return made  # type: ignore[no-any-return]


Decision: TypeAlias = Literal["wait", "publish", "withheld"]


class NextDecision(TypedDict):
    """What a decider that sees these keys decides now.

    Args:
        decision: it waits, publishes a record, or withholds one, because the keys are not ftcoord's or contradict the
            protocol.
        reason: why, in the decider's words, or what somebody has to do about it.
        rule: the rule of docs/protocol.md that it follows; empty if there is none.
    """

    decision: Decision
    reason: str
    rule: str


class Unreadable(TypedDict):
    """A key that does not count, because this version of ftcoord cannot read it, and why."""

    key: str
    problem: str


class NodeStatus(TypedDict):
    """A live member of a rendezvous.

    Args:
        rank: in the last round; None without a seat.
        node: the agent's id, through all of its leases.
        host: its machine.
        member: its member id, which is its lease, in hexadecimal.
        standing: running, called back, seating, seated, waiting, spare, away, draining, refused, replaced or
            over.
        said: why it leaves, or how its worker failed; empty for neither.
        since_revision: etcd's revision at which it became a member.
        lease_left, lease_ttl: seconds; None if they were not asked for.
    """

    rank: int | None
    node: str
    host: str
    member: str
    standing: str
    said: str
    since_revision: int
    lease_left: int | None
    lease_ttl: int | None


class MissingNode(TypedDict):
    """A node that has a seat in the last round and is gone. `cause` is empty while none is known."""

    rank: int
    node: str
    host: str
    member: str
    cause: str


class RoundsStatus(TypedDict):
    """The rendezvous of a run.

    Args:
        state: empty, forming, seating, running, stopping (`stop` is asked), finished, failed, closed, stopped or
            unreadable.
        healthy: whether the round runs with all of its nodes, or the run has finished.
        number: the last round's number; 0 before the first.
        size: how many seats it has.
        ready: whether all were taken.
        min_nodes, max_nodes: the limits that apply; 0 while none do.
        address, port: the round's bootstrap address.
        recalled, closed, outcome, before: see `RoundHead` in `core.rendezvous_records`.
        next: what the decider decides now.
        members: the live ones: those with a rank first, then by age.
        missing: nodes that have a seat and are gone, by rank.
        stop: why all ranks are to stop at one step; empty while they are not.
    """

    state: str
    healthy: bool
    number: int
    size: int
    ready: bool
    min_nodes: int
    max_nodes: int
    address: str
    port: int
    recalled: str
    closed: str
    outcome: str
    before: str
    next: NextDecision
    members: list[NodeStatus]
    missing: list[MissingNode]
    stop: str


class ReplicaStatus(TypedDict):
    """A live member of a job's quorums.

    Args:
        rank: in the last quorum; None without a seat.
        replica_id: its name.
        member: its member id, which is its lease, in hexadecimal.
        standing: training (in the last quorum, and not asking), asking, idle (neither) or replaced (a newer member
            has its name).
        step: the step of its last request.
        behind: how many steps others of the quorum are ahead: it heals from one of them.
        commit_failures, shrink_only, world_size, address: of its last request.
        since_revision: etcd's revision at which it became a member.
        lease_left, lease_ttl: seconds; None if they were not asked for.
        heals_from: the replica from which its rank 0 heals, while it is behind; else empty.
        store_address: of its last request.
    """

    rank: int | None
    replica_id: str
    member: str
    standing: str
    step: int
    behind: int
    commit_failures: int
    shrink_only: bool
    world_size: int
    address: str
    since_revision: int
    lease_left: int | None
    lease_ttl: int | None
    heals_from: str
    store_address: str


class MissingReplica(TypedDict):
    """A replica that has a seat in the last quorum and is gone. `cause` is empty while none is known."""

    rank: int
    replica_id: str
    member: str
    cause: str


class QuorumStatus(TypedDict):
    """The quorums of a job.

    Args:
        state: empty, training, forming (one is seen to ask), idle (no quorum yet) or unreadable; of `ftcoord.elastic`
            also stopping (`stop` is asked), finished and stopped.
        healthy: whether all replicas of the last quorum are alive, enough for the next one, and commit their steps.
        number, id: the last quorum's; 0 before the first.
        size: how many replicas it has.
        max_step: the highest step in it.
        created: when it was decided, on the decider's clock, in seconds since 1970; for people. 0 before the first.
        min_replicas: the value that this was judged by: the largest one in the records of live replicas.
        next: what the decider decides now.
        replicas: the live members: those with a rank first, then by age.
        missing: replicas that have a seat and are gone, by rank.
        stop: why the members of an elastic run are to stop at one step; empty while they are not.
    """

    state: str
    healthy: bool
    number: int
    id: int
    size: int
    max_step: int
    created: float
    min_replicas: int
    next: NextDecision
    replicas: list[ReplicaStatus]
    missing: list[MissingReplica]
    stop: str


class TimerStatus(TypedDict):
    """An expiration timer that a worker holds.

    Args:
        host: the name of the worker's host.
        pid: the worker's pid on that host.
        rank: the worker's rank in its world; None if it has none.
        scope: the scope that the worker is in.
        standing: running or expired (a timer server has marked it, and ends the worker).
        after: seconds that the worker may be there in all.
        until: when it expires, on the wall clock of the worker's host, in seconds since 1970. No decision depends on
            it.
    """

    host: str
    pid: int
    rank: int | None
    scope: str
    standing: str
    after: float
    until: float


class JobStatus(TypedDict):
    """The status of one job.

    Args:
        format: FORMAT.
        job: its id.
        revision: etcd's revision of all of this.
        exists: whether etcd has any key of it.
        healthy: whether it exists and nothing needs attention.
        rounds: None for a job without a rendezvous.
        quorum: None for a job without quorums.
        unreadable: keys that do not count.
        timers: expiration timers that workers hold, the first to expire first.
    """

    format: int
    job: str
    revision: int
    exists: bool
    healthy: bool
    rounds: RoundsStatus | None
    quorum: QuorumStatus | None
    unreadable: list[Unreadable]
    timers: list[TimerStatus]


class Watched(TypedDict):
    """What a watch reports about a job when something has changed.

    Args:
        format: FORMAT.
        job: its id.
        connected: whether etcd answers. While it does not, `status` is the last known one.
        error: why it does not answer; empty while it does.
        status: without leases. Its timers may be several seconds old.
    """

    format: int
    job: str
    connected: bool
    error: str
    status: JobStatus


class JobLine(TypedDict):
    """One job of a list.

    Args:
        job: its id.
        state: that of its rounds, or else of its quorums; `degraded` if members are missing, or commits fail again and
            again; `training` also while replicas ask for the next quorum; `other` if it has neither.
        round, nodes: the last round's number and size; None without a rendezvous.
        quorum, replicas: the last quorum's id and size; None without quorums.
        members: the live members of both that count.
        note: why the run is over, or why its last round was recalled, or why the round before that ended; or what it
            waits for; empty for none of these.
    """

    job: str
    state: str
    round: int | None
    nodes: int | None
    quorum: int | None
    replicas: int | None
    members: int
    note: str


class JobList(TypedDict):
    """The jobs of one etcd below one key prefix, in the byte order of their ids as spelled in keys."""

    format: int
    key_prefix: str
    jobs: list[JobLine]


class Done(TypedDict):
    """What a command did, or found already done.

    Args:
        format: FORMAT.
        job: the job that it was about; empty for none.
        did: what it did, each a line.
        left: what it left alone, and why, each a line.
    """

    format: int
    job: str
    did: list[str]
    left: list[str]


class Finding(TypedDict):
    """One thing that was examined.

    Args:
        level: ok, hint (it works, but could be better) or problem.
        about: what was examined.
        found: its state.
        do: what to do about it; empty for nothing.
    """

    level: str
    about: str
    found: str
    do: str


class Examination(TypedDict):
    """The findings about an etcd cluster, problems first. `healthy` if there are none."""

    format: int
    healthy: bool
    findings: list[Finding]


class JobEvent(TypedDict):
    """Something that happened to a job.

    Args:
        revision: etcd's revision at which it was written. Events written together have the same.
        group: rendezvous or quorums.
        kind: round, started, recalled, closed, quorum, failed, expired, died, left, lost or ordered.
        number: the round's number, or the quorum's id.
        who: the host or replica that it is about; empty for all of them.
        node: the agent's id, or the replica's id; empty for all of them.
        reason: why.
        noted: etcd's revision at which it was first written, as far as its writer knows; 0 for the event's own.
        worker: the worker's failure, for failed and expired.
        by: its writer.
        at: when, on the writer's clock, in seconds since 1970. Clocks of hosts differ: no order depends on it.
    """

    revision: int
    group: str
    kind: str
    number: int
    who: str
    node: str
    reason: str
    noted: int
    worker: WorkerFailure | None
    by: str
    at: float


class JobHistory(TypedDict):
    """The history of a job, oldest first, as far as it is kept."""

    format: int
    job: str
    events: list[JobEvent]


class Explanation(TypedDict):
    """Why a job is in its present state.

    Args:
        format: FORMAT.
        job: its id.
        healthy: whether nothing needs attention.
        happened: what ended its last round, or changed its quorum; empty for nothing.
        first: the first cause of that; None if there is none, or it is unknown.
        followed: how many more members failed or left then, as far as the history has them.
        lost: what was lost by it.
        now: what the job does now.
        do: what to do; empty for nothing.
    """

    format: int
    job: str
    healthy: bool
    happened: str
    first: JobEvent | None
    followed: int
    lost: str
    now: str
    do: str


def paragraph(found: Explanation) -> str:
    """All of it."""
    return " ".join(part for part in (found["happened"], found["lost"], found["now"], found["do"]) if part)


def no_such_job(job: str) -> str:
    """The text for a job that etcd does not have. Characters that could move a terminal's cursor are escaped."""
    return f"etcd has no key of a job {job!r}: it never began, or its run_ttl is over; `ftcoord ls` lists all"
