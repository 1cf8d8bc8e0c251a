"""torchft's coordination API (`torchft.coordination`), with all of its state in etcd. See docs/torchft.md.

- `LighthouseServer`, `LighthouseClient`: the rules of a job's quorums, and taking part in them.
- `ManagerServer`, `ManagerClient`: a replica group in the quorums, and one rank's calls to it.
- `Quorum`, `QuorumMember`, `QuorumResult`, `Timestamp`: the values that they return.
- `Observer`: follows a job without taking part.
- `Gateway`: a lighthouse for torchft's own native classes.
"""

from ftcoord.coordination.api import Quorum, QuorumMember, Timestamp
from ftcoord.coordination.gateway import Gateway
from ftcoord.coordination.lighthouse import LighthouseClient, LighthouseServer, Observer
from ftcoord.coordination.manager import ManagerServer
from ftcoord.coordination.manager_client import ManagerClient
from ftcoord.core.recovery import QuorumResult

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
