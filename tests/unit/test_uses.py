"""Whoever adds a use of the group must do every step of docs/extending.md: here is what fails if one is forgotten.

The uses are found in the code: all classes that derive from `Use` or `PlainUse`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from test_layering import MODULES, imported, imports, place_of

import ftcoord

ROOT = Path(__file__).parents[2]
USE = re.compile(r"(Plain)?Use\[")
FOR_DEVELOPERS = {"architecture.md", "benchmarks.md", "extending.md", "protocol.md", "scaling.md"}
FOR_USERS = [
    "README.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name not in FOR_DEVELOPERS),
]


@dataclass(frozen=True)
class Found:
    """A use: its name and module, and the types of its two records. The decided one may have several forms."""

    name: str
    module: str
    record: type | types.UnionType
    ask: type

    @property
    def forms(self) -> tuple[type, ...]:
        return typing.get_args(self.record) if isinstance(self.record, types.UnionType) else (self.record,)

    def __str__(self) -> str:
        return self.name


@cache  # two modules of tests ask while they are collected, in each of pytest's workers
def uses() -> tuple[Found, ...]:
    return tuple(found for module, path in MODULES.items() for found in uses_in(module, text(str(path))))


def uses_in(module: str, source: str) -> Iterator[Found]:
    for node in ast.parse(source).body if USE.search(source) else ():
        if isinstance(node, ast.ClassDef) and any(USE.match(ast.unparse(base)) for base in node.bases):
            kind = getattr(importlib.import_module(module), node.name)
            if not inspect.isabstract(kind):  # else it is the base of others
                yield Found(node.name, module, *typing.get_args(kind.__orig_bases__[0]))


def text(path: str) -> str:
    page = ROOT / path
    return page.read_text(encoding="utf-8") if page.exists() else ""


def names_word(where: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", where) is not None


def decisions(use: Found) -> list[str]:
    """The modules of `core/` that it has both halves of its protocol from."""
    core = [name for name in imports(use.module) if name.startswith("ftcoord.core.")] if use.module in MODULES else []
    return [name for name in core if {"decide", "outlook"} <= vars(importlib.import_module(name)).keys()]


@cache
def graph() -> dict[str, set[str]]:
    return {module: imports(module) & MODULES.keys() for module in MODULES if module != "ftcoord"}


def above(module: str) -> set[str]:
    """The modules that this one is imported by, directly or not, and itself."""
    found, new = set[str](), {module}
    while new:
        found |= new
        new = {name for name, imported in graph().items() if imported & found} - found
    return found


def public_names(use: Found) -> set[str]:
    """The public names through which users reach it."""
    homes = dict(ftcoord._HOMES)
    for module in ftcoord._MODULES:
        public = importlib.import_module(f"ftcoord.{module}")
        names = getattr(public, "__all__", ())
        homes |= {name: getattr(public, name).__module__ for name in names}
    return {name for name, home in homes.items() if home in above(use.module)}


# -- the steps, in the order of docs/extending.md: each says what is missing, or nothing -------------------------------


def records(use: Found) -> str:
    ours = all(dataclasses.is_dataclass(kind) and kind.__module__.startswith("ftcoord.core.") for kind in kinds(use))
    return "" if ours else "its two records are no dataclasses in ftcoord/core/"


def both_halves(use: Found) -> str:
    return "" if len(decisions(use)) == 1 else "no module of ftcoord/core/ that it imports has `decide` and `outlook`"


def core_tests(use: Found) -> str:
    names = [module.rpartition(".")[2] for module in decisions(use)]
    tests = [path for name in names for path in (ROOT / "tests" / "unit").glob(f"test_core_{name}*.py")]
    words = {word for path in tests for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    missing = {"decide", "outlook"} - words
    return f"no test_core_*.py in tests/unit tests its {' and '.join(sorted(missing))}" if missing else ""


def garbage(use: Found) -> str:
    tests = text("tests/unit/test_garbage.py")
    missing = [kind.__name__ for kind in kinds(use) if not names_word(tests, kind.__name__)]
    deciders = [f"{module.rpartition('.')[2]}.decide" for module in decisions(use)]  # what a PlainPolicy is made of
    if not any(names_word(tests, name) for name in (use.name, policy_of(use), *deciders)):
        missing.append("its policy")
    return f"tests/unit/test_garbage.py leaves out {', '.join(missing)}" if missing else ""


def floors(use: Found) -> str:
    try:
        for module in (use.module, *decisions(use), *(kind.__module__ for kind in kinds(use))):
            place_of(module)
    except AssertionError as error:
        return str(error)
    return ""


def public(use: Found) -> str:
    names = public_names(use)
    if not names:
        return "nothing in ftcoord._HOMES, or in a public module's __all__, leads to it"
    ours, source = names & ftcoord._HOMES.keys(), text("ftcoord/__init__.py")
    typed = {name for name in ours if re.search(rf"^    from .* import .*\b{name}\b", source, re.MULTILINE)}
    missing = ", ".join(sorted(ours - typed | ours - {*ftcoord.__all__}))
    return f"ftcoord/__init__.py lacks {missing} in __all__ or among its typed imports" if missing else ""


def makers(use: Found) -> str:
    """What users hold of it has threads and leases: it must be shown that all is gone when it is dropped."""
    source = text("tests/forgettable.py")
    named = any(f'"{name}": ' in source for name in public_names(use))
    return "" if named else "MAKERS in tests/forgettable.py makes nothing that is public of it"


def in_memory(use: Found) -> str:
    for path in (ROOT / "tests" / "sim").glob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        modules = {name for node in ast.walk(ast.parse(source)) for name in imported(node, "")}
        if modules & above(use.module) or any(names_word(source, f"ftcoord.{name}") for name in public_names(use)):
            return ""
    return "no file in tests/sim plays it in memory"


def contract(use: Found) -> str:
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "contract").glob("test_*.py")]
    named = any(names_word(test, name) for test in tests for name in public_names(use))
    return "" if named else "no file in tests/contract names what is public of it"


def protocol(use: Found) -> str:
    page = text("docs/protocol.md")
    rows = [row for row in page.splitlines() if row.startswith("|")]
    missing = [
        f"a row for {key} with a {kind.__name__}"
        for key, kind in (("members/", use.ask), *(("decided", form) for form in use.forms))
        if not any(key in row and names_word(row, kind.__name__) for row in rows)
    ]
    missing += [f"the fields of {kind.__name__}" for kind in kinds(use) if f"**{kind.__name__}**: " not in page]
    return f"docs/protocol.md lacks {', '.join(missing)}" if missing else ""


def architecture(use: Found) -> str:
    table = text("docs/architecture.md").partition("## Uses")[2].partition("\n## ")[0]
    return "" if names_word(table, use.name) else "docs/architecture.md lacks it in the table of uses"


def documents(use: Found) -> str:
    pages = " ".join(map(text, FOR_USERS))
    named = any(names_word(pages, name) for name in public_names(use))
    return "" if named else f"none of {', '.join(FOR_USERS)} names what is public of it"


STEPS: tuple[Callable[[Found], str], ...] = (
    records,
    both_halves,
    core_tests,
    garbage,
    floors,
    in_memory,
    public,
    makers,
    contract,
    protocol,
    architecture,
    documents,
)


def kinds(use: Found) -> tuple[type, ...]:
    return use.ask, *use.forms


def policy_of(use: Found) -> str:
    """The class that decides for it alone, as its `policy` says; its own name if it shares one with others."""
    if use.module not in MODULES:
        return use.name
    policy = getattr(importlib.import_module(use.module), use.name).policy
    name = str(inspect.signature(policy).return_annotation).partition("[")[0]
    return use.name if name == "PlainPolicy" else name


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("use", uses(), ids=str)
def test_no_step_is_forgotten(use: Found, step: Callable[[Found], str]) -> None:
    assert not step(use), f"{use.module}.{use.name}: {step(use)}. docs/extending.md has the steps"


def test_uses_are_found() -> None:
    assert {"RoundUse", "QuorumUse", "ElectionUse", "BarrierUse"} <= {use.name for use in uses()}


def test_no_class_derives_from_a_use_without_being_found() -> None:
    """As one would whose base is a use, or a base of uses that `USE` does not know."""
    found = {"Use", "PlainUse", *(use.name for use in uses())}
    classes = [node for path in MODULES.values() for node in ast.walk(ast.parse(text(str(path)))) if is_class(node)]
    assert not {one.name for one in classes if bases(one) & found} - found


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


class Nothing:
    """No record of ours."""


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_each_step_is_missed(step: Callable[[Found], str]) -> None:
    """By a use that did none of them."""
    assert step(Found("NobodysUse", "ftcoord_nowhere.use", Nothing, Nothing))
