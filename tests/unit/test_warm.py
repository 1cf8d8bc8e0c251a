"""What the tests start with torch already loaded is a process like any other; see tests/warm.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import crashes
import pytest
import warm
from helpers import DEADLINE, eventually

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


def test_the_interpreter_has_its_options() -> None:
    tell = "import sys; print(sys.flags.dev_mode, sys.warnoptions, sys.argv)"
    for run in (partial(warm.run, torch=False), cold):
        done = run("-X", "dev", "-W", "ignore", "-c", tell)
        assert done.stdout == "True ['default', 'ignore'] ['-c']\n", done.stderr


END = """
import atexit, ctypes, os, signal, sys
atexit.register(print, 'the end')
class Last:
    def __del__(self):
        ctypes.CDLL(None).puts(b"of all")  # Python's own output has ended
last = Last()
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("pass", 0, "the end\nof all\n"),
        ("sys.exit(3)", 3, "the end\nof all\n"),
        ("1/0", 1, "the end\nof all\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "the end\nof all\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_a_python_does(how: str, code: int, said: str) -> None:
    """Whether torch is loaded or not; also its globals end, and what C has buffered is written."""
    for run in (warm.run, partial(warm.run, torch=False), cold):
        done = run("-c", END + how)
        assert (done.returncode, done.stdout) == (code, said), done.stderr


def cold(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_its_pid_is_its_own_until_it_is_waited_for(number: int) -> None:
    with warm.python("-c", WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, number)
        eventually(lambda: state(process.pid) == "Z", "it ends")
        assert process.wait(DEADLINE) == -number == process.poll()
        eventually(lambda: not Path(f"/proc/{process.pid}").exists(), "it is gone")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("look", [lambda process: process.wait(), lambda process: process.communicate()])
def test_a_crash_of_it_is_noticed(look: Callable[[warm.Popen], object]) -> None:
    crash = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"
    with warm.python("-c", crash) as process:
        look(process)
    (said,) = crashes.crashed()
    assert said.endswith("ended by SIGABRT")


def test_what_torch_reads_while_it_is_loaded_starts_cold() -> None:
    with pytest.raises(AssertionError, match="start it cold"):
        warm.run("-c", "", env={"LOGLEVEL": "INFO"})


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
