"""What torch sees of the package before anybody asks for it: a registered name, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

IMPORTS = [
    "import torch.distributed.elastic.rendezvous",
    "import torch.distributed.elastic.rendezvous.registry",
    "import torch.distributed.run",
    "import ftcoord, torch.distributed.run",
    "import ftcoord.store, torch.distributed.run",
    "import ftcoord.rendezvous.handler",
    "from ftcoord import EtcdStore, EtcdServer",
]
EACH = """
import gc, os, sys
import torch
gc.freeze()  # collected in the end of each child, all of torch would cost it half a second
loaded = [name for name in sys.modules if name.startswith(("torch.distributed.elastic", "ftcoord"))]
assert not loaded, loaded
for statement in sys.argv[1:]:
    if not os.fork():
        exec(statement)
        break
    assert os.wait()[1] == 0, statement
"""
"""All of torch but what a statement may load in another order, which costs most, is loaded once."""
REGISTRY = """
import json, sys
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("ftcoord", "grpc", "google"))
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
import torch.distributed.elastic.rendezvous.registry
print(json.dumps([loaded, "etcd-v3" in rendezvous_handler_registry._registry]), flush=True)
"""


def test_the_name_is_registered_whatever_is_imported_first() -> None:
    """And torch alone loads the leaf, and no gRPC."""
    statements = [statement + REGISTRY for statement in IMPORTS]
    command = [sys.executable, "-W", "error::UserWarning", "-c", EACH, *statements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    told = dict(zip(IMPORTS, map(json.loads, done.stdout.splitlines()), strict=True))
    assert [statement for statement, (_, registered) in told.items() if not registered] == []
    for statement in IMPORTS[:3]:
        assert set(told[statement][0]) <= {"ftcoord", "ftcoord._torchrun"}, statement
