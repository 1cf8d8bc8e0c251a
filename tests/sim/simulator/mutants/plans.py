"""Histories that bring what a planted fault needs to do harm, where hardly a seed does."""

from __future__ import annotations

import random
from typing import Final

from simulator.found import FOUND
from simulator.plan import Network, Plan, PlannedFault

OPTIONS: Final = {"join_timeout": 1.0, "min_replicas": 1.0}

TIMES: Final = (3.0, 9.1, 15.2, 21.3, 27.4, 33.5)

_DRAWS: Final = random.Random(0)
ROSTERS_ARE_DELETED: Final = tuple(
    Plan(
        0,
        "quorums",
        {"trainer": 3},
        tuple(PlannedFault(at, "delete_key", _DRAWS.randrange(30)) for at in TIMES),
        Network(delay=0.4),
        38.0,
        options=OPTIONS,
    )
    for _ in range(60)
)
"""Somebody deletes a quorum's roster, and a decision is on its way that does not write it anew. Which key a draw means
depends on all keys that are there, so one plan would bring this only until a key is added; each third of these does."""
CUT_OFF_WHILE_ETCD_IS_WIPED: Final = Plan(
    0,
    "restores",
    {"agent": 3, "candidate": 0},
    (PlannedFault(10.0, "cut", 6), PlannedFault(21.0, "wipe", 7)),
    Network(),
    26.0,
    nnodes=(2, 3),
    options=OPTIONS,
)
"""The others form a round without a node that is cut off; then etcd loses that, and then the node is back."""
CUT_OFF_WHILE_ETCD_IS_RESTORED: Final = Plan(
    0,
    "restores",
    {"agent": 3, "trainer": 2, "candidate": 0},
    (PlannedFault(12.2, "worker_fails", 1), PlannedFault(14.2, "cut", 22), PlannedFault(14.3, "restore", 5)),
    Network(),
    16.5,
    nnodes=(2, 3),
    options=OPTIONS,
)
"""A node knows of a round that etcd loses while the node is cut off; and until it is back others, who ask for quorums,
have made as many revisions as were lost."""
ALL_ARE_NEW_AND_THE_RECORD_IS_GONE: Final = Plan(
    0,
    "rounds",
    {"agent": 2},
    tuple(
        map(
            PlannedFault.parse,
            (
                "4.033:worker_fails:23714",
                "10.004:slow:44508",
                "10.516:worker_fails:25674",
                "12.607:kill:33674",
                "14.374:slow:20280",
                "18.561:delete_key:45682",
                "22.000:worker_fails:19751",
                "24.551:delete_key:6341",
                "25.518:kill:7575",
                "28.866:leader:19432",
                "33.331:garbage:29976",
                "33.869:kill:43063",
                "38.063:kill:25557",
            ),
        )
    ),
    Network(0.05, 0.05, 0.05, 0.05, 0.05, 0.3),
    40.95850258309669,
    nnodes=(1, 3),
    options=OPTIONS,
)
"""Those who knew of earlier rounds are dead, and somebody has deleted the record."""
A_PEER_DIES_WHILE_ANSWERS_ARE_LOST: Final = Plan(
    0,
    "rounds",
    {"agent": 3},
    (PlannedFault(12.0, "cut_answers", 20), PlannedFault(13.0, "kill", 36)),
    Network(),
    14.5,
    nnodes=(2, 3),
    options=OPTIONS,
)
"""A node hears of the only decision of that time when its watch goes on."""
THE_LAST_DECISION_IS_MISSED: Final = FOUND["a recall that an agent's watch missed, and that no other decision followed"]
RESTORED_BEFORE_AND_AFTER_ALL_ASK: Final = FOUND[
    "what a node asked between two restores, where the second backup has an older ask at a higher revision"
]
DECIDED_BY_ONE_THAT_NO_LONGER_ASKS: Final = FOUND["a quorum whose decider saw late that it no longer asked"]
DECIDED_TWICE_AND_DELETED_BETWEEN: Final = FOUND[
    "a job's first quorum that two replicas decided, where somebody had deleted the first one's record meanwhile"
]
LEFT_BEHIND_AND_THE_RECORD_IS_GONE: Final = FOUND[
    "the record of a round that vanished, with a decider that was stopped since an earlier round"
]
A_HOST_DIES_AND_THE_RECORD_IS_GONE: Final = FOUND[
    "a host that died, and a node that came back to its seat when somebody had deleted the record"
]
AN_ID_STANDS_FOR_OTHERS: Final = FOUND[
    "an id that stands for other replicas, as only a replica knows that was stopped meanwhile"
]
JOINS_BEHIND_A_DELETED_KEY: Final = FOUND[
    "a node that joins behind one whose key somebody has deleted, when nobody else decides"
]
A_LARGE_ROUND_IS_LOST_WITH_ITS_ROLL: Final = FOUND[
    "a large round that etcd lost with its roll, while its nodes took their seats"
]
BACK_UNDER_ANOTHER_LEASE_AND_THE_RECORD_IS_GONE: Final = FOUND[
    "a round whose record somebody deleted, with a decider that is there again under another lease"
]
TWO_ROUNDS_HAVE_ONE_NUMBER: Final = FOUND["two rounds with one number, of which etcd has forgotten both"]
