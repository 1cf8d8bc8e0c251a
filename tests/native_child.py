"""torchft's native classes, told what to do by JSON lines on standard input. Nothing of ftcoord or torch is loaded.

Each line is `{"id": n, "do": name, "with": {...}}`, and is answered by `{"id": n, "is": ...}` or
`{"id": n, "error": [type, text]}`, in any order: each runs on a thread of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")


def load_native() -> Any:
    """`torchft._torchft` without torchft's `__init__`, which takes seconds to import torch."""
    package = importlib.util.find_spec("torchft")
    assert package is not None, "torchft is not installed"
    assert package.submodule_search_locations is not None
    (file,) = Path(package.submodule_search_locations[0]).glob("_torchft*.so")
    spec = importlib.util.spec_from_file_location("torchft._torchft", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = load_native()
managers: dict[str, tuple[Any, list[Any]]] = {}
clients: dict[str, Any] = {}
CONNECT = timedelta(seconds=60)
RESULT = (
    *("quorum_id", "replica_rank", "replica_world_size", "heal", "replica_ids", "store_address"),
    *("recover_src_manager_address", "recover_src_replica_rank", "recover_dst_replica_ranks"),
    *("max_step", "max_replica_rank", "max_world_size"),
)
MEMBER = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data")


def manager(name: str, lighthouse: str, retries: int = 0, world_size: int = 1) -> str:
    beats = timedelta(milliseconds=100)
    server = native.ManagerServer(
        name, lighthouse, "127.0.0.1", "[::]:0", f"store-of-{name}", world_size, beats, CONNECT, retries
    )
    ranks = [native.ManagerClient(server.address(), CONNECT) for _ in range(world_size)]
    managers[name] = (server, ranks)
    return str(server.address())


def connect(name: str, address: str, ranks: int = 1) -> None:
    """Be ranks of a manager that is elsewhere."""
    managers[name] = (None, [native.ManagerClient(address, CONNECT) for _ in range(ranks)])


def commit(name: str, rank: int, step: int, yes: bool = True, timeout: float = 60) -> bool:
    client = managers[name][1][rank]
    return bool(client.should_commit(rank, step, yes, timeout=timedelta(seconds=timeout)))


def quorum(name: str, rank: int = 0, step: int = 0, failures: int = 0, timeout: float = 60) -> dict[str, Any]:
    result = managers[name][1][rank]._quorum(
        group_rank=rank,
        step=step,
        checkpoint_metadata=f"weights of {name}",
        shrink_only=False,
        init_sync=True,
        commit_failures=failures,
        timeout=timedelta(seconds=timeout),
    )
    return {field: getattr(result, field) for field in RESULT}


def metadata(address: str, rank: int) -> str:
    return str(native.ManagerClient(address, CONNECT)._checkpoint_metadata(rank, timeout=CONNECT))


def client_quorum(lighthouse: str, name: str, timeout: float, **request: Any) -> dict[str, Any]:
    found = client(lighthouse).quorum(name, timedelta(seconds=timeout), **request)
    members = [{field: getattr(one, field) for field in MEMBER} for one in found.participants]
    return {"quorum_id": found.quorum_id, "created": found.created.seconds, "members": members}


def beat(lighthouse: str, name: str, timeout: float = 5) -> None:
    client(lighthouse).heartbeat(name, timedelta(seconds=timeout))


def client(lighthouse: str) -> Any:
    if lighthouse not in clients:
        clients[lighthouse] = native.LighthouseClient(lighthouse, CONNECT)
    return clients[lighthouse]


DO = {one.__name__: one for one in (manager, connect, quorum, commit, metadata, client_quorum, beat)}


def answer(line: str) -> None:
    order = json.loads(line)
    try:
        said = {"is": DO[order["do"]](**order["with"])}
    except Exception as error:  # whatever it is, the parent is told of it
        said = {"error": [type(error).__name__, str(error)]}
    os.write(1, json.dumps({"id": order["id"], **said}).encode() + b"\n")


if __name__ == "__main__":
    assert "ftcoord" not in sys.modules
    for order in sys.stdin:
        threading.Thread(target=answer, args=(order,), daemon=True).start()
    os._exit(0)  # native threads do not end
