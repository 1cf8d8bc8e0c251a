"""The layers of docs/architecture.md, held: imports point downward, the core is pure, and few know gRPC."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ftcoord
from ftcoord import cli

ROOT = Path(ftcoord.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 500

FLOORS = (
    "ftcoord",
    "escaping",
    "errors",
    "closing log_once python_queue",
    "concurrency",
    "endpoints files fork proc pool",
    "config job_url metrics.http metrics.process",
    "metrics.exporter logs",
    "core.strict core.layout core.outlook core.takeover core.lease core.vote core.store_values",
    "core.manager_address",
    "core.event_records core.seating",
    "core.verdict core.causes",
    "core.rendezvous_records core.quorum_records core.death_records",
    "core.round_situation core.quorum_head",
    "core.round_poll core.round_history",
    "core.forming",
    "core.rendezvous core.quorum core.recovery core.timers core.losses",
    "core.quorum_history core.bystanders",
    "etcd.api etcd.release",
    "etcd.retry etcd.reading",
    "etcd.rpc.protobuf etcd.rpc.quiet_grpc etcd.rpc.threads etcd.rpc.rollback etcd.rpc.addresses",
    "etcd.rpc.messages etcd.rpc.errors",
    "etcd.rpc.codec",
    "etcd.rpc.transport",
    "etcd.rpc.watch",
    "etcd.client",
    "etcd.shared",
    "etcd.namespace",
    "embedded.binary embedded.process",
    "embedded.server",
    "primitives.deaths primitives.mirror primitives.orphans primitives.sentinel",
    "primitives.sentinel_main primitives.session",
    "primitives.write_once",
    "primitives.leased_key",
    "primitives.group.policy primitives.group.parse_cache primitives.group.member_key",
    "primitives.group.members_view primitives.group.event_log",
    "primitives.group.decided_record primitives.group.succession",
    "primitives.group.pace primitives.group.use",
    "primitives.group.decider",
    "primitives.group.group",
    "primitives.group.membership",
    "primitives.group.participant",
    "store.errors store.tries store.values store.waiting",
    "store.store",
    "store",
    "timer",
    "timer.etcd_timer",
    "heartbeat",
    (
        "rendezvous.bootstrap rendezvous.fences rendezvous.logs rendezvous.record_change "
        "rendezvous.rolls rendezvous.seat rendezvous.settings rendezvous.signals "
        "rendezvous.torchelastic rendezvous.worker_failures"
    ),
    "rendezvous.policy",
    "rendezvous.run_record rendezvous.url rendezvous.use rendezvous.workers",
    "rendezvous.limits",
    "rendezvous.pace",
    "rendezvous.node",
    "rendezvous.handler",
    "rendezvous.create",
    "rendezvous.backend rendezvous.init_method rendezvous.legacy",
    "rendezvous",
    (
        "coordination.address coordination.checks coordination.peers coordination.policy "
        "coordination.crowd coordination.ranks coordination.splice coordination.tcp "
        "coordination.tokens coordination.types"
    ),
    (
        "coordination.askers coordination.convert coordination.failure coordination.manager_wire "
        "coordination.own_place coordination.use"
    ),
    (
        "coordination.connection coordination.lighthouse_wire coordination.native_calls coordination.rank_frames "
        "coordination.rank_group coordination.replica"
    ),
    (
        "coordination.kills coordination.native_manager coordination.native_ranks "
        "coordination.observer coordination.quorum_watch coordination.rank_connection coordination.rank_sockets"
    ),
    "coordination.lighthouse coordination.manager_client coordination.pending_call coordination.rank_port",
    "coordination.gateway_limits",
    "coordination.gateway_sessions",
    "coordination.gateway coordination.managed_group",
    "coordination.manager",
    "coordination",
    "proactive",
    "torchft",
    "demo.agents demo.train",
    "demo.run",
    "demo",
    "operator.told",
    "operator.told",
    "operator.job_keys",
    "operator.rounds operator.quorums operator.timers",
    "operator.status operator.naming operator.findings operator.past",
    "operator.listing operator.reading operator.member_http operator.noting",
    "operator.acting operator.following operator.summary operator.watching operator.metrics",
    "operator.orders",
    "operator.examining",
    "dashboard.pages dashboard.guarding dashboard.acts dashboard.pasts dashboard.refusals",
    "dashboard.board",
    "dashboard.connections",
    "dashboard.app",
    "dashboard.serving",
    "commands.codes commands.output",
    "commands.flags",
    "commands.completion commands.jobs",
    "commands.acting commands.doctor commands.explaining commands.listing",
    "commands.looking",
    "commands.paging commands.watching",
    "commands.serving",
    "commands",
    "cli _torchrun",
    "__main__",
)
"""Lowest first: modules, or whole packages. What is on a floor imports from the floors below, and from its own package
where that stands here as a whole. A package whose modules have floors stands above them for what it says itself."""

PURE_CORE = {"__future__", "collections", "dataclasses", "enum", "functools", "hashlib", "itertools", "json", "math"}
PURE_CORE |= {"operator", "typing", "urllib"}
"""All that `core/` may import: no clock, thread, socket, log, file, chance, torch or gRPC among them."""


GRPC = {"grpc", "ftcoord.etcd.rpc.quiet_grpc"}
"""Where gRPC comes from: as it is, and without its log lines."""
TORCHFT_PROTOCOL = {
    f"ftcoord.coordination.{name}"
    for name in ("gateway", "manager_wire", "native_calls", "native_ranks", "native_manager")
}
"""The other modules that know gRPC: they speak torchft's protocols, and not to etcd."""


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


def test_primitives_work_on_any_etcd() -> None:
    """So that an etcd in memory can stand in for a real one."""

    def needs(module: str) -> Set[str]:
        known = {name for name in imports(module) if name.startswith("ftcoord.etcd.")}
        program = {"ftcoord.etcd.client"} if module == "ftcoord.primitives.sentinel_main" else set()
        return known - {"ftcoord.etcd.api", "ftcoord.etcd.retry", "ftcoord.etcd.reading"} - program

    assert offenders([m for m in MODULES if m.startswith("ftcoord.primitives.")], needs) == {}


def test_embedded_etcds_are_for_facades_only() -> None:
    inner = [module for module in INNER if part_of(module) in {"errors", "config", "core", "etcd", "primitives"}]
    assert offenders(inner, lambda m: {one for one in imports(m) if one.startswith("ftcoord.embedded")}) == {}


OWN_THREADS = {
    "ftcoord.concurrency": "it is the seam",
    "ftcoord.python_queue": "the seam makes it",
}
"""Modules that may name Python's threads, locks and clocks, and why."""
SEAM = {"threading", "queue", "time", "_thread", "sched"}


WEB = {"anyio", "starlette", "uvicorn"}
"""What the extra `dashboard` brings."""


def test_only_the_page_needs_a_web_framework() -> None:
    others = [module for module in MODULES if not module.startswith("ftcoord.dashboard.")]
    assert offenders(others, lambda module: tops(imports(module)) & WEB) == {}


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
    assert offenders(core, lambda module: set(map(part_of, ours[module])) - {"core", "errors"}) == {}


TELLING = [
    f"ftcoord.operator.{name}"
    for name in (
        "told",
        "job_keys",
        "rounds",
        "quorums",
        "timers",
        "status",
        "naming",
        "past",
    )
]
"""What operators are told: as pure as the core, from keys as the API has them."""


def test_what_operators_are_told_is_pure() -> None:
    known = {"ftcoord.etcd.api", "ftcoord.etcd.release", *TELLING}
    ours = {module: {name for name in imports(module) if name.startswith("ftcoord")} for module in TELLING}
    assert offenders(TELLING, lambda module: tops(imports(module) - ours[module]) - PURE_CORE) == {}
    foreign = {module: {one for one in ours[module] if part_of(one) not in {"core", "errors"}} for module in TELLING}
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


DECISIONS = {"ftcoord.core.rendezvous", "ftcoord.core.quorum"}
"""What only those commands need that say why there is no next round, or quorum."""


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("ls", {"ftcoord.commands.looking", "ftcoord.commands.acting"}),
        ("history", DECISIONS | {"ftcoord.commands.looking", "ftcoord.operator.status"}),
        ("doctor", DECISIONS | {"ftcoord.operator.acting", "ftcoord.rendezvous"}),
        ("status", {"ftcoord.commands.explaining", "ftcoord.operator.past", "ftcoord.metrics.exporter"}),
    ],
)
def test_a_command_loads_what_it_needs_until_its_first_request(command: str, unneeded: set[str]) -> None:
    """To load all commands takes longer than any of them does."""
    code = (
        "import sys; from ftcoord import cli\n"
        "from ftcoord.etcd.client import EtcdClient\n"
        "def first_request(*_):\n"
        f"    sys.exit(str(set({sorted(unneeded | {'torch'})!r}) & sys.modules.keys() or ''))\n"
        "EtcdClient.range = EtcdClient.member_status = first_request\n"
        f"cli.main([{command!r}, *{['job'] * (command in ('history', 'status'))!r}])"
    )
    env = {"FTCOORD_ENDPOINTS": "127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.stdout, done.stderr.strip(), done.returncode) == ("", "", 1)


def test_each_command_is_in_the_module_that_is_loaded_for_it() -> None:
    for family, has in cli.FAMILIES.items():
        for command in has:
            actions = cli._parser(command)._actions
            commands = next(one for one in actions if isinstance(one, argparse._SubParsersAction))
            assert set(commands.choices) == {*has, "completion"}, family


def test_only_etcd_rpc_and_torchfts_protocols_know_grpc() -> None:
    others = [m for m in MODULES if not m.startswith("ftcoord.etcd.rpc") and m not in TORCHFT_PROTOCOL]
    assert offenders(others, lambda m: {one for one in imports(m) if one.split(".")[0] == "grpc" or one in GRPC}) == {}


def test_grpc_is_loaded_without_its_log_lines() -> None:
    assert [m for m in MODULES if "grpc" in imports(m)] == ["ftcoord.etcd.rpc.quiet_grpc"]


def test_the_library_parts_need_no_torch() -> None:
    parts = [m for m in INNER if part_of(m) in {"errors", "config", "core", "etcd", "primitives", "embedded"}]
    assert [m for m in parts if "torch" in tops(imports(m))] == []


def test_importing_ftcoord_is_light_and_silent() -> None:
    code = "import ftcoord, sys; sys.exit(str({'torch', 'grpc', 'google.protobuf'} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert (done.stdout, done.stderr.strip()) == ("", "")


def lines_of_code(source: str) -> int:
    """Lines that hold code: comments, docstrings and empty lines explain, so they cost nothing."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, ast.stmt) and not is_text:
            inner = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            last = min(inner, default=(node.end_lineno or node.lineno) + 1)
            lines.update(range(node.lineno, max(last, node.lineno + 1)))
    written = source.splitlines()
    return sum(bool(text := written[number - 1].strip()) and not text.startswith("#") for number in lines)


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): lines_of_code(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_nothing_is_pickled() -> None:
    files = [path for path in ROOT.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not [path for path in files if b"pickle" in path.read_bytes().lower()]


def test_the_checks_see_what_is_there() -> None:
    """Else they would pass on nothing at all."""
    assert "ftcoord.core.rendezvous_records" in imports("ftcoord.core.rendezvous")
    assert "grpc" in {name for module in MODULES for name in imports(module, at_load=True)}
    assert imports("ftcoord") > imports("ftcoord", at_load=True)
    assert {"errors", "config", "core", "etcd"} <= {part_of(module) for module in INNER}
