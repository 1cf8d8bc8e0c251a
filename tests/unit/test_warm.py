"""What the tests start with torch already loaded is a process like any other; see tests/warm.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import crashes
import pytest
import warm
from helpers import DEADLINE

from ftcoord.primitives.orphans import environment_of

TELL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "session": os.getsid(0), "name": __name__,
    "threads": len(os.listdir("/proc/self/task")), "modules": sorted({name.split(".")[0] for name in sys.modules}),
}))
sys.stdin.read()  # the environment of a process that has ended cannot be read
"""


def test_it_is_what_its_command_says(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    for arguments, path in ((["-c", TELL], ""), ([str(tmp_path / "tell.py")], str(tmp_path))):
        with warm.python(*arguments, "one", cwd=tmp_path, env={"OF_THE": "test"}) as process:
            assert {**environment_of(process.pid), "": ""} == {"OF_THE": "test", "": ""}
            told = json.loads(process.communicate(timeout=DEADLINE)[0])
            assert (told["argv"], told["path"], told["folder"]) == ([arguments[0], "one"], path, str(tmp_path))
            assert (told["session"], told["name"], told["threads"]) == (process.pid, "__main__", 1)
            assert {"torch", "ftcoord", "grpc"} <= set(told["modules"])
            assert not {"prometheus_client", "pytest", "helpers", "warm"} & set(told["modules"])


@pytest.mark.parametrize("look", [lambda process: process.wait(), lambda process: process.communicate()])
def test_a_crash_of_it_is_noticed(look: Callable[[warm.Popen], object]) -> None:
    crash = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"
    with warm.python("-c", crash) as process:
        look(process)
    (said,) = crashes.crashed()
    assert said.endswith("ended by SIGABRT")


def test_workers_are_children_of_their_agent_with_an_environment_of_their_own(tmp_path: Path) -> None:
    """Whether they load torch, as agents start two then, or not."""
    tell = "\nimport json, os, sys\nprint(json.dumps([os.getppid(), os.getpid(), 'torch' in sys.modules]))\n"
    for number, first in enumerate(("import torch", "")):
        script = tmp_path / f"worker{number}.py"
        script.write_text(first + tell + "sys.stdin.read()")
        command = ("-m", "torch.distributed.run", "--standalone", "--rdzv-backend=c10d", str(script))
        with warm.python(*command) as agent:
            assert agent.stdout is not None
            parent, worker, has_torch = json.loads(agent.stdout.readline())
            assert (parent, has_torch) == (agent.pid, not number)
            assert environment_of(worker)["LOCAL_RANK"] == "0"
            agent.communicate(timeout=DEADLINE)
            assert agent.returncode == 0
