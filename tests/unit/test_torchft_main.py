"""`python -m ftcoord.torchft` runs a script as `python` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NEEDS_TORCHFT

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


def run(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m ftcoord.torchft` with these arguments, and no lighthouse but that of `env`."""
    source = str(Path(str(ftcoord.__file__)).parent.parent)
    own = {name: value for name, value in os.environ.items() if name != "TORCHFT_LIGHTHOUSE"}
    command = [sys.executable, "-m", "ftcoord.torchft", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**own, "PYTHONPATH": source, **env}, capture_output=True, text=True, check=False
    )


def test_the_usage_is_printed_where_it_is_asked_for_or_needed(tmp_path: Path) -> None:
    for asked in ("--help", "-h"):
        told = run(asked, folder=tmp_path)
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.startswith("usage: python -m ftcoord.torchft (SCRIPT | -m MODULE)")
    for lacks in ((), ("-m",)):
        told = run(*lacks, folder=tmp_path)
        assert (told.returncode, told.stdout) == (2, "")
        assert told.stderr.startswith("usage: python -m ftcoord.torchft (SCRIPT | -m MODULE)")


def test_a_missing_lighthouse_is_one_line(tmp_path: Path) -> None:
    """It is missing when torchft looks for it; a script may set it itself."""
    script = tmp_path / "train.py"
    script.write_text("import os\nprint(os.environ['TORCHFT_LIGHTHOUSE'])\n")
    told = run(str(script), folder=tmp_path)
    assert told.returncode == 1
    assert told.stderr.startswith("TORCHFT_LIGHTHOUSE is not set: set it to the address of the job, etcd://")
    assert told.stderr.count("\n") == 1
    assert run(str(script), folder=tmp_path, TORCHFT_LIGHTHOUSE="etcd://h/job").stdout == "etcd://h/job\n"
    script.write_text("{}['RANK']\n")
    assert "KeyError: 'RANK'" in run(str(script), folder=tmp_path).stderr


SPAWNS = """
import multiprocessing, os, sys
import torchft._torchft  # at the top, so a child that imports this module does it first

def report(number=0):
    what = "replaced" if hasattr(sys.modules["torchft._torchft"], "__ftcoord__") else "native"
    os.write(1, f"{what}\\n".encode())  # at once: two processes report at the same time

if __name__ == "__main__":
    report()
    if sys.argv[1] == "torch":
        import torch.multiprocessing
        torch.multiprocessing.spawn(report, nprocs=2)
    else:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=report)
        child.start()
        child.join()
        assert child.exitcode == 0
"""


@NEEDS_TORCHFT
@pytest.mark.parametrize(
    ("main", "way", "processes"),
    [("spawns.py", "torch", 3), ("spawns.py", "spawn", 2), ("-m spawns", "spawn", 2), ("spawns.py", "forkserver", 2)],
)
def test_what_is_replaced_here_is_replaced_in_the_processes_that_it_spawns(
    main: str, way: str, processes: int, tmp_path: Path
) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    told = run(*main.split(), way, folder=tmp_path)
    assert (told.returncode, told.stdout) == (0, "replaced\n" * processes), told.stderr
