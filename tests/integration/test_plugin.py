"""What torch sees of the package before anybody asks for it: a registered name, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IMPORTS = [
    "import torch.distributed.elastic.rendezvous",
    "import torch.distributed.elastic.rendezvous.registry",
    "import torch.distributed.run",
    "import ftcoord, torch.distributed.run",
    "import ftcoord.store, torch.distributed.run",
    "import ftcoord.rendezvous.handler",
    "import ftcoord.rendezvous.create",
    "from ftcoord import EtcdStore, EtcdServer",
]
REGISTRY = """
import json, sys
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("ftcoord", "grpc", "google"))
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
import torch.distributed.elastic.rendezvous.registry
print(json.dumps([loaded, "etcd-v3" in rendezvous_handler_registry._registry]))
"""


def after(statement: str) -> tuple[list[str], bool]:
    """What of ours a fresh Python has loaded after this statement, and whether torchrun then knows etcd-v3."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", statement + REGISTRY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    loaded, registered = json.loads(done.stdout)
    return loaded, registered


@pytest.mark.parametrize("statement", IMPORTS)
def test_the_name_is_registered_whatever_is_imported_first(statement: str) -> None:
    assert after(statement)[1]


@pytest.mark.parametrize("statement", IMPORTS[:3])
def test_torch_alone_loads_the_leaf_and_no_grpc(statement: str) -> None:
    assert set(after(statement)[0]) <= {"ftcoord", "ftcoord._torchrun"}


def test_ftcoord_alone_loads_nothing_heavy() -> None:
    heavy = "import sys, ftcoord; print([name for name in ('torch', 'grpc', 'google.protobuf') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
