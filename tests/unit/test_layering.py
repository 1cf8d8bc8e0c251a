"""The layout of DESIGN.md, held: imports point downward, the core is pure, and few know gRPC."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ftcoord

ROOT = Path(ftcoord.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400

LAYERS = (
    {"errors", "concurrency"},
    {"files"},
    {"config"},
    {"core"},
    {"etcd"},
    {"store", "timer", "heartbeat"},
    {"rendezvous"},
    {"coordination"},
    {"metrics", "status", "torchft"},
    {"dashboard", "demo", "testing"},
    {"cli", "_torchrun"},
)
"""Lowest first. What is in a layer imports from its own package and from the layers before."""

PURE_CORE = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "json", "math"}
PURE_CORE |= {"operator", "typing"}
"""All that `core/` may import: no clock, thread, socket, log, file, chance, torch or gRPC among them."""


GRPC = {"grpc", "ftcoord.etcd.quiet"}
"""Where gRPC comes from: as it is, and without its log lines."""
GRPC_SERVER = "ftcoord.coordination.gateway"
"""The one module outside `etcd/` that knows gRPC: it serves torchft's protocol, and has nothing to do with etcd's."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCES}


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """The full names of the modules that this statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        submodules = [name for alias in node.names if (name := f"{base}.{alias.name}") in MODULES]
        yield from submodules or [base]


def imports(module: str, at_load: bool = False) -> set[str]:
    """What a module imports: anywhere in its text, or only what is run when it is loaded."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = executed(tree) if at_load else ast.walk(tree)
    return {name for node in nodes for name in imported(node, package)}


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that are run when a module is loaded: none in functions, none for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from executed(node)


def part_of(module: str) -> str:
    """The part of the package that a module is in: `etcd` for `ftcoord.etcd.client`; empty for ftcoord itself."""
    return module.split(".")[1] if "." in module else ""


def layer_of(module: str) -> int:
    part = part_of(module)
    found = next((height for height, parts in enumerate(LAYERS) if part in parts), None)
    assert found is not None, f"{module} is in no layer: give {part!r} its place in LAYERS (and in DESIGN.md)"
    return found


INNER = [module for module in MODULES if part_of(module)]


@pytest.mark.parametrize("module", INNER)
def test_imports_point_downward(module: str) -> None:
    ours = {name for name in imports(module) if name.startswith("ftcoord.")}
    upward = {n for n in ours if part_of(n) != part_of(module) and layer_of(n) >= layer_of(module)}
    assert not upward


def test_no_module_needs_itself_to_load() -> None:
    graph = {module: imports(module, at_load=True) & MODULES.keys() for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("module", [m for m in INNER if part_of(m) == "core"])
def test_the_core_is_pure(module: str) -> None:
    foreign = {name.split(".")[0] for name in imports(module)} - PURE_CORE - {"ftcoord"}
    assert not foreign
    assert {part_of(n) for n in imports(module) if n.startswith("ftcoord")} <= {"core", "errors"}


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) != "etcd" and m != GRPC_SERVER])
def test_only_etcd_and_the_gateway_know_grpc(module: str) -> None:
    assert not {name for name in imports(module) if name.split(".")[0] == "grpc" or name in GRPC}


@pytest.mark.parametrize("module", [m for m in MODULES if m != "ftcoord.etcd.quiet"])
def test_grpc_is_loaded_without_its_log_lines(module: str) -> None:
    assert "grpc" not in imports(module)


@pytest.mark.parametrize("module", [m for m in INNER if part_of(m) in {"errors", "config", "core", "etcd"}])
def test_the_library_parts_need_no_torch(module: str) -> None:
    assert "torch" not in {name.split(".")[0] for name in imports(module)}


def test_importing_ftcoord_is_light_and_silent() -> None:
    code = "import ftcoord, sys; sys.exit(str({'torch', 'grpc', 'google.protobuf'} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert (done.stdout, done.stderr.strip()) == ("", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_nothing_is_pickled() -> None:
    files = [path for path in ROOT.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not [path for path in files if b"pickle" in path.read_bytes().lower()]


def test_the_checks_see_what_is_there() -> None:
    """Else they would pass on nothing at all."""
    assert "ftcoord.core.records" in imports("ftcoord.core.rendezvous")
    assert "grpc" in {name for module in MODULES for name in imports(module, at_load=True)}
    assert imports("ftcoord") > imports("ftcoord", at_load=True)
    assert {"errors", "config", "core", "etcd"} <= {part_of(module) for module in INNER}
