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


@dataclass(frozen=True)
class Mutant:
    """One line of one module that is another.

    Args:
        name: what is wrong then.
        line, planted: a part of the module's source, which it has once, and what stands there instead, in as
            many lines.
        profiles: those whose seeds are tried.
    """

    name: str
    module: str
    line: str
    planted: str
    profiles: tuple[str, ...]


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """All functions of the module as the changed source has them, in place: who has imported them calls these.

    Raises ValueError if the module does not have that line once.
    """
    module = importlib.import_module(mutant.module)
    source = inspect.getsource(module)
    if source.count(mutant.line) != 1 or mutant.line.count("\n") != mutant.planted.count("\n"):
        raise ValueError(f"{mutant.name}: {mutant.module} has {source.count(mutant.line)} times {mutant.line!r}")
    changed = source.replace(mutant.line, mutant.planted)
    code = compile(changed, str(module.__file__), "exec", dont_inherit=True)
    before = {function: function.__code__ for function in _functions(module)}
    by_line = {(one.co_name, one.co_firstlineno): one for one in _codes(code)}
    try:
        for function, old in before.items():
            new = by_line.get((old.co_name, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                function.__code__ = new
        yield
    finally:
        for function, old in before.items():
            function.__code__ = old


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Those of a module and of its classes."""
    for one in vars(module).values():
        if isinstance(one, types.FunctionType) and one.__module__ == module.__name__:
            yield inspect.unwrap(one)
        elif isinstance(one, type) and one.__module__ == module.__name__:
            for inner in vars(one).values():
                inner = inner.fget if isinstance(inner, property) else getattr(inner, "__func__", inner)
                if isinstance(inner, types.FunctionType):
                    yield inspect.unwrap(inner)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def caught_by(mutant: Mutant, seeds: int = 10_000) -> Report | None:
    """The first history in which an oracle sees it, of so many seeds; None if none does."""
    with planted(mutant):
        for seed in range(seeds):
            report = play(plan_of(seed, mutant.profiles[seed % len(mutant.profiles)]))
            if report.failed:
                return report
    return None
