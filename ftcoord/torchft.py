"""torchft on ftcoord: `import ftcoord.torchft` before torchft, or, where a script cannot be changed,

    python -m ftcoord.torchft train.py --its-arguments        (or -m module)
    torchrun --nproc-per-node=4 -m ftcoord.torchft train.py

TORCHFT_LIGHTHOUSE is then `etcd://h1:2379,h2:2379/job?min_replicas=2`. Only the module that torchft takes its native
classes from is replaced (tried with torchft 0.2.0); and torchft's Manager, if TORCHFT_PROACTIVE_RECOVERY is 1.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import runpy
import sys
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from ftcoord import coordination
from ftcoord.config import switch

NATIVE: Final = "torchft._torchft"
LIGHTHOUSE: Final = "TORCHFT_LIGHTHOUSE"
PROACTIVE: Final = "TORCHFT_PROACTIVE_RECOVERY"
_USAGE: Final = """usage: python -m ftcoord.torchft (SCRIPT | -m MODULE) [ARGUMENT ...]

Runs a script or a module as python would, with torchft on ftcoord. TORCHFT_LIGHTHOUSE is the address of the job:
etcd://host:2379/job?min_replicas=2"""
_NO_LIGHTHOUSE: Final = (
    "TORCHFT_LIGHTHOUSE is not set: set it to the address of the job, etcd://host:2379/job?min_replicas=2, the same for"
    " all replicas"
)


def lighthouse_main() -> NoReturn:
    """Replaces torchft's `torchft_lighthouse` command: there is nothing to run."""
    raise SystemExit(
        "no lighthouse is needed: set TORCHFT_LIGHTHOUSE=etcd://host:2379/job?min_replicas=2 for all replicas of a job"
    )


def install() -> None:
    """Put ftcoord's classes where torchft looks for its native ones. Idempotent.

    With TORCHFT_PROACTIVE_RECOVERY=1 torchft is imported, and `ftcoord.proactive.Manager` is its Manager.

    Processes that this one starts by multiprocessing ("spawn", "forkserver") get the same before they import its main
    module. Other children do not: start them by `python -m ftcoord.torchft`.

    Raises ImportError if torchft was imported before, with its own classes; and ConfigError.
    """
    proactive = switch(PROACTIVE, os.environ.get(PROACTIVE, "").strip() or "0")
    if NATIVE in sys.modules and not hasattr(sys.modules[NATIVE], "__ftcoord__"):
        raise ImportError("torchft is imported already, with its own coordination: import ftcoord.torchft before it")
    module = ModuleType(NATIVE, __doc__)
    for name in coordination.__all__:
        setattr(module, name, getattr(coordination, name))
    vars(module).update(lighthouse_main=lighthouse_main, __ftcoord__=True)
    sys.modules[NATIVE] = module
    _install_in_children()
    if proactive:
        manager = importlib.import_module("ftcoord.proactive").Manager  # which needs torchft, and that the module above
        for name in ("torchft", "torchft.manager"):
            setattr(importlib.import_module(name), "Manager", manager)  # noqa: B010


class _InstallInChild:
    """Imports `ftcoord.torchft` when a child reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (__spec__.name if __spec__ else __name__,)


def _install_in_children() -> None:
    """Add an import of this module to what multiprocessing's children read before they import the main module.

    No documented hook runs so early. An environment variable alone does nothing in a child, and a `sitecustomize` or a
    `torchft` of ours on PYTHONPATH would also be found by processes that are not meant.
    """
    prepared = spawn.get_preparation_data
    if getattr(prepared, "__ftcoord__", False):
        return

    @functools.wraps(prepared)
    def prepare(name: str) -> dict[str, object]:
        return {"ftcoord.torchft": _InstallInChild(), **prepared(name)}

    vars(prepare)["__ftcoord__"] = True
    spawn.get_preparation_data = prepare
    # Where a fork server imports the main module by default, it has torchft's own classes then; now each child does.
    multiprocessing.set_forkserver_preload([])


def main() -> None:
    """Run a script or a module as `python` would, with torchft on ftcoord. A script imports the modules beside it."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return
    module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + module:
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2)
    sys.argv = arguments[module:]
    try:
        _run(module)
    except KeyError as error:  # torchft looks it up in the environment; a script may set it itself, or need none
        if error.args != (LIGHTHOUSE,):
            raise
        raise SystemExit(_NO_LIGHTHOUSE) from None


def _run(module: bool) -> None:
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on; without it, `-m` has put the folder here
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


install()
if __name__ == "__main__":
    main()
