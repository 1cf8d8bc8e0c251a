"""What the commands about jobs share: the argument JOB, the flags that say what etcd does not know, and their client.

It is loaded with each of these commands, so what only some of them need is imported where it is used.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from ftcoord.commands.flags import Flag, etcd_config
from ftcoord.commands.output import Terminal
from ftcoord.config import choice, whole

if TYPE_CHECKING:
    from ftcoord.etcd.client import EtcdClient
    from ftcoord.operator.status import Rules

RULE_FLAGS: Final = (
    Flag("--min-replicas", "FTCOORD_MIN_REPLICAS", "the least min_replicas to assume", whole(1, 2**31 - 1), 1, "N"),
    Flag(
        "--on-member-loss",
        "FTCOORD_ON_MEMBER_LOSS",
        "on_member_loss of the run's rdzv_conf",
        choice("restart", "ignore"),
        "restart",
        "WHAT",
        ("restart", "ignore"),
    ),
)
"""Settings of a job that the next decision depends on and that etcd may not have."""


def add_job(parser: argparse.ArgumentParser) -> None:
    """Give a command its JOB."""
    parser.add_argument(
        "job", metavar="JOB", help="the job's id: torchrun's --rdzv-id, or the last part of a job's address"
    )


def terminal_of(options: argparse.Namespace) -> Terminal:
    """Where the flags say that a command prints."""
    return Terminal(options.output, options.color)


def client_of(options: argparse.Namespace) -> EtcdClient:
    """A client of the etcd that the flags name, for one command. Raises ConfigError."""
    from ftcoord.etcd.client import EtcdClient

    return EtcdClient(etcd_config(options))


def rules_of(options: argparse.Namespace) -> Rules:
    """What the flags say of a job."""
    from ftcoord.core.quorum import QuorumOptions
    from ftcoord.core.round_situation import RoundOptions
    from ftcoord.operator.status import Rules

    defaults = Rules()
    rounds = RoundOptions(
        recall_on_loss=options.on_member_loss == "restart", return_to_seat=defaults.rounds.return_to_seat
    )
    return Rules(rounds, QuorumOptions(options.min_replicas, defaults.quorum.join_timeout))
