"""`python -m ftcoord.torchft` runs a script as `python` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ftcoord


@pytest.mark.parametrize("options", [[], ["-P"]], ids=["as ever", "safe path"])
def test_the_modules_beside_a_script_can_be_imported(options: list[str], tmp_path: Path) -> None:
    """From whatever folder it is run; and not with -P, which python has for that."""
    if options and sys.version_info < (3, 11):
        pytest.skip("there is no -P")
    job = tmp_path / "job"
    job.mkdir()
    (job / "beside.py").write_text("WORD = 'found'\n")
    (job / "train.py").write_text(
        "import sys\ntry:\n    import beside\nexcept ImportError:\n    print('missed', *sys.argv[1:])\n"
        "else:\n    print(beside.WORD, *sys.argv[1:])\n"
    )
    source = str(Path(str(ftcoord.__file__)).parent.parent)

    def printed(*program: str) -> str:
        command = [sys.executable, *options, *program, "job/train.py", "--step", "1"]
        env = {**os.environ, "PYTHONPATH": source}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    expected = "missed --step 1\n" if options else "found --step 1\n"
    assert printed() == printed("-m", "ftcoord.torchft") == expected
