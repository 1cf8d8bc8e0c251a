"""Every key of the protocol, in one place. `docs/protocol.md` describes them; no other module spells a key.

A function that names one key returns a str; a function that names several returns a Span. `prefix` is the prefix of a
group's keys: a run's (`run_prefix`), or that of a job's quorums (`quorum_prefix`), without a trailing slash. The prefix
of a store ends with a slash, because the user of an EtcdStore chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

KEY_PREFIX: Final = "/ftcoord/v2"
"""The default `key_prefix`: all keys of ftcoord are below it."""
OLDER_KEY_PREFIX: Final = "/ftcoord/v1"
"""The default of releases whose records this one cannot read."""
DEFAULT_STORE_PREFIX: Final = f"{KEY_PREFIX}/@store/"
"""The prefix of an EtcdStore whose user gives none. No run has keys there: an `@` in a run's id is written `%40`."""
_ID_DIGITS: Final = 16
"""Digits of a member's id, which is its lease."""
_QUORUM: Final = "quorum"
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Span:
    """The keys of one operation: one key, all keys with a prefix, or all keys from one key up to, but not including,
    another.

    Args:
        start: the key; or the prefix; or the first key.
        is_prefix: whether the span is all keys that begin with `start`.
        stop: if not empty, the key before which the span ends, in byte order.
    """

    start: str
    is_prefix: bool = False
    stop: str = ""

    @property
    def end(self) -> bytes:
        """etcd's `range_end`: empty for one key, else the first key after the span."""
        if self.stop:
            return encode_key(self.stop)
        if not self.is_prefix:
            return b""
        start = encode_key(self.start).rstrip(b"\xff")
        return start[:-1] + bytes([start[-1] + 1]) if start else b"\0"

    def __contains__(self, key: str) -> bool:
        if self.stop:
            return encode_key(self.start) <= encode_key(key) < self.end
        return key.startswith(self.start) if self.is_prefix else key == self.start


def encode_key(key: str) -> bytes:
    """The bytes of a key; `decode_key` returns the same key, whatever bytes others wrote."""
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    """The key as text; bytes that are not UTF-8 are kept as surrogates."""
    return key.decode("utf-8", "surrogateescape")


def run_prefix(key_prefix: str, run_id: str) -> str:
    """The prefix of a run. Its id is percent-encoded, so no run's keys are below another's."""
    return f"{key_prefix}/{quote(run_id, safe='')}"


def run_span(prefix: str) -> Span:
    """All keys of a run, by its prefix."""
    return Span(f"{prefix}/", is_prefix=True)


def runs_span(key_prefix: str) -> Span:
    """The keys of all runs, and of stores that belong to no run."""
    return Span(f"{key_prefix}/", is_prefix=True)


def branch_of(key_prefix: str, key: str) -> Span:
    """All keys of the run, or store, that this key belongs to; the key itself if it belongs to none."""
    start = runs_span(key_prefix).start
    name, slash, _ = key.removeprefix(start).partition("/")
    return Span(f"{start}{name}{slash}", is_prefix=bool(slash))


def run_id_of(key_prefix: str, key: str) -> str | None:
    """The id of the run that a key belongs to; None if it belongs to none."""
    name, slash, _ = key.removeprefix(runs_span(key_prefix).start).partition("/")
    run_id = unquote(name) if slash and name.isascii() else ""
    return run_id if run_id and quote(run_id, safe="") == name else None


# -- a group: its members, and what they decided --------------------------------------------------------------------


def members_span(prefix: str) -> Span:
    """The keys of all members of a group."""
    return Span(f"{prefix}/members/", is_prefix=True)


def member_key(prefix: str, member: str) -> str:
    """The key of one member, by its id."""
    return f"{members_span(prefix).start}{member}"


def member_id(lease: int) -> str:
    """The id of the member with this lease: 16 hex digits."""
    return f"{lease:0{_ID_DIGITS}x}"


def member_of(key: str) -> str:
    """The id of the member that this key belongs to."""
    return key.rpartition("/")[2]


def decider_key(prefix: str) -> str:
    """The key of a group's office: it names who decides."""
    return f"{prefix}/decider"


def decided_key(prefix: str) -> str:
    """The key of a group's decided record."""
    return f"{prefix}/decided"


def record_span(prefix: str) -> Span:
    """A decided record and the office. No other key of a group lies between these."""
    return Span(decided_key(prefix), stop=f"{decider_key(prefix)}\0")


def deaths_span(prefix: str) -> Span:
    """The causes of death of processes that held leases here."""
    return Span(f"{prefix}/deaths/", is_prefix=True)


def death_key(prefix: str, member: str) -> str:
    """The cause of death of the process that was this member, or held the lease with this `member_id`."""
    return f"{deaths_span(prefix).start}{member}"


def events_span(prefix: str) -> Span:
    """The history of a run, or of a job's quorums."""
    return Span(f"{prefix}/events/", is_prefix=True)


def event_key(prefix: str, revision: int, writer: str, count: int) -> str:
    """The key of one event, which is unique.

    Args:
        revision: etcd's highest revision known to the writer, so that keys are nearly in the order of time.
        writer: a name that is unique to the events of one transaction.
        count: how many events come before it there.
    """
    return f"{events_span(prefix).start}{revision:0{_ID_DIGITS}x}-{writer}-{count:06}"


def is_event_key(key: str) -> bool:
    """Whether a key below `events_span` can be an event's."""
    digits, dash, _ = key.rpartition("/")[2].partition("-")
    return bool(dash) and len(digits) == _ID_DIGITS and not set(digits) - _HEX


# -- rounds and their stores ------------------------------------------------------------------------------------------


# Rounds are named `<number>-<token>`: see `core.rendezvous_records`.


def fence_key(prefix: str, name: str) -> str:
    """The fence of a round: it exists while the round's store may be written to."""
    return f"{prefix}/rounds/{name}"


def all_seats_span(prefix: str) -> Span:
    """Who sits where in the rounds of a run."""
    return Span(f"{prefix}/seats/", is_prefix=True)


def seats_span(prefix: str, name: str) -> Span:
    """Who sits where in a round."""
    return Span(f"{all_seats_span(prefix).start}{name}/", is_prefix=True)


def chunk_key(prefix: str, name: str, chunk: int) -> str:
    """One chunk of that."""
    return f"{seats_span(prefix, name).start}{chunk}"


def round_store_prefix(prefix: str, name: str) -> str:
    """The prefix of a round's store."""
    return f"{prefix}/store/{name}/"


def backend_state_key(prefix: str) -> str:
    """The key of the state of torch's own rendezvous, for `etcd-v3-dynamic`."""
    return f"{prefix}/dynamic/state"


def backend_store_prefix(prefix: str) -> str:
    """The prefix of the store of `etcd-v3-dynamic`."""
    return f"{prefix}/dynamic/store/"


# -- an EtcdStore: its prefix ends with a slash --------------------------------------------------------------------


def store_values_span(store: str) -> Span:
    """The values of a store. The user's key follows the prefix, unchanged."""
    return Span(f"{store}data/", is_prefix=True)


def store_queues_span(store: str) -> Span:
    """The items of all queues of a store."""
    return Span(f"{store}queues/", is_prefix=True)


def store_queue_span(store: str, key: str) -> Span:
    """The items of one queue, the oldest first."""
    return Span(f"{store_queues_span(store).start}{quote(key, safe='')}/", is_prefix=True)


def store_counts_span(store: str) -> Span:
    """The counts of changes, one per client of a store: they resolve lost answers."""
    return Span(f"{store}ops/", is_prefix=True)


# -- quorums -------------------------------------------------------------------------------------------------------


def quorum_prefix(key_prefix: str, job: str) -> str:
    """The prefix of a job's quorums."""
    return f"{run_prefix(key_prefix, job)}/{_QUORUM}"


def elastic_store_prefix(prefix: str) -> str:
    """The prefix of the store of a job whose quorums are the groups of `ftcoord.elastic`."""
    return f"{prefix.removesuffix(f'/{_QUORUM}')}/elastic/"


def elastic_run_span(prefix: str) -> Span:
    """The keys about such a run as a whole: these two."""
    return Span(f"{store_values_span(elastic_store_prefix(prefix)).start}run/", is_prefix=True)


def elastic_stop_key(prefix: str) -> str:
    """Why its members are to stop at an agreed step; absent while they are not."""
    return f"{elastic_run_span(prefix).start}stop"


def elastic_over_key(prefix: str) -> str:
    """How it ended last: finished or stopped, a colon, and why."""
    return f"{elastic_run_span(prefix).start}over"


def elastic_end_key(prefix: str, number: int) -> str:
    """How a group of it ended: the first who writes it decides."""
    return f"{elastic_ends_span(prefix).start}{number}"


def elastic_ends_span(prefix: str) -> Span:
    """How its groups ended, by their numbers."""
    return Span(f"{store_values_span(elastic_store_prefix(prefix)).start}ends/", is_prefix=True)


def kills_span(prefix: str) -> Span:
    """The kill orders to managers of a job."""
    return Span(f"{prefix}/kill/", is_prefix=True)


def kill_key(prefix: str, member: str) -> str:
    """The kill order to the manager that is, or was, this member."""
    return f"{kills_span(prefix).start}{member}"


# -- timers and heartbeats ------------------------------------------------------------------------------------------


def timers_span(prefix: str, host: str = "") -> Span:
    """The timers of a run, or those of one of its hosts."""
    return Span(f"{prefix}/timers/{host}/" if host else f"{prefix}/timers/", is_prefix=True)


def timers_key(prefix: str, host: str, lease: int) -> str:
    """The timers of the worker with this lease."""
    return f"{timers_span(prefix, host).start}{lease:016x}"


def expired_key(prefix: str, host: str, token: int) -> str:
    """The mark of a timer that has expired."""
    return f"{timers_span(prefix, host).start}expired/{token:016x}"


def is_expired_key(key: str) -> bool:
    """Whether a key below `timers_span` is a mark, and no worker's."""
    return key.rpartition("/")[0].endswith("/expired")


def heartbeats_span(prefix: str) -> Span:
    """The heartbeats of a run."""
    return Span(f"{prefix}/heartbeats/", is_prefix=True)


def heartbeat_key(prefix: str, name: str, lease: int) -> str:
    """The heartbeat of a name, from the process with this lease."""
    return f"{heartbeats_span(prefix).start}{quote(name, safe='')}/{lease:016x}"
