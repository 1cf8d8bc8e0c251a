"""The layers of docs/architecture.md, held: imports point downward, the core is pure, and few know gRPC."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ftcoord

ROOT = Path(ftcoord.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

FLOORS = (
    "ftcoord",
    "escaping",
    "errors",
    "closing log_once",
    "concurrency",
    "files fork proc pool",
    "config metrics.process",
    "job_url",
    "metrics.exporter logs",
    "core.strict core.layout core.lease core.store_values",
    "core.manager_address core.office",
    "core.rendezvous_records core.quorum_records",
    "core.death_records core.asks",
    "core.history",
    "core.verdict",
    "core.rendezvous core.quorum core.recovery core.timers core.elastic",
    "etcd.api",
    "etcd.retry etcd.addresses etcd.quiet_grpc",
    "etcd.messages",
    "etcd.transport",
    "etcd.watch",
    "etcd.client",
    "embedded.server",
    "primitives.deaths primitives.mirror primitives.orphans primitives.sentinel",
    "primitives.sentinel_main primitives.session",
    "primitives.write_once",
    "primitives.leased_key",
    "primitives.group.use",
    "primitives.group.record",
    "primitives.group.group",
    "primitives.group.participant",
    "store",
    "stop",
    "timer",
    "timer.etcd_timer",
    "heartbeat",
    "rendezvous.bootstrap rendezvous.settings rendezvous.workers",
    "rendezvous.run_record",
    "rendezvous.pace rendezvous.policy",
    "rendezvous.node",
    "rendezvous.handler",
    "rendezvous.backend rendezvous.init_method",
    "rendezvous",
    "coordination.api coordination.port",
    "coordination.address",
    "coordination.ask_line",
    "coordination.ask_desk",
    "coordination.policy",
    "coordination.ranks coordination.replica",
    "coordination.lighthouse coordination.native coordination.rank_port",
    "coordination.manager coordination.manager_client",
    "coordination.gateway",
    "coordination",
    "elastic.group",
    "elastic.ddp elastic.members elastic.state",
    "elastic.training",
    "elastic",
    "proactive",
    "torchft",
    "operator.report",
    "operator.status operator.doctor",
    "operator.history",
    "operator.reading",
    "operator.orders",
    "demo.train",
    "demo.run",
    "demo",
    "dashboard.feeds",
    "dashboard.server",
    "commands.shared",
    "commands",
    "cli _torchrun",
    "__main__",
)
"""Lowest first: modules, or whole packages. What is on a floor imports from the floors below, and from its own package
where that stands here as a whole. A package whose modules have floors stands above them for what it says itself."""

PURE_CORE = {"__future__", "collections", "dataclasses", "enum", "functools", "hashlib", "itertools", "json", "math"}
PURE_CORE |= {"operator", "re", "typing", "urllib", "zlib"}
"""All that `core/` may import: no clock, thread, socket, log, file, chance, torch or gRPC among them."""


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


@cache
def imports(module: str, at_load: bool = False) -> frozenset[str]:
    """What a module imports: anywhere in its text, or only what is run when it is loaded."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = executed(tree) if at_load else ast.walk(tree)
    return frozenset(name for node in nodes for name in imported(node, package))


Offenders = dict[str, Set[str]]


def offenders(modules: Iterable[str], wrong: Callable[[str], Set[str]]) -> Offenders:
    """What is wrong with which of these modules. All in one test: one for each module and rule would be thousands."""
    return {module: found for module in modules if (found := wrong(module))}


def tops(names: Iterable[str]) -> set[str]:
    """The packages that these modules are in."""
    return {name.split(".")[0] for name in names}


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


def place_of(module: str) -> tuple[int, str]:
    """The floor of a module, and its name there."""
    for height, names in enumerate(FLOORS):
        for name in names.split():
            full = name if name == "ftcoord" else f"ftcoord.{name}"
            if module == full or (name != "ftcoord" and module.startswith(f"{full}.")):
                return height, full
    raise AssertionError(f"{module} is on no floor: give it its place in FLOORS")


INNER = [module for module in MODULES if part_of(module)]


PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py" and not imports(name, at_load=True)}
"""Packages that hold nothing themselves."""


def test_imports_point_downward() -> None:
    assert offenders([module for module in MODULES if module not in PACKAGES], upward) == {}


def upward(module: str) -> Set[str]:
    height, name = place_of(module)
    ours = {one for one in imports(module) if one.split(".")[0] == "ftcoord" and one not in PACKAGES}
    if module == "ftcoord":  # it names what is public, and loads that when it is first used
        ours = set(imports(module, at_load=True) & MODULES.keys())
    return {one for one in ours if place_of(one)[1] != name and place_of(one)[0] >= height}


OWN_THREADS = {"ftcoord.concurrency": "it is the seam"}
"""Modules that may name Python's threads, locks and clocks, and why."""
SEAM = {"threading", "queue", "time", "_thread", "sched"}


def test_locks_threads_and_clocks_come_from_the_seam() -> None:
    """Else a simulator could not decide when they go on, nor a test see in which order locks are taken."""
    assert offenders(MODULES, lambda module: imports(module) & SEAM).keys() == OWN_THREADS.keys()


def test_no_module_needs_itself_to_load() -> None:
    graph = {module: imports(module, at_load=True) & MODULES.keys() for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_the_core_is_pure() -> None:
    core = [module for module in INNER if part_of(module) == "core"]
    assert offenders(core, lambda module: tops(imports(module)) - PURE_CORE - {"ftcoord"}) == {}
    ours = {module: {name for name in imports(module) if name.startswith("ftcoord")} for module in core}
    assert offenders(core, lambda module: set(map(part_of, ours[module])) - {"core", "errors", "escaping"}) == {}


TELLING = [f"ftcoord.operator.{name}" for name in ("report", "status", "history")]
"""What operators are told: as pure as the core, from keys as the API has them."""


def test_what_operators_are_told_is_pure() -> None:
    known = {"ftcoord.etcd.api", *TELLING}
    ours = {module: {name for name in imports(module) if name.startswith("ftcoord")} for module in TELLING}
    assert offenders(TELLING, lambda module: tops(imports(module) - ours[module]) - PURE_CORE) == {}
    foreign = {
        module: {one for one in ours[module] if part_of(one) not in {"core", "errors", "escaping"}}
        for module in TELLING
    }
    assert offenders(TELLING, lambda module: foreign[module] - known) == {}


@pytest.mark.parametrize("command", ["ls", "status", "history", "why", "doctor"])
def test_commands_load_neither_torch_nor_a_web_framework(command: str) -> None:
    """Each is to answer in a moment, loading included."""
    code = (
        "import sys; from ftcoord import cli\n"
        f"code = cli.main([{command!r}, *{['job'] * (command in ('status', 'history', 'why'))!r}])\n"
        "sys.exit(str({'torch', 'numpy', 'starlette'} & sys.modules.keys() or code))"
    )
    env = {"FTCOORD_ENDPOINTS": "127.0.0.1:1", "FTCOORD_REQUEST_TIMEOUT": "0.01"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.stderr.splitlines()[-1] == "3"


def test_the_library_parts_need_no_torch() -> None:
    parts = [m for m in INNER if part_of(m) in {"errors", "config", "core", "etcd", "primitives", "embedded"}]
    assert [m for m in parts if "torch" in tops(imports(m))] == []


def test_importing_ftcoord_is_light_and_silent() -> None:
    code = "import ftcoord, sys; sys.exit(str({'torch', 'grpc', 'google.protobuf'} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert (done.stdout, done.stderr.strip()) == ("", "")


def test_nothing_is_pickled() -> None:
    files = [path for path in ROOT.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not [path for path in files if b"pickle" in path.read_bytes().lower()]
