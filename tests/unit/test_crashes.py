"""A process that crashes is noticed, whoever looks at its end, and only once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import crashes
import pytest

DIE = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.kill(os.getpid(), int(sys.argv[1]))
"""
LOOKS: dict[str, Callable[[Any], object]] = {
    "run": subprocess.run,
    "wait": lambda command: subprocess.Popen(command).wait(),
    "communicate": lambda command: subprocess.Popen(command, stdout=subprocess.PIPE).communicate(),
    "with": lambda command: subprocess.Popen(command).__exit__(None, None, None),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_crash_is_noticed_once(look: str) -> None:
    LOOKS[look]([sys.executable, "-c", DIE, str(int(signal.SIGSEGV))])
    (said,) = crashes.crashed()
    assert said.endswith("ended by SIGSEGV")
    assert crashes.crashed() == []
