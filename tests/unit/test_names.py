"""One name, one meaning: across modules, constants and public classes are not called alike."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import ftcoord

ROOT = Path(ftcoord.__file__).parent

TWO_VALUES = {
    "RULES": "each protocol numbers its own; always read with the module's name",
}
"""Constants that modules may define differently, and why."""
TWO_CLASSES = {
    "Event": "threading's in the seam, etcd's in its API: both are the field's words",
    "Sentinel": "the one is this process's, the other does its work in a process of its own",
}
"""Public classes that modules may call alike, and why."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def constants() -> dict[str, dict[str, str]]:
    """The values of each public constant, by module."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for module, tree in trees():
        for node in tree.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            for target in targets:
                value = ast.unparse(node.value) if isinstance(node, ast.AnnAssign | ast.Assign) and node.value else ""
                named = isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_")
                if named and not value.startswith("TypeVar("):
                    found[target.id][module] = value
    return found


def classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def test_a_constant_has_one_value() -> None:
    several = {name: modules for name, modules in constants().items() if len(set(modules.values())) > 1}
    assert several.keys() == TWO_VALUES.keys(), {name: several.get(name) for name in several.keys() ^ TWO_VALUES.keys()}


def test_a_public_class_has_one_meaning() -> None:
    several = {name: modules for name, modules in classes().items() if len(modules) > 1}
    assert several.keys() == TWO_CLASSES.keys(), {n: several.get(n) for n in several.keys() ^ TWO_CLASSES.keys()}


def test_the_names_are_found() -> None:
    """Else the checks would pass on nothing."""
    assert constants()["UNANSWERED"].keys() == {"etcd/retry.py"}
    assert classes()["Session"] == ["primitives/session.py"]
