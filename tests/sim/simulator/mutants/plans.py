"""Histories that bring what a planted fault needs to do harm, where hardly a seed does. One that was found with other
code may need another seed today, for other moments."""

from __future__ import annotations

import random
from dataclasses import replace
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
CUT_OFF_WHILE_ETCD_IS_RESTORED: Final = Plan(
    0,
    "restores",
    {"agent": 3, "trainer": 2},
    (PlannedFault(12.2, "worker_fails", 1), PlannedFault(14.2, "cut", 22), PlannedFault(14.3, "restore", 5)),
    Network(),
    16.5,
    nnodes=(2, 3),
    options=OPTIONS,
)
"""A node knows of a round that etcd loses while the node is cut off; and until it is back others, who ask for quorums,
have made as many revisions as were lost."""
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
SENT_BEFORE_A_RESTORE: Final = replace(FOUND["a decision that was sent before a restore, and came after it"], seed=10)
DECIDED_TWICE_AND_DELETED_BETWEEN: Final = FOUND[
    "a job's first quorum that two replicas decided, where somebody had deleted the first one's record meanwhile"
]
LEFT_BEHIND_AND_THE_RECORD_IS_GONE: Final = FOUND[
    "the record of a round that vanished, with a decider that was stopped since an earlier round"
]
A_HOST_DIES_AND_THE_RECORD_IS_GONE: Final = FOUND[
    "a host that died, and a node that came back to its seat when somebody had deleted the record"
]
AN_ID_STANDS_FOR_OTHERS: Final = replace(
    FOUND["a third id that stands for other replicas, as one that does not decide knows"], seed=10
)
JOINS_BEHIND_A_DELETED_KEY: Final = replace(
    FOUND["a node that joins behind one whose key somebody has deleted, when nobody else decides"], seed=64
)
A_LARGE_ROUND_IS_LOST_WITH_ITS_ROLL: Final = replace(
    FOUND["a large round that etcd lost with its roll, while its nodes took their seats"],
    seed=13,
    cast={"agent": 2},
    faults=tuple(
        map(
            PlannedFault.parse,
            (
                "3.449:slow:34103",
                "3.601:restore:58643",
                "4.251:restore:62836",
                "6.271:restore:40395",
                "8.280:restore:11173",
            ),
        )
    ),
)
BACK_UNDER_ANOTHER_LEASE_AND_THE_RECORD_IS_GONE: Final = FOUND[
    "a round whose record somebody deleted, with a decider that is there again under another lease"
]
TWO_ROUNDS_HAVE_ONE_NUMBER: Final = FOUND["two rounds with one number, of which etcd has forgotten both"]
LEFT_IN_AN_EARLIER_ROUND: Final = replace(TWO_ROUNDS_HAVE_ONE_NUMBER, seed=79)
THE_OTHERS_FINISH_WITHOUT_ONE: Final = Plan(
    6,
    "ends",
    {"agent": 3},
    (PlannedFault(8.0, "cut", 6), PlannedFault(19.0, "job_finishes", 0)),
    Network(),
    24.0,
    nnodes=(2, 3),
    options=OPTIONS,
)
"""A node is cut off, and back when the others have formed a round without it, and finished."""
RESTORED_TO_AN_END_THAT_WAS_LEFT_BEHIND: Final = Plan(
    5,
    "lost ends",
    {"agent": 3},
    (PlannedFault(8.5, "job_fails", 5), PlannedFault(19.9, "restore", 5), PlannedFault(20.1, "worker_fails", 5)),
    Network(),
    24.0,
    nnodes=(2, 3),
    options=OPTIONS,
)
"""A run fails, is started again, and etcd loses that; then its nodes need another round."""
