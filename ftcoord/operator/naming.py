"""Which members a name on the command line refers to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftcoord.core.layout import member_of
from ftcoord.core.quorum_records import parse_replica
from ftcoord.core.rendezvous_records import parse_join_request
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import GroupKeys, JobKeys


@dataclass(frozen=True, slots=True)
class NamedMember:
    """A live member of a job.

    Args:
        prefix: its group's prefix.
        kv: its key.
        owner: the owner of its leases: the node's id, or the replica's name.
        host: its machine, usually with the pid of its agent, as `host7 (pid 4711)`; empty if it does not say.
        group: rendezvous or quorums.
    """

    prefix: str
    kv: KeyValue
    owner: str
    host: str
    group: str

    @property
    def id(self) -> str:
        return member_of(self.kv.key)

    @property
    def machine(self) -> str:
        """The host's name alone; empty if it does not say."""
        return self.host.partition(" (pid ")[0]

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"{self.owner}{where} (member {self.id} of the {self.group})"


def members_called(keys: JobKeys, name: str) -> list[NamedMember]:
    """The members with this member id, node id, replica id or host, oldest first.

    A host may be named without the pid of its agent. A replica that has torchft's id, `name:uuid`, may be named without
    the uuid, or by its beginning; never by a part of the name, since `train_1` is not `train_10`.
    """
    members, begins = [*_members(keys)], name if ":" in name else f"{name}:"
    found = [one for one in members if name in (one.id, one.owner, one.host, one.machine) and name]
    return found or [one for one in members if one.group == "quorums" and one.owner.startswith(begins) and name]


def owners(members: list[NamedMember]) -> set[tuple[str, str]]:
    """The owners of these members. An owner may have several leases; several owners may share a host's name."""
    return {(one.group, one.owner) for one in members}


def _members(keys: JobKeys) -> Iterator[NamedMember]:
    def node(kv: KeyValue) -> tuple[str, str]:
        ask = parse_join_request(kv.key, kv.value)
        return ask.node, ask.host

    def replica(kv: KeyValue) -> tuple[str, str]:
        return parse_replica(kv.key, kv.value).request.replica_id, ""

    yield from _of(keys.rounds, "rendezvous", node)
    yield from _of(keys.quorum, "quorums", replica)


def _of(keys: GroupKeys, group: str, read: Callable[[KeyValue], tuple[str, str]]) -> Iterator[NamedMember]:
    for kv in keys.members():
        try:
            owner, host = read(kv)
        except StateError:
            owner, host = "", ""  # it lives under a lease all the same, and has an id
        yield NamedMember(keys.prefix, kv, owner, host, group)
