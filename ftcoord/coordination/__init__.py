"""torchft's coordination API (`torchft.coordination`), with all of its state in etcd. See docs/torchft.md."""

from ftcoord.coordination.gateway import Gateway
from ftcoord.coordination.lighthouse import LighthouseClient, LighthouseServer
from ftcoord.coordination.manager import ManagerServer
from ftcoord.coordination.manager_client import ManagerClient
from ftcoord.coordination.observer import Observer
from ftcoord.coordination.types import Quorum, QuorumMember, QuorumResult, Timestamp

__all__ = [
    "Gateway",
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Observer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
]
