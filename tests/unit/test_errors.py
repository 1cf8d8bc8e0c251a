"""ftcoord's errors go from process to process: multiprocessing and concurrent.futures pickle what a worker raises."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from ftcoord import errors
from ftcoord.demo.run import DemoError
from ftcoord.errors import FtcoordError
from ftcoord.primitives.group.member_key import MemberLost
from ftcoord.primitives.group.membership import Left
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
COPIES: dict[str, Callable[[FtcoordError], FtcoordError]] = {
    **{
        f"pickle {protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))  # type: ignore[misc]
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def kinds(root: type[FtcoordError]) -> Iterator[type[FtcoordError]]:
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


ELSEWHERE = {DemoError, MemberLost, Left, RoundOverError}
"""Those that are not in `ftcoord.errors`."""
KINDS = sorted(ELSEWHERE.union(kinds(FtcoordError)), key=lambda kind: kind.__name__)


def made(kind: type[FtcoordError]) -> FtcoordError:
    if issubclass(kind, errors.StateError):
        return kind("/key", "holds nonsense")
    return MADE.get(kind, lambda: kind("what happened, and what to do"))()


def raise_it(error: FtcoordError) -> None:
    raise error


def check_same(error: FtcoordError, again: BaseException) -> None:
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_can_be_pickled_and_copied(kind: type[FtcoordError], how: str) -> None:
    error = made(kind)
    error.seen_by = "a user"  # type: ignore[attr-defined]  # as notes are kept
    check_same(error, COPIES[how](error))


def test_all_public_errors_are_among_them() -> None:
    public = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FtcoordError)}
    assert public <= set(KINDS)
    assert {kind for kind in public if "__init__" in vars(kind)} == set(MADE)


def test_a_value_that_no_other_process_can_read_does_not_hide_the_error() -> None:
    class Local(str):
        __slots__ = ()

    for value in (threading.Lock(), lambda: None, Local("x"), [1, (Local("x"),)], {"a": {Local("x")}}):
        error = errors.ConfigError("stderr", value, "a file")
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.key, again.allowed) == (str(error), "stderr", "a file")
        assert again.value == repr(value)


def test_a_pool_of_processes_hands_each_on() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for kind in KINDS:
            error = made(kind)
            raised = pool.submit(raise_it, error).exception(90)
            assert raised is not None
            raised.__dict__.pop("__notes__", None)
            check_same(error, raised)
