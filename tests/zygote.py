"""A process that loads torch and ftcoord once, and forks the programs that it is told of; see warm.py.
`zygote.py SOCKET [without-torch] [whole]`

The agents among them have a zygote of their own, which forks their workers: these are the agents' children, as ever.
"""

from __future__ import annotations

import abc
import builtins
import ctypes
import gc
import io
import json
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Final

ROOM: Final = 1 << 16
"""Bytes for the environment of a program: this process is started with as many, to be written over."""
LARGEST: Final = 1 << 17
"""Bytes of a request."""
WITHOUT_TORCH: Final = "without-torch"
WHOLE: Final = "whole"
AGENT: Final = ["-m", "torch.distributed.run"]
_ENVIRONMENT: Final = 47
"""In /proc/PID/stat, behind the name of the program: where the environment begins; where it ends is next."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_STREAMS: Final = (0, 3, 5)
"""Among the descriptors that subprocess makes: the child's standard input, output and errors; -1 for the parent's."""

# -- who asks ---------------------------------------------------------------------------------------------------------


class Forks:
    """One end of a socket; at the other one is a zygote."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        """Start a program with these standard streams; its pid. It has become what it is by then."""
        return self._ask({"fork": order}, streams)

    def reap(self, pid: int) -> int:
        """How a process ended that has, as `os.wait` says it. Nobody may use its pid any longer."""
        return self._ask({"reap": pid}, [])

    def _ask(self, order: dict[str, Any], descriptors: list[int]) -> int:
        socket.send_fds(self._end, [json.dumps(order).encode()], descriptors)
        answer = self._end.recv(LARGEST)
        assert answer, "the zygote has ended"
        return int(answer)


class Forked(abc.ABC):
    """What a Popen does in the place of fork and exec; `more` is what subprocess says from Python 3.10 on."""

    pid: int

    @abc.abstractmethod
    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        """Start a program with these standard streams; its pid."""

    def _execute_child(self, args: Any, _executable: Any, *more: Any) -> None:
        _preexec, _close, _pass, cwd, env, _startup, _flags, _shell, *pipes = more[:14]
        environment = dict(os.environ if env is None else env)
        order = {"arguments": list(args[1:]), "environment": environment, "folder": str(cwd or os.getcwd())}
        streams = [number if pipes[place] == -1 else pipes[place] for number, place in enumerate(_STREAMS)]
        try:
            self.pid = self.fork(order, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Worker(Forked, subprocess.Popen[Any]):
    """What torch's agent starts, if that is a program that loads torch; others start as ever."""

    forks: Forks

    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # who loses its parent now becomes a child of this process
        try:
            return self.forks.fork(order, streams)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _execute_child(self, args: Any, *more: Any) -> None:
        inherits = Forked if args[:2] == (sys.executable, "-u") and loads_torch(args[2]) else subprocess.Popen
        inherits._execute_child(self, args, *more)  # type: ignore[attr-defined]


MAKES_OPTIMIZERS: Final = re.compile(r"\btorch\.optim\b")
LOADS_TORCH: Final = re.compile(r"^(import|from) torch\b", re.MULTILINE)


def loads_torch(script: str) -> bool:
    return os.path.isfile(script) and LOADS_TORCH.search(Path(script).read_text()) is not None


# -- the zygote -------------------------------------------------------------------------------------------------------


def main(requests: socket.socket, *how: str) -> None:
    """Load and serve; in a child, run."""
    if WITHOUT_TORCH in how:
        load_ftcoord()
    else:
        load_torch()
        if WHOLE not in how:
            spare_globals()
        load_ftcoord()
        load_rendezvous()
    settle()
    order = serve(requests, is_parent=True)
    if order["arguments"][:2] == AGENT:
        order = keep_zygote() or order
    run(order["arguments"])


def load_torch() -> None:
    """What torchrun, its workers and the tests' scripts load of torch, and nothing that starts a thread."""
    import torch.distributed.elastic.multiprocessing.errors
    import torch.distributed.launcher.api
    import torch.distributed.run
    import torch.nn.parallel  # noqa: F401


def makes_optimizers(arguments: list[str]) -> bool:
    """Whether a script is among them, or a program, that makes one of torch's."""
    scripts = [Path(one) for one in re.findall(r"[^\s'\"]+\.py\b", " ".join(arguments))]
    return any(MAKES_OPTIMIZERS.search(script.read_text()) for script in scripts if script.is_file())


def load_compiler() -> None:
    """What torch loads with the first optimizer that a process makes, for two seconds, also when nothing is compiled;
    again this does nothing."""
    if "torch._dynamo" not in sys.modules:
        import torch._dynamo  # noqa: F401

        settle()


def load_ftcoord() -> None:
    """What needs no torch, gRPC among it."""
    import ftcoord.coordination
    import ftcoord.heartbeat
    import ftcoord.timer  # noqa: F401


def load_rendezvous() -> None:
    """What needs torch."""
    import ftcoord.rendezvous.handler
    import ftcoord.timer.etcd_timer  # noqa: F401


def settle() -> None:
    """Be what children may be forked from."""
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in all children"
    gc.freeze()  # collected in the end of each child, all that was loaded would cost it half a second


def spare_globals() -> None:
    """Let the end of a child not destroy the globals of torch's C++ libraries, which takes it a third of a second. What
    is Python's has ended by then, and what is loaded from now on, as gRPC is, ends before."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # with the exit code, which is passed to it
    libc.on_exit(libc.fcloseall, None)  # comes before that


def serve(requests: socket.socket, is_parent: bool) -> dict[str, Any]:
    """Do as told until nobody tells, and end then; a child returns what it is to run.

    Args:
        is_parent: of what it forks. If not, whoever asks takes the children that lose their parent.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, LARGEST, 3)
        if not message:
            os._exit(0)
        order = json.loads(message)
        if "fork" in order and is_parent and makes_optimizers(order["fork"]["arguments"]):
            load_compiler()
        if "reap" in order:
            answer = os.waitpid(order["reap"], 0)[1]
        elif (pid := fork(order["fork"], descriptors, is_parent)) is None:
            requests.close()
            return dict(order["fork"])
        else:
            answer = pid
        requests.send(b"%d" % answer)
        for descriptor in descriptors:
            os.close(descriptor)


def fork(order: dict[str, Any], streams: list[int], is_parent: bool) -> int | None:
    """The pid of the child, which is what it is to be; None in the child."""
    ours, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        if not is_parent and os.fork():
            os._exit(0)
        ours.close()
        become(order, streams)
        its.send(b"%d" % os.getpid())
        its.recv(1)  # the end: its parent is whose child it is to be
        its.close()
        return None
    its.close()
    with ours:
        pid = int(ours.recv(64))
        if not is_parent:
            os.waitpid(child, 0)
    return pid


def become(order: dict[str, Any], streams: list[int]) -> None:
    """What exec would do."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    show_environment()
    os.chdir(order["folder"])


def show_environment() -> None:
    """Write it where /proc/PID/environ reads it. libc has copies of its own of all that was set by now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(one) for one in fields[_ENVIRONMENT : _ENVIRONMENT + 2])
    shown = b"".join(b"%s=%s\0" % pair for pair in os.environb.items())
    assert len(shown) <= end - start, f"{len(shown)} bytes of environment: raise ROOM"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


# -- what is forked ---------------------------------------------------------------------------------------------------


def keep_zygote() -> dict[str, Any] | None:
    """Give torch's agent one before it has threads or gRPC. In a worker, which that forks: what it is to run."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        own.close()
        os.setsid()
        for number in range(3):  # pipes, which end with the agent
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        return serve(its, is_parent=False)
    its.close()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    Worker.forks = Forks(own)
    subprocess_handler.Popen = Worker  # type: ignore[misc]
    return None


def run(arguments: list[str]) -> None:
    """A program in `__main__`, as a Python with these arguments does it, to its end."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout, sys.stderr = (unbuffered(number) for number in (1, 2))
    source, name, sys.argv, sys.path[0] = program(arguments)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in own if folder and folder not in sys.path]
    code = compile(source, name, "exec")
    # Of its own: in the end the collector takes the globals apart, and it does not look at what was there before.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = name, builtins  # type: ignore[attr-defined]
    exec(code, main.__dict__)


def unbuffered(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(descriptor, "wb", 0, closefd=False), write_through=True)  # type: ignore[arg-type]


def program(arguments: list[str]) -> tuple[str, str, list[str], str]:
    """The source and the name of its file, `sys.argv`, `sys.path[0]`."""
    if arguments[:2] == AGENT:  # as the command torchrun does
        source = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
        return source, "torchrun", ["torchrun", *arguments[2:]], os.getcwd()
    if arguments[0] == "-m":
        source = f"import runpy\nrunpy.run_module({arguments[1]!r}, run_name='__main__', alter_sys=True)\n"
        return source, arguments[1], arguments[1:], os.getcwd()
    if arguments[0] == "-c":
        return arguments[1], "<string>", ["-c", *arguments[2:]], ""
    script = Path(arguments[0])
    return script.read_text(), str(script), arguments, str(script.parent.resolve())


if __name__ == "__main__":
    import zygote  # programs have __main__ for themselves

    zygote.main(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:])
