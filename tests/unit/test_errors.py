"""ftcoord's errors go from process to process: multiprocessing and concurrent.futures pickle what a worker raises."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest

from ftcoord import errors
from ftcoord.demo.run import DemoError
from ftcoord.errors import FtcoordError
from ftcoord.operator.orders import NothingThere
from ftcoord.primitives.group.group import MemberLost
from ftcoord.primitives.group.participant import Left
from ftcoord.store import RoundOverError

MADE: dict[type[FtcoordError], Callable[[], FtcoordError]] = {
    errors.ConfigError: lambda: errors.ConfigError("lease_ttl", -1, "give whole seconds, at least 1"),
    errors.StateError: lambda: errors.StateError("/key", "holds nonsense"),
    errors.ThreadNotStarted: lambda: errors.ThreadNotStarted("ftcoord-watch", RuntimeError("no")),
    errors.ThreadFailed: lambda: errors.ThreadFailed("watches", ZeroDivisionError()),
    errors.Compacted: lambda: errors.Compacted(7),
    errors.Rewound: lambda: errors.Rewound(3, 8),
    errors.NotInQuorum: lambda: errors.NotInQuorum("replica-1"),
}
"""Those that are not made with their text."""


PUBLIC = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FtcoordError)}
KINDS = sorted(PUBLIC | {DemoError, MemberLost, Left, NothingThere, RoundOverError}, key=lambda kind: kind.__name__)


def made(kind: type[FtcoordError]) -> FtcoordError:
    if issubclass(kind, errors.StateError):
        return kind("/key", "holds nonsense")
    return MADE.get(kind, lambda: kind("what happened, and what to do"))()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_can_be_pickled_and_copied(
    kind: type[FtcoordError], copied: Callable[[FtcoordError], FtcoordError]
) -> None:
    error = made(kind)
    error.seen_by = "a user"  # type: ignore[attr-defined]  # as notes are kept
    again = copied(error)
    assert (type(again), str(again), again.args, vars(again)) == (kind, str(error), error.args, vars(error))


def test_a_value_that_no_other_process_can_read_does_not_hide_the_error() -> None:
    class Local(str):
        __slots__ = ()

    for value in (threading.Lock(), lambda: None, Local("x"), [1, (Local("x"),)], {"a": {Local("x")}}):
        error = errors.ConfigError("stderr", value, "a file")
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.key, again.allowed) == (str(error), "stderr", "a file")
        assert again.value == repr(value)
