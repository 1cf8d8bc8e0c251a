"""How a fault is planted, and which seed finds it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass

from simulator.history import Report, play
from simulator.plan import plan_of
from simulator.statements import codes_of, functions_of


@dataclass(frozen=True)
class Mutant:
    """One line of one module that is another.

    Args:
        name: what is wrong then.
        line, planted: a part of the module's source, which it has once, and what stands there instead, in as
            many lines.
        profiles: those whose seeds are tried.
        raises: the names of the errors that it is seen by where no oracle speaks: nothing else counts.
    """

    name: str
    module: str
    line: str
    planted: str
    profiles: tuple[str, ...]
    raises: tuple[str, ...] = ()

    def is_seen_in(self, report: Report) -> bool:
        """Whether that history fails by an oracle, or by an error that this mutant is said to raise."""
        return report.failed and (report.by_oracle or report.oracle in self.raises)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """All functions of the module as the changed source has them, in place: who has imported them calls these.

    Raises ValueError if the module does not have that line once, or none of its functions does.
    """
    module = importlib.import_module(mutant.module)
    source = inspect.getsource(module)
    if source.count(mutant.line) != 1 or mutant.line.count("\n") != mutant.planted.count("\n"):
        raise ValueError(f"{mutant.name}: {mutant.module} has {source.count(mutant.line)} times {mutant.line!r}")
    # Not by what the functions have now: pytest has rewritten their assertions.
    sound, changed = _by_line(module, source), _by_line(module, source.replace(mutant.line, mutant.planted))
    before = {function: function.__code__ for function in functions_of(module)}
    try:
        changes = 0
        for function, old in before.items():
            place = old.co_name, old.co_firstlineno
            new = changed.get(place)
            if new is not None and new.co_freevars == old.co_freevars and new != sound[place]:
                function.__code__ = new
                changes += 1
        if not changes:
            raise ValueError(f"{mutant.name}: no function of {mutant.module} has {mutant.line!r}")
        yield
    finally:
        for function, old in before.items():
            function.__code__ = old


def _by_line(module: types.ModuleType, source: str) -> dict[tuple[str, int], types.CodeType]:
    """The code of all functions that such a source has."""
    return codes_of(compile(source, str(module.__file__), "exec", dont_inherit=True))


class AlreadyFails(ValueError):
    """A history fails though nothing is planted: what is planted there says nothing."""


def caught_by(mutant: Mutant, seeds: range = range(2000)) -> Report | None:
    """The first history in which an oracle sees it, of these seeds; None if none does.

    Raises AlreadyFails where the same history fails without it, and ValueError if it cannot be planted.
    """
    report = None
    with planted(mutant):
        for seed in seeds:
            report = play(plan_of(seed, mutant.profiles[seed % len(mutant.profiles)]))
            if mutant.is_seen_in(report):
                break
        else:
            return None
    if report is not None and (sound := play(report.plan)).failed:
        raise AlreadyFails(f"seed {report.plan.seed} of {report.plan.profile!r} fails by itself: {sound.problem}")
    return report
