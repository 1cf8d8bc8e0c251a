"""Threads that change over between any two statements, not only where they wait or take a lock."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from typing import Final

from virtual import Scheduler

import ftcoord.coordination
import ftcoord.primitives
import ftcoord.rendezvous
import ftcoord.stop
import ftcoord.store
import ftcoord.timer

ROOMS: Final = (
    ftcoord.primitives,
    ftcoord.rendezvous,
    ftcoord.coordination,
    ftcoord.stop,
    ftcoord.store,
    ftcoord.timer,
)
"""Whose modules have threads that share something."""
_HOOK: Final = "__between_statements__"


@contextlib.contextmanager
def any_statement(scheduler: Scheduler) -> Iterator[None]:
    """Let another thread go on before any statement of these modules' functions."""

    def preempt() -> None:
        if scheduler.running is not None:  # else a finalizer runs this, of something that outlived its world
            scheduler.preempt()

    undo: list[tuple[types.FunctionType, types.CodeType]] = []
    try:
        for module in _modules():
            sound, changed = _both(module)
            vars(module)[_HOOK] = preempt
            for function in functions_of(module):
                code = function.__code__
                place = code.co_name, code.co_firstlineno
                if sound.get(place) == code and changed[place].co_freevars == code.co_freevars:
                    undo.append((function, code))
                    function.__code__ = changed[place]
        yield
    finally:
        for function, code in undo:
            function.__code__ = code


@functools.cache
def _modules() -> tuple[types.ModuleType, ...]:
    found = []
    for room in ROOMS:
        names = [f"{room.__name__}.{one.name}" for one in pkgutil.walk_packages(getattr(room, "__path__", ()))]
        found += [importlib.import_module(name) for name in names if not name.endswith("_main")] or [room]
    return tuple(found)


@functools.cache
def _both(
    module: types.ModuleType,
) -> tuple[dict[tuple[str, int], types.CodeType], dict[tuple[str, int], types.CodeType]]:
    """The code of a module's functions, as it is and with the hook between all statements."""
    tree = ast.parse(inspect.getsource(module))
    sound = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    changed = compile(_Between().visit(tree), str(module.__file__), "exec", dont_inherit=True)
    return codes_of(sound), codes_of(changed)


class _Between(ast.NodeTransformer):
    """Puts a call of the hook before each statement of a function."""

    def _within(self, function: ast.FunctionDef) -> ast.FunctionDef:
        for node in ast.walk(function):
            for field in ("body", "orelse", "finalbody"):
                if isinstance(statements := getattr(node, field, None), list) and not isinstance(node, ast.ClassDef):
                    setattr(node, field, [one for statement in statements for one in self._with_hook(statement)])
        return function

    visit_FunctionDef = _within  # noqa: N815  # ast's name

    def _with_hook(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, (ast.Global, ast.Nonlocal)) or _is_text(statement):
            return [statement]
        call = ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), [], []))
        return [ast.fix_missing_locations(ast.copy_location(call, statement)), statement]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# -- the code of functions --------------------------------------------------------------------------------------------


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Those of a module and of its classes."""
    for one in vars(module).values():
        if isinstance(one, types.FunctionType) and one.__module__ == module.__name__:
            yield inspect.unwrap(one)
        elif isinstance(one, type) and one.__module__ == module.__name__:
            for inner in vars(one).values():
                inner = inner.fget if isinstance(inner, property) else getattr(inner, "__func__", inner)
                inner = inner.func if isinstance(inner, functools.cached_property) else inner
                if isinstance(inner, types.FunctionType):
                    yield inspect.unwrap(inner)


def codes_of(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """All functions in it, by their names and lines."""
    return {(one.co_name, one.co_firstlineno): one for one in _codes(code)}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)
