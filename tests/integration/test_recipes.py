"""The recipes of docs/recipes, run as they stand but for Slurm itself, which is a few lines of shell here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import SCRIPTS

from ftcoord.embedded.server import EtcdServer

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def run(recipe: str, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{SCRIPTS}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    source = str(RECIPES.parents[1])
    return subprocess.run(
        ["bash", str(RECIPES / recipe), str(SCRIPTS / script)],
        env={**os.environ, "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("recipe", "script"), [("torchrun.sbatch", "ranks.py"), ("srun.sbatch", "slurm_train.py")], ids=["torchrun", "srun"]
)
def test_a_slurm_job(etcd: EtcdServer, recipe: str, script: str) -> None:
    slurm = {"SLURM_JOB_ID": recipe, "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    done = run(recipe, script, FTCOORD_ENDPOINTS=etcd.get_endpoint(), **slurm)
    assert sorted(done.stdout.split()) == ["0/2", "1/2"], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_requeued_srun_job_is_a_run_of_its_own() -> None:
    """Of what its script is told, which the test above meets by."""
    slurm = {"SLURM_JOB_ID": "requeued", "SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
    for restarts, expected in (({}, "0"), ({"SLURM_RESTART_COUNT": "2"}, "2")):
        done = run("srun.sbatch", "told.py", FTCOORD_ENDPOINTS="h1:2379", **slurm, **restarts)
        assert done.returncode == 0, done.stderr
        assert f"/slurm-requeued-{expected}" in done.stdout


@pytest.mark.parametrize("recipe", ["torchrun.sbatch", "srun.sbatch"])
def test_a_slurm_job_that_was_not_told_where_etcd_is(recipe: str) -> None:
    done = run(recipe, "ranks.py", FTCOORD_ENDPOINTS="")
    assert done.returncode != 0
    assert "say where etcd is" in done.stderr
