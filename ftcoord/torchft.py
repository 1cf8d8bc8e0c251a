"""torchft on ftcoord: `import ftcoord.torchft` before torchft, or, where a script cannot be changed,

    python -m ftcoord.torchft train.py --its-arguments        (or -m module)
    torchrun --nproc-per-node=4 -m ftcoord.torchft train.py

TORCHFT_LIGHTHOUSE is then `etcd://h1:2379,h2:2379/job?min_replicas=2`. Only the module that torchft takes its native
classes from is replaced (tried with torchft 0.2.0); and torchft's Manager, if TORCHFT_PROACTIVE_RECOVERY is 1.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from ftcoord import coordination
from ftcoord.errors import ConfigError

NATIVE: Final = "torchft._torchft"
PROACTIVE: Final = "TORCHFT_PROACTIVE_RECOVERY"
_USAGE: Final = "usage: python -m ftcoord.torchft (SCRIPT | -m MODULE) [ARGUMENT ...]"


def lighthouse_main() -> NoReturn:
    """Replaces torchft's `torchft_lighthouse` command: there is nothing to run."""
    raise SystemExit(
        "no lighthouse is needed: set TORCHFT_LIGHTHOUSE=etcd://host:2379/job?min_replicas=2 for all replicas of a job"
    )


def install() -> None:
    """Put ftcoord's classes where torchft looks for its native ones. Idempotent.

    With TORCHFT_PROACTIVE_RECOVERY=1 torchft is imported, and `ftcoord.proactive.Manager` is its Manager.

    Raises ImportError if torchft was imported before, with its own classes; and ConfigError.
    """
    proactive = os.environ.get(PROACTIVE) or "0"
    if proactive not in ("0", "1"):
        raise ConfigError(PROACTIVE, proactive, "set it to 1 to abort collectives when a peer is lost, or to 0")
    if NATIVE in sys.modules and not hasattr(sys.modules[NATIVE], "__ftcoord__"):
        raise ImportError("torchft is imported already, with its own coordination: import ftcoord.torchft before it")
    module = ModuleType(NATIVE, __doc__)
    for name in coordination.__all__:
        setattr(module, name, getattr(coordination, name))
    vars(module).update(lighthouse_main=lighthouse_main, __ftcoord__=True)
    sys.modules[NATIVE] = module
    if proactive == "1":
        manager = importlib.import_module("ftcoord.proactive").Manager  # which needs torchft, and that the module above
        for name in ("torchft", "torchft.manager"):
            setattr(importlib.import_module(name), "Manager", manager)  # noqa: B010


def main() -> None:
    """Run a script or a module as `python` would, with torchft on ftcoord. A script imports the modules beside it."""
    arguments = sys.argv[1:]
    module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + module:
        raise SystemExit(_USAGE)
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on; without it, `-m` has put the folder here
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


install()
if __name__ == "__main__":
    main()
